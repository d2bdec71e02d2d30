"""Stage: the part of a graph that is one stream, and what runs it on real tensors."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from fused_eager.fusion_rules.deferred import jax
from fused_eager.fusion_rules.geometry import Geometry

from ...compiling import emit
from ...compiling.ready import Ready
from ...devices.buffer import LOCK
from ...devices.device import Device
from ...devices.dlpack import to_tensor
from ...devices.home import Home
from ...devices.host.buffers import COPIED
from ...devices.storage import storage_of
from ...executing import load, prepared, run
from ...executing.prepared import Prepared
from ...log.reasons import Reason
from ...planning.plan import Work
from ...quiet import OWN
from ...recording import native
from ...tracing.stream import NativeInput, Stream
from ...xla import untraced

Tensor = torch.Tensor
Slots = list[Any]
T = TypeVar("T")
ANEW = -1  # no address: that array is looked for at each call


def over(t: Tensor, g: Geometry) -> Tensor:
    """The view `g` of the memory that begins where `t` does."""
    start = t.storage_offset() * t.itemsize // g.dtype.itemsize
    out = torch.empty(0, dtype=g.dtype).set_(storage_of(t), start + g.offset, g.size, g.stride)
    out = out.conj() if g.conj else out
    return out._neg_view() if g.neg else out


def in_own_thread(make: Callable[[], T]) -> T:
    """Do something with JAX on a thread of its own, and wait for it: what JAX keeps of the stack that it is called on
    would keep Dynamo's code alive, and by that the graph."""
    found: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(make())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name=f"{OWN}-graph", daemon=True)
    thread.start()
    thread.join()
    if raised:
        raise raised.pop()
    return found.pop()


def needs_compiler(make: Callable[[], object]) -> bool:
    """Make executables on such a thread. Returns whether the compiler was needed."""

    def made() -> bool:
        make()
        return emit.begin()[1] > 0  # a thread's own seconds

    return in_own_thread(made)


