"""Registering the device: its name, its module, what torch asks a backend in Python, and a kernel for each op.

Nothing of it happens on import: `register` is called, or `fused_eager.tpu` imported, and then the process has the
device to its end.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...config import resolve
from ...devices.accelerator import Accelerator
from ...errors import FusedEagerError
from ...quiet import as_kernel, uncompiled
from ...ranks import job, multi_controller
from ...xla import start
from ..collectives import kernels as collectives
from ..collectives import offered
from ..context import profiling, shutdown
from ..context.imports import after_import
from ..context.tracers import DYNAMO, have_traced, leave_us_out
from . import (
    autocast,
    backend,
    dynamo,
    exchange,
    following,
    kernels,
    lightning,
    listed,
    meant,
    random,
    replicas,
    storages,
)
from .doors import CURRENT, DOORS, Door, device_options, refuse_here, stepped, write_report
from .guard import Guard, raising_what_was_taken

_once = threading.RLock()
_registered: list[str] = []
DEFAULT = "tpu"


def register(name: str = DEFAULT) -> int:
    """Give this process the device type `name`. Does nothing if it has it already.

    Arguments:
        name: what programs call it: `torch.device(name)`, `model.to(name)`, `torch.<name>`. One for each process.

    Returns:
        How many devices there are.

    Raises:
        FusedEagerError: the process has a device of another name, or another library has registered one; or JAX was
            started with fewer devices than are asked for.
    """
    with _once:
        if _registered:
            if _registered != [name]:
                raise FusedEagerError(
                    f"this process has the device {_registered[0]!r} already, and can have no other: {name!r} was asked"
                )
            return len(DOORS)
        taken = torch._C._get_privateuse1_backend_name()
        if taken not in ("privateuseone", name) or hasattr(torch, name):
            raise FusedEagerError(f"another library has registered the device {taken!r}; one for each process is all")
        devices = _devices()
        options = device_options()
        seed = torch.initial_seed()
        for index, xla in enumerate(devices):
            DOORS.append(Door(Accelerator(name, index, xla), options))
            random.GENERATORS.append(random.Generator(seed))
        platform = devices[0].platform
        following.register(name, backend.module(name, platform == "cpu"), Guard())
        sys.modules[f"torch.{name}.pallas"] = getattr(torch, name).pallas = _Pallas(f"torch.{name}.pallas")
        sys.modules[f"torch.{name}.distributed"] = getattr(torch, name).distributed = offered.module(name)
        _patch()
        kernels.register()
        autocast.register()
        exchange.register()
        replicas.register()
        meant.watch(name)
        dynamo.serve_the_default()
        listed.enter(name)
        collectives.register(name)
        lightning.offer(name)
        os.register_at_fork(after_in_child=refuse_here)
        following.begin()
        profiling.watch()
        shutdown.arrange()
        _registered.append(name)
        # How accelerate, and transformers' Trainer with it, is told of a device that is not in its list.
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", name)
        write_report(options.report)
        kind = "simulated by the CPU" if platform == "cpu" else f"through JAX's {platform} backend"
        print(f"{name}: {len(devices)} device{'s' * (len(devices) > 1)}, {kind}", file=sys.stderr)
        return len(devices)


def registered() -> bool:
    """Whether this process has the device."""
    return bool(_registered)


class _Pallas(types.ModuleType):
    """Ops whose lowering is the user's own, by TorchTPU's name for them: imported when one is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name not in ("jax_op", "pallas_op"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}: it has jax_op and pallas_op")
        from ..kernels import declare, pallas

        return declare.jax_op if name == "jax_op" else pallas.pallas_op


def _devices() -> list[Any]:
    """The devices of JAX's that do the work, as the options say."""
    options = resolve()
    if options.collectives != "host":
        multi_controller.join(options.progress)
    count = options.devices
    wanted = count or _local_ranks()
    if wanted and not _has_started():
        jax.config.update("jax_num_cpu_devices", wanted)  # where the CPU turns out to be the best
    platform = options.platform or _best()
    if platform == "cpu" and count:
        found = start("cpu")
        if len(found) < count:
            raise FusedEagerError(
                f"{count} devices were asked for (FUSED_EAGER_DEVICES), and JAX was started with {len(found)}: "
                "register the device before anything uses JAX, or start JAX with jax_num_cpu_devices"
            )
        return found[:count]
    try:
        found = start(platform)
    except RuntimeError as error:
        raise FusedEagerError(f"option 'platform' is {platform!r}, which JAX cannot start: {error}") from error
    return found[: count or len(found)]


def _local_ranks() -> int:
    """How many processes a launcher has started on this machine, as torchrun tells: each may take the device of its
    number, `set_device(int(os.environ["LOCAL_RANK"]))`, as programs do everywhere. 0 where there is no launcher, or JAX
    was told a number of its own."""
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    is_told = jax.config.jax_num_cpu_devices >= 0 or "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    return int(given) if given.isdecimal() and not is_told else 0


def _has_started() -> bool:
    return bool(jax._src.xla_bridge._backends)


def _best() -> str:
    try:
        return str(start()[0].platform)
    except RuntimeError:
        return "cpu"


