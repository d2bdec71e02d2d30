"""Doors: one for each device, behind which its ops are recorded in one stream, whichever thread they come from.

Autograd's threads, DataLoader's and the program's own all see the same tensors, and most of them are pending; so the
stream belongs to the device. What the options say of the mode is said for the process.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fused_eager.fusion_rules.geometry import Geometry
from fused_eager.fusion_rules.lowering import leaves

from ... import config, follower, profiled
from ...config import OPTIONS, Config
from ...devices.accelerator import Accelerator, AcceleratorBuffer
from ...devices.arrivals import await_all, await_values
from ...devices.buffer import LOCK
from ...devices.home import Home
from ...devices.storage import offset_of, storage_of
from ...executing import run
from ...executing.island import view
from ...log import site
from ...log.reasons import Reason
from ...quiet import below, is_above
from ...recording import record, rounds
from ...tracing.opinfo import OpInfo
from ...tracing.stream import Stream
from ..context import inspecting

Tensor = torch.Tensor


class Door:
    """One device, and the stream in which its ops are recorded."""

    def __init__(self, device: Accelerator, options: Config):
        self.device = device
        self.stream = Stream(options, device)
        self.stream.thread = 0  # nobody's: a failed check is told to whoever looks next

    def compute(self, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
        """Record an op, and run it if the mode says so. The caller holds the lock.

        Raises:
            NotRecorded: it cannot be recorded.
        """
        stream = self.stream
        if stream.unfinished is not None:
            run.flush(stream, Reason("cut.full", "after an interrupt"))
        options, before = stream.config, len(stream.nodes)
        if options.log == "ops":
            inspecting.print_call(info, args, kwargs)
        if before and before >= options.max_pending // 2 and rounds.comes_again(stream, info, args, kwargs):
            run.flush(stream, Reason("cut.full", f"{before} ops, before the one that it began with"))
            before = 0
        out = record.record(stream, info, args, kwargs)
        pending = len(stream.nodes)
        if options.mode == "fused":
            if pending >= options.max_pending:
                run.flush(stream, Reason("cut.full", f"{pending} ops"))
        elif pending > before:
            inspecting.run_single(stream, info, args, kwargs, out, self._looked_at)
        return out

    def _looked_at(self, t: Tensor) -> Tensor:
        return self.value_of(t, inspecting.CHECK_NAN) if is_on_device(t) else t

    def buffer_of(self, t: Tensor) -> AcceleratorBuffer:
        """The buffer of a tensor's storage."""
        return self.device.buffer(storage_of(t))  # type: ignore[return-value]

    def array_of(self, b: AcceleratorBuffer, reason: Reason) -> Any:
        """The value of a buffer as an array, which may still be running. The caller holds the lock.

        Raises:
            LostValue: an op that it depends on has failed.
            IndexError, ...: a check of something that was run before failed.
        """
        run.compute(b, reason)
        if b.array is None:
            b.lift()
        return b.array

    def value_of(self, t: Tensor, reason: Reason) -> Tensor:
        """A tensor's value as a view of the host's memory that nobody may write. Waits for it; raises as `array_of`."""
        await_values(t)
        with LOCK:
            home = self.device.fetch(self.array_of(self.buffer_of(t), reason))
        return self.view_of(t, home)

    def view_of(self, t: Tensor, home: Tensor) -> Tensor:
        """What a tensor sees of its storage's value, where that is on the host."""
        return view(home, Geometry(tuple(t.shape), t.stride(), offset_of(t), t.dtype, t.is_conj(), t.is_neg()))

    def replace(self, b: AcceleratorBuffer, home: Tensor) -> None:
        """Give a storage another value: a dense tensor of the host's, which nobody else writes."""
        with LOCK:
            self.forget(b, (home.dtype, tuple(home.shape)))
            b.array = self.device.put(home)
            b.table.brought(b.cdata, home.nbytes)

    def forget(self, b: AcceleratorBuffer, home: Home) -> None:
        """A storage has nothing of what it held, whatever still reads that: it is as if nobody had written it."""
        self.stream.pending.pop(b.cdata, None)
        b.release()
        b.home, b.origin = home, None

    def finish(self, reason: Reason) -> None:
        """Run all that is pending and wait for it."""
        follower.attend()
        await_all()
        with LOCK:
            run.flush(self.stream, reason)
        try:
            run.wait()
        except RuntimeError as error:  # a device behind the host says so late
            self.device.fail(error, f"what was to be done by {site.describe(site.here())}")
        run.check()


FUSES = "TORCH_TPU_DEFER_AND_FUSE"
DOORS: list[Door] = []
WATCHES: list[Callable[[], None]] = []  # called once, when another device than number 0 is meant


class _Current(list[int]):
    """The number of the device that is meant where none is named, alone in a list."""

    def __setitem__(self, at: Any, value: Any) -> None:
        if value and WATCHES:
            calls, WATCHES[:] = list(WATCHES), []
            for call in calls:
                call()
        super().__setitem__(at, value)


CURRENT = _Current([0])
_forked = [False]


def refuse_here() -> None:
    """From here on this process, a forked child, has no device: it would wait for threads that are not in it."""
    _forked[0] = True
    follower.close()


