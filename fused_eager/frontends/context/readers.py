"""Readers: what gets at a tensor's memory without going through the dispatcher finds finished values there.

`numpy`, `data_ptr`, pickle, DLPack, printing: each is a row. While a context is open, `guards` puts what is made here
in their places.
"""

from __future__ import annotations

import copyreg
import functools
import math
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from types import FrameType, MethodType, ModuleType
from typing import Any

import torch
import torch.utils.dlpack
from torch._subclasses.fake_tensor import FakeTensor

from fused_eager.fusion_rules.lowering import leaves

from ... import follower
from ...devices.buffer import LOCK
from ...devices.host import trap
from ...devices.host.buffers import TABLE
from ...devices.storage import has_memory, storage_of
from ...executing.materialize import materialize, materialize_all
from ...log import site
from ...log.reasons import Reason
from ...quiet import stack, without
from ...recording import native
from . import bypass
from .intercept import FrontDoor, looked_at
from .subclasses import is_plain
from .threads import THREAD, current_door


@dataclass(frozen=True, slots=True)
class Guard:
    """One patched callable: `owner.name`, whether it hands the memory to somebody outside (or, where torch itself asks,
    as `torch.save` does for addresses, does not), whether it reads that of all its operands instead of the first alone,
    and whether it needs memory that torch can resize."""

    owner: Any
    name: str
    exposes: bool = False
    but_to_torch: bool = False
    operands: bool = False
    resizes: bool = False


# Everything on this list reads a tensor's memory, or that of a storage that somebody has kept, without going through
# the dispatcher.
READERS: tuple[Guard, ...] = (
    Guard(torch.Tensor, "numpy", exposes=True),
    Guard(torch.Tensor, "__array__", exposes=True),
    Guard(torch.Tensor, "__dlpack__", exposes=True),
    Guard(torch.Tensor, "share_memory_", exposes=True),
    Guard(torch.Tensor, "data_ptr", exposes=True),
    *(Guard(torch.Tensor, name, exposes=True) for name in ("const_data_ptr",) if hasattr(torch.Tensor, name)),
    Guard(torch.Tensor, "tolist"),
    Guard(torch.Tensor, "is_pinned"),
    Guard(torch.Tensor, "apply_"),
    Guard(torch.Tensor, "map_", operands=True),
    Guard(torch.Tensor, "new_tensor", operands=True),
    Guard(torch.Tensor, "map2_"),
    Guard(torch.Tensor, "untyped_storage"),
    Guard(torch.Tensor, "_typed_storage"),
    Guard(torch.Tensor, "storage"),
    Guard(torch.Tensor, "is_shared"),
    Guard(torch.Tensor, "__reduce_ex__"),
    Guard(torch.Tensor, "new", operands=True),
    Guard(torch, "to_dlpack", exposes=True),
    Guard(torch.utils.dlpack, "to_dlpack", exposes=True),
    Guard(torch.Tensor, "__repr__"),
    Guard(torch.Tensor, "__deepcopy__"),
    Guard(torch.UntypedStorage, "data_ptr", exposes=True, but_to_torch=True),
    Guard(torch.UntypedStorage, "share_memory_", exposes=True),
    Guard(torch.UntypedStorage, "_share_fd_cpu_", exposes=True),
    Guard(torch.UntypedStorage, "_share_filename_cpu_", exposes=True),
    Guard(torch.UntypedStorage, "resize_", resizes=True),
    Guard(torch.UntypedStorage, "copy_", operands=True),
    Guard(torch.UntypedStorage, "fill_"),
    Guard(torch.UntypedStorage, "_byteswap"),
    Guard(torch.UntypedStorage, "_write_file"),
    Guard(torch.UntypedStorage, "_set_from_file"),
    Guard(torch.UntypedStorage, "__getitem__"),
    Guard(torch.UntypedStorage, "__setitem__"),
)
# These do go through the dispatcher, where a value is read; they are met to know when that is over.
NUMBERS: tuple[str, ...] = ("item", "__bool__", "__int__", "__float__", "__complex__", "__index__")

