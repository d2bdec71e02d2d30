"""Following in C++: the device's ops that come again do without Python where the compiled follower is there, and torch
gets what it wants of a device in C++."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Any

import torch

from ... import follower
from ...devices.accelerator import AcceleratorBuffer
from ...devices.arrivals import EXPECTED
from ..context import connection, guards
from . import kernels
from .doors import DOORS, device_options, existing
from .queues import Event
from .random import Generator


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    """What torch asks of an accelerator, as far as Python may answer."""

    def is_available(self) -> bool:
        return True

    def has_primary_context(self, dev_id: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


def register(name: str, module: ModuleType, guard: Any) -> None:
    """Give torch a device of a name: its module, its hooks, which are C++ where that is there, and its guard."""
    follower.enter(device_options(), connection.load, guards.renew)
    torch.utils.rename_privateuse1_backend(name)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch._register_device_module(name, module)
    if not follower.give_hooks(_state):
        torch._C._acc.register_python_privateuseone_hook(_Hooks())
    torch._C._acc.register_python_privateuseone_device_guard(guard)


def begin() -> None:
    """Have the device's ops followed in C++ as soon as that can be. The device and its kernels are registered."""
    follower.serve(_serve)


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
    if not follower.has_hooks():
        # Torch's own word, each time that a generator is made, for how one is made if the hooks are Python's.
        warnings.filterwarnings("ignore", "GetGeneratorForPrivateuse1", DeprecationWarning)