_TWO_ACCELERATORS = (
    "a backward pass over tensors of another accelerator was asked for in a process that has the device {0}: torch has "
    "one accelerator in a process, which is {0}. Compute the one in a process without the other"
)


def _patch() -> None:
    """What torch has no hook for, of a device that is registered in Python alone."""
    have_traced(stepped)
    register_optimizer_step_post_hook(uncompiled(stepped))
    after_import(DYNAMO, nullcontext, leave_us_out)
    graph = torch.autograd.graph
    run = graph._engine_run_backward

    @functools.wraps(run)
    def in_this_thread(*args: Any, **kwargs: Any) -> Any:
        # The engine has a thread for each device that the guard knows of, and that is one; with another it asserts.
        # All ops of a device are in program order anyway.
        before = torch._C._is_multithreading_enabled()
        torch._C._set_multithreading_enabled(False)
        try:
            with job.explained(lambda: job.here("backward")), raising_what_was_taken():
                return run(*args, **kwargs)
        except RuntimeError as error:
            if "opt_ready_stream" in str(error):  # torch's own assertion
                raise RuntimeError(_TWO_ACCELERATORS.format(torch._C._get_privateuse1_backend_name())) from error
            raise
        finally:
            torch._C._set_multithreading_enabled(before)

    graph._engine_run_backward = in_this_thread
    torch.autograd._engine_run_backward = in_this_thread  # type: ignore[attr-defined]

    new = torch.UntypedStorage.__new__

    def made(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        # torch would ask the device's allocator, which a backend in Python cannot have, and end the process.
        kind = None if device is None else torch.device(device)
        if kind is None or kind.type != _registered[0]:
            named = {} if device is None else {"device": device}
            return new(cls, *args, **named, **kwargs)
        index = CURRENT[0] if kind.index is None else kind.index
        if args and not isinstance(args[0], int):
            host = new(cls, *args, **kwargs)
            made = storages.untyped(host.nbytes(), index)
            made.copy_(host)
            return made
        return storages.untyped(args[0] if args else int(kwargs.get("size", 0)), index)

    torch.UntypedStorage.__new__ = as_kernel(made)  # type: ignore[method-assign,assignment,unused-ignore]

    for method, ours in _STORAGE.items():
        _serve_storages(method, ours)

    for named, ours in _ACCELERATOR.items():
        _ask_backend((torch.accelerator, torch.accelerator.memory), named, ours)
    for named, ours in _CURRENT.items():
        _ask_backend((torch._C,), named, ours)


# Methods of a storage for which torch would ask the backend's hooks or its allocator in C++, or read its address.
_STORAGE: dict[str, Callable[..., Any]] = {
    "resize_": storages.resized,
    "new": storages.new,
    "_byteswap": storages.byteswap,
    "_share_fd_cpu_": storages.stays_here,
    "_share_filename_cpu_": storages.stays_here,
}


def _serve_storages(method: str, ours: Callable[..., Any]) -> None:
    """Have a method of `torch.UntypedStorage` be ours for storages of the device."""
    torchs = getattr(torch.UntypedStorage, method)

    def called(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        return (ours if self.device.type == _registered[0] else torchs)(self, *args, **kwargs)

    setattr(torch.UntypedStorage, method, as_kernel(functools.wraps(torchs)(called)))


# What `torch.accelerator` asks a device's guard and its allocator in C++, and who answers instead.
_ACCELERATOR: dict[str, Callable[..., Any]] = {
    "synchronize": backend.synchronize,
    "memory_allocated": backend.memory_allocated,
    "max_memory_allocated": backend.max_memory_allocated,
    "memory_reserved": backend.memory_reserved,
    "max_memory_reserved": backend.max_memory_reserved,
    "memory_stats": backend.memory_stats,
    "reset_peak_memory_stats": backend.reset_peak_memory_stats,
    "reset_accumulated_memory_stats": lambda device=None: None,
    "get_memory_info": backend.mem_get_info,
    "empty_cache": backend.empty_cache,
    "empty_host_cache": lambda: None,
}

# Which device and stream is meant where none is named, by what `torch.accelerator` and Dynamo call for it: a device's
# guard in C++ knows one of each.
_CURRENT: dict[str, Callable[..., Any]] = {
    "_accelerator_getDeviceIndex": backend.current_device,
    "_accelerator_setDeviceIndex": backend.set_device,
    "_accelerator_exchangeDevice": backend.exchange_device,
    "_accelerator_maybeExchangeDevice": backend.exchange_device,
    "_accelerator_getStream": backend.current_stream,
    "_accelerator_setStream": backend.set_stream,
}


def _ask_backend(homes: Sequence[Any], name: str, ours: Callable[..., Any]) -> None:
    """Have a function of torch's be asked of the device's module, where the accelerator is the device."""
    torchs = getattr(homes[0], name, None)
    if torchs is None:
        return

    @functools.wraps(torchs)
    def asked(*args: Any, **kwargs: Any) -> Any:
        kind = torch.accelerator.current_accelerator()
        return (ours if kind is not None and kind.type == _registered[0] else torchs)(*args, **kwargs)

    for home in homes:
        if getattr(home, name, None) is torchs:
            setattr(home, name, asked)
