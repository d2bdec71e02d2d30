"""`torch.tpu`: what programs ask a device's module, under the names that `torch.cuda` and TorchTPU use."""

from __future__ import annotations

import enum
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ... import follower
from . import random
from .doors import CURRENT, DOORS, Door, is_forked, meaning, set_options
from .memory import (
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    memory_summary,
    reset_peak_memory_stats,
)
from .queues import SYNC, Event, Stream, current_stream, default_stream, index_of, set_stream, stream


def _door(device: Any = None) -> Door:
    return DOORS[index_of(device)]


def is_available() -> bool:
    """Whether there is a device."""
    return bool(DOORS)


def is_initialized() -> bool:
    """Whether the devices can be used; they can from the start."""
    return True


def init() -> None:
    """Nothing: the devices can be used from the start."""


def device_count() -> int:
    """How many devices there are."""
    return len(DOORS)


def current_device() -> int:
    """The number of the device that is meant where none is named."""
    return CURRENT[0]


def set_device(device: Any) -> None:
    """Mean this device where none is named."""
    CURRENT[0] = index_of(device)


@contextmanager
def device(device: Any) -> Iterator[None]:
    """Mean this device in the body, where none is named; None and negative numbers leave it as it is."""
    is_one = device is not None and not (isinstance(device, int) and device < 0)
    with meaning(index_of(device) if is_one else None):
        yield


def device_of(obj: Any) -> Any:
    """Mean the device of a tensor or storage in the body; of what is elsewhere none."""
    at = getattr(obj, "device", None)
    return device(at if at is not None and at.type == torch._C._get_privateuse1_backend_name() else None)


def exchange_device(device: int) -> int:
    """Mean this device from here on. Returns the one that was meant; a negative number changes nothing."""
    before = CURRENT[0]
    if device >= 0:
        set_device(device)
    return before


def synchronize(device: Any = None) -> None:
    """Run all that is pending on a device, wait for it, and raise what it has failed with."""
    _door(device).finish(SYNC)


def get_device_name(device: Any = None) -> str:
    """What kind of hardware it is."""
    return str(_door(device).device.xla.device_kind)


def get_device_properties(device: Any = None) -> Any:
    """Name, platform and memory of a device; and what programs for CUDA read, (0, 0) as its version."""
    xla = _door(device).device.xla
    return types.SimpleNamespace(
        name=str(xla.device_kind), platform=xla.platform, total_memory=mem_get_info(device)[1], id=xla.id,
        multi_processor_count=int(getattr(xla, "core_count", None) or 1), major=0, minor=0,
    )  # fmt: skip


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """(0, 0): what the number means is CUDA's."""
    return 0, 0


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What autocast may compute in."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    """Whether bfloat16 can be computed in."""
    return True


# ---- random numbers ----------------------------------------------------------------------------------------------


def manual_seed(seed: int) -> None:
    """Begin the random numbers of the current device again."""
    random.GENERATORS[CURRENT[0]].reseed(int(seed))
    _seed_the_cpus(seed)


def manual_seed_all(seed: int) -> None:
    """Begin the random numbers of all devices again."""
    for generator in random.GENERATORS:
        generator.reseed(int(seed))
    _seed_the_cpus(seed)


def _seed_the_cpus(seed: int) -> None:
    """With `rng="torch_cpu"` a device's numbers are those of the CPU's generator, which then is its random state."""
    if random.draws_as_cpu():
        torch.default_generator.manual_seed(int(seed))


def seed() -> int:
    """Begin the random numbers of the current device with a seed that nobody has chosen. Returns it."""
    drawn = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
    manual_seed(drawn)
    return drawn


def initial_seed() -> int:
    """The seed of the current device."""
    return torch.default_generator.initial_seed() if random.draws_as_cpu() else random.GENERATORS[CURRENT[0]].seed


def get_rng_state(device: Any = None) -> torch.Tensor:
    """The random state of a device: 16 bytes on the host; the CPU's state with `rng="torch_cpu"`."""
    generator = random.GENERATORS[index_of(device)]
    return torch.default_generator.get_state() if random.draws_as_cpu() else generator.state


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    """Go on with random numbers where `get_rng_state` was called."""
    generator = random.GENERATORS[index_of(device)]
    if random.draws_as_cpu():
        torch.default_generator.set_state(new_state)
    else:
        generator.state = new_state


def get_rng_state_all() -> list[torch.Tensor]:
    """The random states of all devices."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    """Go on with random numbers where `get_rng_state_all` was called."""
    for index, (_, state) in enumerate(zip(random.GENERATORS, new_states, strict=True)):
        set_rng_state(state, index)


def _is_in_bad_fork() -> bool:
    return is_forked()


# ---- modes, as TorchTPU names them -------------------------------------------------------------------------------


class EagerMode(enum.Enum):
    """How ops run, under TorchTPU's names."""

    DEFER_NEVER = "strict"
    DEFER_NEVER_AND_LAUNCH_BLOCKING = "debug"
    DEFER_AND_FUSE = "fused"


def get_eager_mode() -> EagerMode:
    """How ops run. Mode `off`, which TorchTPU has no name for, defers nothing either."""
    mode = DOORS[0].stream.config.mode
    return EagerMode.DEFER_NEVER if mode == "off" else EagerMode(mode)


class set_eager_mode:
    """Choose how ops run on all devices: from here on, or in the body of a `with`."""

    def __init__(self, mode: EagerMode):
        self._before = DOORS[0].stream.config.mode
        set_options(mode=EagerMode(mode).value)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        set_options(mode=self._before)


# Which are the module's as well.
_OF_QUEUES = (Event, Stream, current_stream, default_stream, set_stream, stream)
_OF_MEMORY = (
    *(memory_allocated, max_memory_allocated, memory_reserved, max_memory_reserved, memory_stats, memory_summary),
    *(mem_get_info, empty_cache, reset_peak_memory_stats),
)


_FOLLOWER = "it is built in the background once a program has run for a while, where there is a C++ compiler"


class _Module(types.ModuleType):
    """The module's type, for what can be assigned to."""

    @property
    def eager_mode(self) -> EagerMode:
        """How ops run on all devices; assign to it to choose another mode."""
        return get_eager_mode()

    @eager_mode.setter
    def eager_mode(self, mode: EagerMode) -> None:
        set_eager_mode(mode)

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        """What each device draws from where a program names no generator.

        Raises:
            AttributeError: there is no compiled follower, with which torch knows the device's generators.
        """
        if random.draws_as_cpu():
            return (torch.default_generator,) * device_count()
        made = follower.generators_over(random.GENERATORS)
        if made is None:
            raise AttributeError(f"{self.__name__}.default_generators is there with the compiled follower: {_FOLLOWER}")
        return made


def module(name: str, simulated: bool) -> types.ModuleType:
    """The module `torch.<name>`."""
    made = _Module(f"torch.{name}", __doc__)
    for key, value in globals().items():
        if not key.startswith("__") and key not in ("module", "annotations", "follower"):
            setattr(made, key, value)
    made.is_simulated = simulated  # type: ignore[attr-defined]
    made._initialized = True  # type: ignore[attr-defined] # else checkpoints keep no random state
    return made