PLAIN = (float, int, bool, type(None), complex, str, bytes)  # cannot hold a tensor; numbers come by the million
_TORCH = os.path.dirname(torch.__file__) + os.sep


def _holds_others(t: torch.Tensor) -> bool:
    """Whether a tensor's values are those of tensors that it holds where we do not look: it is sparse or nested, or of
    a class with a `__torch_dispatch__`."""
    return not (has_memory(t) and is_plain(type(t))) and t.device.type == "cpu" and not isinstance(t, FakeTensor)


def materialized(t: torch.Tensor | torch.UntypedStorage, guard: Guard) -> bool:
    """Have a tensor's memory hold its value. Returns whether it did not before."""
    if isinstance(t, torch.UntypedStorage):
        storage = t
    elif _holds_others(t):
        if not TABLE:
            return False
        materialize_all(Reason("sync.memory", f"{type(t).__name__}.{guard.name}"))
        return True
    elif has_memory(t):
        storage = storage_of(t)
    else:
        return False
    if storage.device.type != "cpu":
        return False
    with LOCK:
        b = TABLE.get(storage._cdata)
        if b is not None:
            materialize(b, Reason("sync.memory", f"{type(t).__name__}.{guard.name}"))
        # Whoever gets at the memory may write it: what pending ops are to read of it is read first.
        native.protect(storage)
        if guard.exposes and not (guard.but_to_torch and _is_asked_by_torch()):
            native.mark_exposed(storage)
        if guard.resizes:
            native.make_resizable(storage)
    return b is not None


def _is_asked_by_torch() -> bool:
    """Whether what has called a reader is torch's own Python."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH)


# Not in torch 2.11. A `__torch_function__` that calls `redispatch_function` leaves this mark for whoever asks next
# whether an argument has such a function: it is passed over, once.
_passes_over = getattr(torch._C, "_peek_should_skip_torch_function", bool)
_pass_over = getattr(torch._C, "_set_skip_next_torch_function", bool)


class StandIn:
    """What stands in the place of `owner.name` while a context is open. It is equal to that, as torch and its users
    keep functions in tables, and what copies or pickles it gets that. `call` gets it as its first argument."""

    def __init__(self, guard: Guard, original: Callable[..., Any], call: Callable[..., Any]):
        functools.update_wrapper(self, original)
        self._guard, self._original, self._call = guard, original, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _passes_over():
            return self._call(self._original, *args, **kwargs)
        # What we look at must not take the mark away.
        _pass_over(False)
        return self._call(self._passed_over, *args, **kwargs)

    def _passed_over(self, *args: Any, **kwargs: Any) -> Any:
        _pass_over(True)
        return self._original(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __eq__(self, other: object) -> bool:
        return bool(self._original == (other._original if isinstance(other, StandIn) else other))

    def __hash__(self) -> int:
        return hash(self._original)

    def __reduce__(self) -> Any:
        owner, name = self._guard.owner, self._guard.name
        if isinstance(owner, ModuleType):
            return pkgutil.resolve_name, (f"{owner.__name__}:{name}",)
        return getattr, (owner, name)


def settling(guard: Guard, original: Callable[..., Any]) -> StandIn:
    """What finishes the values that `original` reads, and calls it."""

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        door = THREAD.door
        if native.nothing_is_pending():
            if (door is None or door.hidden) and not guard.exposes:
                return original(*args, **kwargs)  # as in printing, which reads each element of what is being read
            if door is not None and door.bypassed and not door.hidden:
                return _read_alone(door, guard, original, args, kwargs)
            if guard.operands and not guard.exposes:
                return natively(original, *args, **kwargs)  # a list of a million numbers need not be looked through
        waited = []
        for a in leaves([args, kwargs] if guard.operands else args[:1]):
            if isinstance(a, (torch.Tensor, torch.UntypedStorage)):
                with torch._C.DisableTorchFunction():
                    waited.append(materialized(a, guard))
            elif guard.operands and type(a) not in PLAIN and isinstance(a, Sequence):
                materialize_all(Reason("sync.memory", guard.name))  # a sequence of another kind
        # Many run ops on the way (printing many small ones, DLPack one that applies a conjugation): natively, so that
        # they find what they make, and that a print compiles nothing.
        out = natively(original, *args, **kwargs)
        if waited:
            _was_read(any(waited))
        return out

    return StandIn(guard, original, call)


def _read_alone(door: FrontDoor, guard: Guard, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The same where torch is alone, and nothing is to be finished: it should cost no more than it must."""
    reads = bool(args) and isinstance(args[0], (torch.Tensor, torch.UntypedStorage))
    if reads and (guard.exposes or guard.resizes):
        with torch._C.DisableTorchFunction():
            materialized(args[0], guard)
    out = natively(original, *args, **kwargs)
    if reads:
        bypass.read(door)
    return out


