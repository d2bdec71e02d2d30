"""`--cuda-is-tpu`: a program that says "cuda" gets the device, for scripts in which the name is written down.

It is asked for and loud: `torch.cuda.is_available()` is then true in a process that has no CUDA. A mode of torch's
functions reads "cuda" as the device wherever a function is given it; functions of `torch.cuda` are those of the
device's own module where that has them; and what takes a device's name for itself (autocast, `GradScaler`,
`torch.load`) reads it so. What CUDA alone has (graphs, `torch.cuda.nvtx`) is refused by torch, as in any process
without CUDA.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CUDA = "cuda"
# Classes and functions that look at a device's name themselves, where they take it, and what it is without one.
_BY_NAME: tuple[tuple[Any, str, int, str, str | None], ...] = (
    (torch.amp.autocast_mode.autocast, "__init__", 1, "device_type", None),
    (torch.amp.GradScaler, "__init__", 1, "device", CUDA),
    (torch, "load", 1, "map_location", None),
)
_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class Cuda(TorchFunctionMode):
    """In its body, "cuda" is the device `name` to every function of torch's."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def there(self, value: Any) -> Any:
        """`value`, with the device in the place of CUDA."""
        if type(value) is str and (value == CUDA or value.startswith("cuda:")):
            return self.name + value[len(CUDA) :]
        if type(value) is torch.device and value.type == CUDA:
            return torch.device(self.name) if value.index is None else torch.device(self.name, value.index)
        return value

    def place(self, device: Any) -> Any:
        """The device that `.cuda(device)` means, which may be a number."""
        return self.there(torch.device(CUDA, device) if type(device) is int else CUDA if device is None else device)

    def call(self, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """What `function` returns for these arguments, with the device in the place of CUDA."""
        return function(*map(self.there, args), **{key: self.there(value) for key, value in kwargs.items()})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return _to(self, *args, **kwargs)
        if func == _IS_CUDA:
            return args[0].device.type == self.name
        return self.call(func, args, kwargs)


def _to(
    mode: Cuda,
    tensor: torch.Tensor,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    """What `Tensor.cuda` does."""
    return tensor.to(mode.place(device), non_blocking=non_blocking, memory_format=memory_format)


def _reads(mode: Cuda, original: Callable[..., Any], at: int, name: str, default: str | None) -> Callable[..., Any]:
    """`original`, which takes a device's name as argument `at`, or by `name`."""

    @functools.wraps(original)
    def reading(*args: Any, **kwargs: Any) -> Any:
        if len(args) > at:
            args = (*args[:at], mode.there(args[at]), *args[at + 1 :])
        elif name in kwargs or default is not None:
            kwargs[name] = mode.there(kwargs.get(name, default))
        return original(*args, **kwargs)

    return reading


def _process_group(mode: Cuda, original: Callable[..., Any]) -> Callable[..., Any]:
    """`init_process_group`, where "nccl" is the device's backend."""

    @functools.wraps(original)
    def init(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if backend is not None:
            backend = backend.replace("cuda:nccl", f"{mode.name}:fused_eager").replace("nccl", "fused_eager")
        kwargs.pop("device_id", None)  # what NCCL would connect with at once
        return original(backend, *args, **kwargs)

    return init


def _changes(mode: Cuda, module: types.ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """(where, name, what is there instead)"""
    for name in dir(module):
        if not name.startswith("_") and hasattr(torch.cuda, name) and callable(getattr(module, name)):
            yield torch.cuda, name, _translated(mode, getattr(module, name))
    for name in ("manual_seed", "manual_seed_all", "get_rng_state", "set_rng_state", "initial_seed"):
        yield torch.cuda.random, name, getattr(module, name)
    yield torch.cuda, "default_generators", getattr(module, "default_generators", ())
    yield torch, "Generator", _generators(mode, torch.Generator)
    yield torch.nn.Module, "cuda", lambda self, device=None: self.to(mode.place(device))
    for where, name, at, key, default in _BY_NAME:
        yield where, name, _reads(mode, getattr(where, name), at, key, default)
    for where in (torch.cuda, torch.cuda.graphs):  # asked for by optimizers: of the driver, where torch is built for it
        yield where, "is_current_stream_capturing", lambda: False
    yield torch.cuda.amp.common, "amp_definitely_not_available", lambda: False
    if torch.distributed.is_available():
        distributed = torch.distributed
        init = _process_group(mode, distributed.init_process_group)
        yield distributed, "init_process_group", init
        yield distributed.distributed_c10d, "init_process_group", init
        yield distributed, "is_nccl_available", lambda: True


def _translated(mode: Cuda, function: Any) -> Any:
    """A function of the device's module that may be given "cuda"; a class is what it is."""
    if isinstance(function, type):
        return function

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return mode.call(function, args, kwargs)

    return called


def _generators(mode: Cuda, torchs: Any) -> Any:
    """`torch.Generator`, which may be given "cuda" and is the type of whatever torch's is the type of."""

    class Kind(type(torchs)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, torchs)

    class Generator(torchs, metaclass=Kind):  # type: ignore[misc]
        def __new__(cls, device: Any = "cpu") -> Any:
            return torchs(mode.there(device))

    return Generator


@contextmanager
def cuda_is(name: str) -> Iterator[None]:
    """In the body, in this thread, a program that says "cuda" gets the registered device `name`.

    What is no function of torch's is seen by all threads: `torch.cuda.is_available()` is true in each.
    """
    mode = Cuda(name)
    changes = list(_changes(mode, getattr(torch, name)))
    before = [(where, key, vars(where)[key]) for where, key, _ in changes]
    print(f"fused_eager: cuda is {name} in this process (--cuda-is-tpu)", file=sys.stderr)
    for where, key, value in changes:
        setattr(where, key, value)
    try:
        with mode:
            yield
    finally:
        for where, key, value in before:
            setattr(where, key, value)
