"""Following in C++: the device's ops that come again do without Python where the compiled follower is there."""

from __future__ import annotations

import warnings
from types import ModuleType

from ... import follower
from ...devices.accelerator import AcceleratorBuffer
from ...devices.arrivals import EXPECTED
from ..context import connection, guards
from . import kernels
from .doors import DOORS, device_options, existing
from .queues import Event
from .random import Generator


def begin() -> None:
    """Have the device's ops followed in C++ as soon as that can be. The device and its kernels are registered."""
    follower.serve(_serve)
    follower.enter(device_options(), connection.load, guards.renew)


def _state(index: int) -> Generator:
    """What draws for a new `torch.Generator` of a device."""
    existing(index)
    return Generator()


def _serve(module: ModuleType) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that its kernels stand in the place of others, as they are meant to
        module.serve(
            buffer_type=AcceleratorBuffer,
            expected=EXPECTED,
            devices=[(door.stream, door.device.table, door.device) for door in DOORS],
            recorded=kernels.RECORDED,
            views=kernels.VIEWS,
            make_event=Event,
            make_generator=_state,
        )
    # Torch's own word, each time that a generator is made, for how a device that was registered in Python makes one.
    warnings.filterwarnings("ignore", "GetGeneratorForPrivateuse1", DeprecationWarning)