def is_forked() -> bool:
    """Whether this process was forked from one that had the device."""
    return _forked[0]


def is_on_device(t: Tensor) -> bool:
    """Whether a tensor is on one of the devices."""
    return not t.is_cpu and t.device.type == DOORS[0].device.type


def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
    """An optimizer has made a step: the device begins to work on it, while the program goes on."""
    if torch.compiler.is_compiling():  # the step is part of a graph, and is made where that runs
        return
    follower.attend()  # no op is under way
    for door in DOORS:
        if door.stream.nodes and door.stream.config.mode == "fused":
            with LOCK:
                run.flush(door.stream, Reason("cut.optimizer", type(optimizer).__name__))
    _count_on_the_host(optimizer)


# What torch's optimizers keep on the CPU beside parameters of any device, for they read it in every step.
_COUNTERS = ("step", "mu_product")


def _count_on_the_host(optimizer: torch.optim.Optimizer) -> None:
    """Counters that loading a state has brought to the device go back to where torch makes them: read on the device,
    they would cut every step in two. What is found at the first parameter holds for all of its group."""
    for group in optimizer.param_groups:
        if group.get("capturable", True) or group.get("fused"):
            continue  # torch wants them with the parameters, or it is no optimizer of this kind
        for parameter in group["params"]:
            kept = optimizer.state.get(parameter, {})
            moved = {k: v.cpu() for k in _COUNTERS if isinstance(v := kept.get(k), Tensor) and is_on_device(v)}
            if kept and not moved:
                break
            kept.update(moved)


def device_options() -> Config:
    """The options of a device: as the environment says, and nothing is measured against ATen in place, for it has no
    kernels there. TorchTPU's own variable is known: fused is what it asks for, and what the device does without it."""
    found = config.resolve()
    if os.environ.get(FUSES) == "0" and OPTIONS["mode"].env not in os.environ:
        found = found.replace(mode="strict")
    waits = "wait" if found.compile == "auto" else found.compile
    return found.replace(native="never", compile=waits)


def set_options(**given: object) -> None:
    """Change options of all devices from here on. What is pending runs under those that it was recorded with.

    Raises:
        OptionError: there is no such option, or it cannot have that value.
    """
    for door in DOORS:
        with LOCK:
            options = door.stream.config.replace(**given)
            run.flush(door.stream, Reason("cut.options"))
            door.stream.config = options
    if "report" in given:
        write_report(str(given["report"]))


_writers: list[Any] = []  # who writes the event log, if anybody


def write_report(path: str) -> None:
    """Write the event log of the devices to a file from here on, in place of another; to none where it is empty.

    Raises:
        OptionError: the file cannot be written, or holds something else.
    """
    from ...reporting.writer import attach, detach

    found = [attach(DOORS[0].stream.config)] if path else []
    while _writers:
        detach(_writers.pop())
    _writers.extend(found)


def door_of(args: Any, kwargs: dict[str, Any]) -> Door | None:
    """The door of an op's first tensor that is on a device; if there is none, that of the device which is named. All of
    them hold their values then.

    Raises:
        RuntimeError: the process was forked from one that had the device.
    """
    if _forked[0]:
        raise RuntimeError(
            f"Cannot use {DOORS[0].device.type} in a forked subprocess. To use it with multiprocessing, you must use "
            "the 'spawn' start method"
        )
    await_values([args, kwargs])
    for a in args:  # most often the first one is it
        if isinstance(a, Tensor) and is_on_device(a):
            return DOORS[a.get_device()]
    for a in leaves([args, kwargs]):
        if isinstance(a, Tensor) and is_on_device(a):
            return DOORS[a.get_device()]
    named = kwargs.get("device")
    return None if named is None else named_door(named)


@contextmanager
def meaning(index: int | None) -> Iterator[None]:
    """In the body, this device is meant where none is named; None: the one that is meant already."""
    before = CURRENT[0]
    if index is not None:
        CURRENT[0] = index
    try:
        yield
    finally:
        CURRENT[0] = before


def named_door(device: Any) -> Door:
    """The door of a device given as a value or by name; of the current one where no number is named."""
    index = None if device is None else torch.device(device).index
    return DOORS[CURRENT[0] if index is None else existing(index)]


def existing(index: int) -> int:
    """The number of a device, if there is one of that number.

    Raises:
        RuntimeError: there is none.
    """
    if not 0 <= index < len(DOORS):
        raise RuntimeError(
            f"there is no device {index}: there are {len(DOORS)} (0 to {len(DOORS) - 1}); where the CPU stands in, "
            "FUSED_EAGER_DEVICES says how many"
        )
    return index


def unseen(body: Callable[..., Any], *args: Any) -> Any:
    """Call `body` as a kernel, unseen by profilers, and without the collector: finalizers of the program's would find
    the runtime's work half done."""
    if profiled.on and not profiled.is_hidden():
        with profiled.hidden():
            return unseen(body, *args)
    if is_above():
        with below():
            return unseen(body, *args)
    if not gc.isenabled():
        return body(*args)
    gc.disable()
    try:
        return body(*args)
    finally:
        gc.enable()
