"""Native execution at the front door: ops that run through ATen at once, and the care that native memory needs."""

from __future__ import annotations

from typing import Any

import torch

from fused_eager.fusion_rules.geometry import Geometry
from fused_eager.fusion_rules.lowering import leaves

from ..devices.buffer import LOCK, Buffer
from ..devices.host.buffers import TABLE, open_buffer
from ..devices.storage import alias, has_memory, offset_of, storage_of, swap_memory
from ..executing import run
from ..executing.arguments import import_native
from ..executing.island import tell, view
from ..executing.materialize import materialize as materialize_buffer
from ..executing.materialize import materialize_all
from ..log import site
from ..log.reasons import Reason
from ..quiet import call, functions_shown, through, unobserved
from ..tracing.opinfo import OpInfo
from ..tracing.stream import STREAMS, NativeInput, Stream

SNAPSHOT_BYTES = 4096  # below this a copy is cheaper than a flush
_OURS = "_fused_eager_memory"
_EXPOSED = "_fused_eager_exposed"


def mark_exposed(storage: torch.UntypedStorage) -> None:
    """Somebody outside holds this storage's memory (a NumPy view, DLPack): writes must land in it at once."""
    setattr(storage, _EXPOSED, True)


def is_volatile(storage: torch.UntypedStorage) -> bool:
    """Whether others may write this memory behind our back: not torch's own, shared, or handed out."""
    if hasattr(storage, _EXPOSED):
        return True
    return (not storage.resizable() and not hasattr(storage, _OURS)) or storage.is_shared()


def must_stay(storage: torch.UntypedStorage) -> bool:
    """Whether a write has to go to the storage's own memory at once, because others look at it."""
    return storage._cdata not in TABLE and is_volatile(storage)


def snapshot(item: NativeInput) -> None:
    """Copy what a native input holds now, so that later writes to its memory do not change a pending read."""
    with unobserved():
        copy = alias(item.storage, item.offset, item.home).clone()
    item.storage, item.offset = storage_of(copy), 0


def hand_over(storage: torch.UntypedStorage) -> None:
    """A native storage is about to become pending: what reads its memory gets hold of it before the trap is armed."""
    for reader in STREAMS:
        for item in reader.natives.pop(storage._cdata, {}).values():
            if item.array is None:
                with unobserved():
                    item.array = import_native(item, reader.device)


def open_native(storage: torch.UntypedStorage, ahead: bool = False) -> Buffer:
    """The buffer of a storage that has been native and is about to become pending; `ahead`: nobody has its memory."""
    if not ahead:
        hand_over(storage)
    return open_buffer(storage, born_native=True)


def is_awaited(cdata: int) -> bool:
    """Whether a pending op of any thread is to read the native storage at this address."""
    return any(cdata in stream.natives for stream in STREAMS)


def protect(storage: torch.UntypedStorage, of: Stream | None = None) -> None:
    """Before somebody writes native memory: whoever was to read the old values gets them first. `of` has read them, and
    forgets them itself."""
    for stream in STREAMS:
        pending = None if stream is of else stream.natives.pop(storage._cdata, None)
        if not pending:
            continue
        if storage.nbytes() <= SNAPSHOT_BYTES:
            for item in pending.values():
                snapshot(item)
        else:
            run.flush(stream, Reason("sync.island", "a native write to memory that pending ops read"))
    if run.DEFERRED.is_reading(storage._cdata):
        run.wait()


def materialize(args: Any, reason: Reason) -> None:
    """Make all tensors among the arguments native."""
    for t in leaves(args):
        if isinstance(t, torch.UntypedStorage):  # the source of a `set_`
            b = TABLE.get(t._cdata)
            if b is not None:
                materialize_buffer(b, reason)
        if not isinstance(t, torch.Tensor):
            continue
        if t.is_nested or t.layout is not torch.strided:
            materialize_all(reason)  # its components are tensors that we do not see
            continue
        if not torch._C._has_storage(t):
            continue
        b = TABLE.get(storage_of(t)._cdata)
        if b is not None:
            materialize_buffer(b, reason)


def run_tiny(info: OpInfo, args: Any, kwargs: dict[str, Any], written: list[torch.Tensor]) -> Any:
    """Run an op on finished numbers at once."""
    for t in written:
        protect(storage_of(t))
    return call(info.op, args, kwargs)


def buffers_of(values: list[Any]) -> list[Buffer]:
    """The buffers of the tensors among these values; of those in memory there are none."""
    storages = [storage_of(t) for t in values if isinstance(t, torch.Tensor) and torch._C._has_storage(t)]
    return [b for b in (TABLE.get(storage._cdata) for storage in storages) if b is not None]