@dataclass(slots=True)
class Stage:
    """A part of the graph that is one stream: where its inputs lie, and where its values go."""

    work: Work
    inputs: tuple[tuple[int, Home, int, int], ...]  # value, its home, the slot and the byte where it lies
    outputs: tuple[tuple[int, int], ...]  # value and slot: new memory
    written: tuple[tuple[int, int, Geometry], ...]  # value and slot: memory that is there, and which part of it
    reason: Reason
    shown: frozenset[int] = frozenset()  # slots that the program gets to see, of the graph's or another's
    kept: load.Kept = field(default_factory=load.Kept)
    _prepared: Prepared | None = None
    _is_prepared: Ready | None = None  # for which executables that was asked
    _donated: tuple[tuple[int, Home, int, int], ...] = field(init=False)  # inputs that need an array at each call,
    _staying: tuple[tuple[int, Home, int, int], ...] = field(init=False)  # and those that may keep theirs:
    _addresses: list[int] = field(default_factory=list)  # where these were at the last call,
    _borrowed: dict[int, Any] = field(default_factory=dict)  # and arrays over them

    def __post_init__(self) -> None:
        donatable = self.work.donatable
        self._donated = tuple([each for each in self.inputs if each[0] in donatable])
        self._staying = tuple([each for each in self.inputs if each[0] not in donatable])

    def ready(self) -> Ready:
        """The plan with its executables, made at the first call."""
        return self.kept.ready or in_own_thread(lambda: self.kept.fill(self.work))

    def run(self, slots: Slots) -> None:
        """Run the stage, and wait for its values.

        Raises:
            Exception: what an op raised, with eager's type; nothing of what it was to write has been written.
        """
        ready = self.ready()
        began, device = emit.begin(), self.work.device
        with untraced():
            with LOCK:
                for _, slot, _ in self.written:
                    native.protect(storage_of(slots[slot]))
                device.housekeeping.before_run()
                quick = None if prepared.is_watched(self.work.config) else self._prepare(ready)
                values = self._run(slots, ready) if quick is None else self._arrays(slots, quick.tensors)
                if quick is not None and quick.is_shared:
                    quick.run(values)
            if quick is not None and not quick.is_shared:
                quick.run(values)  # other threads run theirs meanwhile
        with LOCK:
            emit.flushed(self.reason, ready, len(self.work.nodes), began)
            device.housekeeping.after_run()
            device.housekeeping.look(run.is_needed, run.wait)
        try:
            self._hand_out(slots, values)
        except BaseException:
            with suppress(RuntimeError):
                jax.block_until_ready(list(values.values()))  # what they are computed from may be freed next
            raise
        if quick is None:
            with LOCK:
                run.DEFERRED.forget_done()  # and of what it has read

    def _own(self, vid: int, value: Any, is_shown: bool) -> Tensor:
        """A value as memory of torch's: small ones that the program sees are copied, so that they can be resized as any
        other."""
        if isinstance(value, Tensor):
            return value
        t, device = to_tensor(value), self.work.device
        if is_shown and t.nbytes <= COPIED:
            return t.clone()
        storage = storage_of(t)
        storage._fused_eager_array = device, self.work.homes[vid], value  # type: ignore[attr-defined]
        if t.nbytes > COPIED:
            storage._fused_eager_memory = True  # type: ignore[attr-defined]
            with LOCK:
                device.lend(value, storage)
        return t

    def _prepare(self, ready: Ready) -> Prepared | None:
        if self._is_prepared is not ready:
            self._prepared, self._is_prepared = prepared.prepare(self.work.nodes, ready, self.work.device), ready
        return self._prepared

    def _hand_out(self, slots: Slots, values: dict[int, Any]) -> None:
        for vid, slot in self.outputs:
            slots[slot] = self._own(vid, values[vid], slot in self.shown)
        for vid, slot, g in self.written:
            value = _tensor(values[vid])
            target = slots[slot]
            if target.numel() and value.data_ptr() != target.data_ptr():
                over(target, g).copy_(over(value, g))

    def _arrays(self, slots: Slots, tensors: frozenset[int]) -> dict[int, Any]:
        """The inputs; those of `tensors` may be tensors."""
        addresses = [slots[s].data_ptr() + at for _, _, s, at in self._staying]
        if addresses != self._addresses:
            values = self._borrow(addresses, slots, tensors)
        else:
            values = dict(self._borrowed)
        for v, home, s, at in self._donated:
            values[v] = self.work.device.borrow(slots[s].data_ptr() + at, home, True)
        return values

    def _borrow(self, addresses: list[int], slots: Slots, tensors: frozenset[int]) -> dict[int, Any]:
        """The same where some are at other addresses than at the last call. Weights stay where they are, so their
        arrays are kept; what XLA has copied, as it was not aligned, is of that call alone, and so is what another
        graph has made."""
        before, self._addresses = self._addresses, []  # known again when all of them are there
        other: dict[int, Any] = {}
        for at, (v, home, s, start) in enumerate(self._staying):
            address = addresses[at]
            if before and before[at] == address:
                continue
            found = _as_it_is(slots[s], home, start, self.work.device, v in tensors)
            if found is None:
                found = self._borrowed[v] = self.work.device.borrow(address, home, False)
                if not address or found.unsafe_buffer_pointer() == address:
                    continue
            other[v], addresses[at] = found, ANEW
        self._addresses = addresses
        return {**self._borrowed, **other}

    def _run(self, slots: Slots, ready: Ready) -> dict[int, Any]:
        stream = Stream(self.work.config, self.work.device)
        stream.nodes = self.work.nodes
        for vid, home, slot, start in self.inputs:
            t = slots[slot]
            stream.inputs.append(NativeInput(vid, home, storage_of(t), t.storage_offset() * t.itemsize + start))
        return run.run_ahead(stream, ready, self.work.donatable, self.reason)


def _as_it_is(t: Tensor, home: Home, start: int, device: Device, as_tensor: bool) -> Any:
    """The value `home` at the beginning of a tensor: the array that another graph has made, if that is its memory; or
    the tensor itself, if that will do. None where it is neither."""
    if start or t.dtype is not home[0]:
        return None
    made = getattr(storage_of(t), "_fused_eager_array", None)
    if made is not None and made[0] is device and made[1] == home and made[2].unsafe_buffer_pointer() == t.data_ptr():
        return made[2]
    whole = t.is_contiguous() and t.numel() == math.prod(home[1])
    if as_tensor and whole and not (t.is_conj() or t.is_neg()):
        return t.view(home[1])
    return None


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else to_tensor(value)