def _was_read(waited: bool) -> None:
    door = current_door()
    if door is None:
        return
    if not door.bypassed:
        if door not in stack():
            return  # inside of an op: it is we who read
        looked_at(door.stream, site.here(), waited)
    bypass.read(door)


def noticing(original: Callable[..., Any]) -> Callable[..., Any]:
    """What calls `original`, which reads one number, and notices that this has been read."""
    made = follower.reader(original)
    if made is not None:
        copyreg.pickle(type(made), lambda reader: (getattr, (torch.Tensor, reader.__name__)))
        return functools.update_wrapper(made, original)

    return Reading(Guard(torch.Tensor, original.__name__), original, original)


class Reading(StandIn):
    """The same in Python."""

    def __call__(self, t: torch.Tensor, *wrong: Any) -> Any:  # loops that do little else feel each step that may come
        try:
            number = self._original(t, *wrong) if wrong else self._original(t)
        except RuntimeError as error:
            number = read_again(error, self._original, t, *wrong)
        door = THREAD.door
        if door is None or door.hidden:
            return number
        if perf_counter() < door.blind_until:  # as in `overlooks`, without the call: loops that do little else feel it
            door.unseen["read"] += 1
            return number
        bypass.read(door)
        follower.attend()
        return number


def read_again(error: RuntimeError, original: Callable[..., Any], *args: Any) -> Any:
    """Read a number where torch let no mode see it: `torch.tensor` reads so what is in the lists it is given, and so do
    subclasses below their `__torch_dispatch__`. The trap has refused it; it has changed nothing.

    Raises:
        RuntimeError: `error`, if that was something else.
    """
    t = args[0] if args else None
    if not (trap.is_refusal(error) and isinstance(t, torch.Tensor)):
        raise error
    with torch._C.DisableTorchFunction():
        waited = materialized(t, Guard(torch.Tensor, original.__name__))
    if not waited:
        raise error
    return natively(original, *args)


def constructing(original: Callable[..., Any]) -> StandIn:
    """What `torch.Tensor(...)` and its subclasses are made by. Below a mode torch makes a tensor first, and finds then
    that it is none of the subclass: so our mode is not there. What it is given stays pending: it makes an alias of it.
    """
    guard = Guard(torch.Tensor, "__new__")

    def new(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for a in args[1:]:
            if isinstance(a, torch.UntypedStorage):
                materialized(a, guard)
        return natively(original, *args, **kwargs)

    return StandIn(guard, original, new)


def was_read() -> None:
    """A number was read in C++ and not overlooked."""
    door = THREAD.door
    if door is not None and not door.hidden:
        bypass.read(door)


def natively(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` without this thread's front door."""
    door = current_door()
    if door is None or door.hidden:
        return function(*args, **kwargs)
    door.hidden = True
    try:
        if door.bypassed:
            # What it reads, as printing does each element, are no reads of the program's: counted, and forgotten.
            door.unseen["read"] += follower.overlooked()
            until = follower.overlook(math.inf)
            try:
                return function(*args, **kwargs)
            finally:
                follower.overlooked()
                follower.overlook(until)
        with without(door):
            return function(*args, **kwargs)
    finally:
        door.hidden = False