def _write_targets(info: OpInfo, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    chosen = [args[i] if i < len(args) else kwargs.get(info.names[i]) for i in info.written]
    return [t for t in leaves(chosen) if isinstance(t, torch.Tensor) and torch._C._has_storage(t)]


def is_away(args: Any) -> bool:
    """Whether the memory of some tensor among the arguments does not hold its value, or may not."""
    for t in leaves(args):
        if isinstance(t, torch.Tensor) and (not has_memory(t) or storage_of(t)._cdata in TABLE):
            return True
    return False


def nothing_is_pending() -> bool:
    """Whether all values of all threads are in native memory, and nothing reads or writes it behind torch's back."""
    return not TABLE and not run.DEFERRED.launches


def run_through(stream: Stream, info: OpInfo, args: Any, kwargs: dict[str, Any], code: str) -> Any:
    """Run an op as eager would, in a segment of the program that is native: nothing is recorded. `code` says why."""
    if nothing_is_pending():
        return call(info.op, args, kwargs)
    return run_at_once(stream, info, args, kwargs, Reason(code))


def run_at_once(stream: Stream, info: OpInfo, args: Any, kwargs: dict[str, Any], reason: Reason) -> Any:
    """Settle the arguments and run the op through ATen."""
    make_ready(info, args, kwargs, reason)
    return call(info.op, args, kwargs)


def make_ready(info: OpInfo, args: Any, kwargs: dict[str, Any], reason: Reason) -> None:
    """What an op needs to run at once: its arguments finished, and what it writes read by whoever was to read it."""
    materialize([args, kwargs], reason)
    for t in _write_targets(info, args, kwargs):
        if t.layout is torch.strided:
            protect(storage_of(t))


PEEKS = 16  # numbers of one value that are read in a row until it had better be in native memory
_peeked: list[Any] = [None, 0]  # of which value numbers were read last (its run, and its own number), and how many


def read_number(info: OpInfo, t: torch.Tensor, reason: Reason) -> Any:
    """The number in a one-element tensor. Its memory stays where it is, so a loop that reads a loss is not held up; but
    where a value is read element by element, each would cost what bringing all of it there does."""
    b = TABLE.get(storage_of(t)._cdata) if t.layout is torch.strided and torch._C._has_storage(t) else None
    if b is None:
        return through(info.op, (t,), {})
    if b.array is not None and b.origin is not None:
        _peeked[:] = b.origin, _peeked[1] + 1 if _peeked[0] == b.origin else 1
        if _peeked[1] > PEEKS:
            make_ready(info, (t,), {}, reason)
            return through(info.op, (t,), {})
    home = run.peek(b, reason)
    g = Geometry(tuple(t.shape), t.stride(), offset_of(t), t.dtype, t.is_conj(), t.is_neg())
    return through(info.op, (view(home, g),), {})


def run_now(stream: Stream, info: OpInfo, args: Any, kwargs: dict[str, Any], why: str) -> Any:
    """Run an op as an island at once, because it cannot be recorded; `why` says what stands in the way."""
    _tell(stream, info, args, kwargs, why)
    out = run_at_once(stream, info, args, kwargs, Reason("sync.island", f"{info.op}: {why}"))
    expose_parts([args, kwargs, out])
    return out


def run_free(stream: Stream, info: OpInfo, args: Any, kwargs: dict[str, Any], why: str) -> Any:
    """The same for an op that may wait for others: the lock is not held while it runs."""
    with LOCK:
        if stream.unfinished is not None:
            run.flush(stream, Reason("cut.full", "after an interrupt"))
        _tell(stream, info, args, kwargs, why)
        reason = Reason("sync.island", f"{info.op}: {why}")
        run.flush_first(buffers_of(list(leaves([args, kwargs]))), reason)
        make_ready(info, args, kwargs, reason)
    with functions_shown():
        out = call(info.op, args, kwargs)
    with LOCK:
        expose_parts([args, kwargs, out])
    return out


def _tell(stream: Stream, info: OpInfo, args: Any, kwargs: dict[str, Any], why: str) -> None:
    """Report an op that runs natively at once.

    Raises:
        IslandRefused: the options refuse what runs natively.
    """
    if any(isinstance(t, torch.Tensor) for t in leaves([args, kwargs])):
        tell(stream.config, info.op, site.here(), why)


def expose_parts(tree: Any) -> None:
    """Where a sparse tensor is among the values, the dense ones are parts of it: ATen reads their memory unseen."""
    tensors = [t for t in leaves(tree) if isinstance(t, torch.Tensor)]
    if any(t.layout is not torch.strided for t in tensors):
        for t in tensors:
            if t.layout is torch.strided and torch._C._has_storage(t):
                mark_exposed(storage_of(t))


def draw(stream: Stream, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an op that draws random numbers: now, natively, so that the generator advances as in eager.

    In-place draws that look at no tensor's values need none of them; `_like` factories need no values at all.
    """
    tensors = [t for t in leaves([args, kwargs]) if isinstance(t, torch.Tensor)]
    if info.op._schema.name in DRAWS and len(tensors) == 1 and tensors[0] is args[0] and args[0].is_cpu:
        t = args[0]
        storage = storage_of(t)
        b = TABLE.get(storage._cdata)
        if b is not None and not b.born_native and t.is_contiguous() and t.nbytes == storage.nbytes():
            # Everything is overwritten: drawn beside it, so that a draw that raises leaves the old value.
            drawn = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
            through(info.op, (drawn, *args[1:]), kwargs)
            stream.pending.pop(b.cdata, None)
            swap_memory(storage, storage_of(drawn))
            b.release()
            return t
    elif info.op._schema.name.endswith("_like") and not info.written:
        return through(info.op, args, kwargs)
    return run_at_once(stream, info, args, kwargs, Reason("sync.island", f"{info.op} draws random numbers"))


def change_storage(stream: Stream, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run `resize_` or `set_` on finished values, and in memory that torch can resize."""
    materialize([args, kwargs], Reason("sync.memory", str(info.op)))
    for t in _write_targets(info, args, kwargs):
        storage = storage_of(t)
        protect(storage)
        if "resize" in info.op._schema.name:
            make_resizable(storage)
    return through(info.op, args, kwargs)


def make_resizable(storage: torch.UntypedStorage) -> None:
    """Have finished values lie in memory of torch's, where they lie in ours."""
    if hasattr(storage, _OURS) and not storage.resizable():
        with unobserved():
            own = torch.empty(storage.nbytes(), dtype=torch.uint8)
            if storage.nbytes():
                own.copy_(alias(storage, 0, (torch.uint8, (storage.nbytes(),))))
        swap_memory(storage, storage_of(own))


DRAWS = frozenset(
    f"aten::{name}"
    for name in ("uniform_", "normal_", "bernoulli_", "exponential_", "geometric_", "log_normal_", "cauchy_", "random_")
)
