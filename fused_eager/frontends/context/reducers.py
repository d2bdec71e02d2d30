"""Reducers: what averages gradients between processes looks at them from C++, where no dispatcher sees it.

`DistributedDataParallel` has a reducer. It hangs on to autograd's nodes: when a gradient has been accumulated, it asks
whether the gradient shares memory with its bucket (which reads no value, and meets the trap all the same), copies it
there, and starts the collective when the bucket is full. All that it does with values are ops, which are recorded. So
for as long as it runs for one parameter, the traps of that gradient and its bucket are *open*, and a bucket costs one
flush, when its collective starts.

Where it runs for several parameters at once (for those that the graph has left out), or where we cannot stand right
behind it, it finds finished values and runs *natively*. So do the few calls in which it reads and writes memory by
itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import TensorWeakRef

from ... import quiet
from ...devices.buffer import LOCK
from ...devices.host import trap
from ...devices.host.buffers import TABLE
from ...devices.storage import has_memory, storage_of
from ...executing.materialize import materialize_all
from .buckets import CURRENT, LOOKS, materialize, shut
from .intercept import FrontDoor
from .threads import THREAD

Tensor = torch.Tensor
_MARK = "_fused_eager_reducer"  # in the metadata of an autograd node: whose hooks came first


def seeing_door() -> FrontDoor | None:
    """This thread's front door, if it sees what is called now."""
    door = THREAD.door
    return None if door is None or door.bypassed or door.hidden else door


def leave(door: FrontDoor) -> None:
    """What is left of the node that autograd is at, or of the end of the pass, is not seen by `door`: what comes after
    finds the modes as they were."""
    quiet.restack([mode for mode in quiet.stack() if mode is not door])


class Parameter:
    """One parameter of a reducer, and the hooks that stand around the reducer's own."""

    def __init__(self, reducer: Reducer, t: Tensor):
        self.reducer = reducer
        self.tensor = TensorWeakRef(t)
        self.bucket: torch.UntypedStorage | None = None
        self.known = False  # whether our last hook is called right after the reducer's
        self.hooks: list[tuple[Any, int, Callable[..., Any]]] = []

    def add_hooks(self) -> None:
        """Stand around the reducer's hook: the first time, or again."""
        if self.hooks:
            for hooks, at, hook in self.hooks:
                hooks[at] = hook
            return
        t = self.tensor()
        if t is None:
            return
        node: Any = get_gradient_edge(t).node
        behind = node.register_hook(self._has_run)
        handles = (t.register_post_accumulate_grad_hook(self._comes), node.register_prehook(self._may_come), behind)
        for handle in handles:
            of_place: Any = handle.hooks_dict_ref()
            self.hooks.append((of_place, handle.id, of_place[handle.id]))
        # Hooks in Python share one place among those of a node: where the first of them came.
        first = node.metadata.setdefault(_MARK, self)
        first.known = self.known = first is self and len(self.hooks[-1][0]) == 1

    def remove_hooks(self) -> None:
        for hooks, at, _ in self.hooks:
            hooks.pop(at, None)

    def gradient(self) -> torch.UntypedStorage | None:
        """The memory of its gradient."""
        t = self.tensor()
        grad = None if t is None else t.grad
        return None if grad is None or not has_memory(grad) else storage_of(grad)

    def _may_come(self, gradients: Any) -> None:
        """Before the gradient is accumulated: if there is none, no hook but the reducer's will be called."""
        if not gradients or gradients[0] is None:
            t = self.tensor()
            if t is not None:
                self._comes(t)

    def _comes(self, t: Tensor) -> None:
        """The gradient has been accumulated, and the reducer comes next: or another hook of the program's."""
        door = seeing_door()
        if door is None:
            return
        shut()
        reducer = self.reducer
        first = not reducer.fired
        reducer.fired.add(id(self))
        CURRENT.reducer = reducer
        last = next(reversed(self.hooks[0][0]), None) == self.hooks[0][1]
        if not last:  # a hook of the program's that has come later: next time it is called before
            hooks, at, hook = self.hooks[0]
            hooks.pop(at, None)
            hooks[at] = hook
        if not (last and self.known):  # hooks of the program's stand between
            materialize_all(LOOKS)
            leave(door)
        elif self.bucket is None or (first and reducer.may_mark_others):
            reducer.finish()
            leave(door)
        else:
            self._open()

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        for storage in (self.gradient(), self.bucket):
            if storage is not None:
                yield storage

    def _open(self) -> None:
        with LOCK:
            for storage in self._storages():
                b = TABLE.get(storage._cdata)
                if b is not None and trap.is_armed(storage):  # not where ATen has put the value into it (`shadow`)
                    CURRENT.opened.append(b)
                    trap.disarm(storage)

    def _has_run(self, *gradients: Any) -> None:
        """The reducer has run."""
        if CURRENT.reducer is not None:
            shut()


class _Watching(TorchDispatchMode):
    """Sees a reducer's buckets, as it is asked for zeros like them; they are not made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.zeros_like.default:
            self.seen.append(storage_of(args[0]))
            return torch.empty(0)
        return func(*args, **(kwargs or {}))


class Reducer:
    """What is known of one of torch's reducers."""

    def __init__(self, reducer: Any, parameters: list[Tensor] | None):
        self.torchs = weakref.ref(reducer)
        self.parameters = None if parameters is None else [Parameter(self, p) for p in parameters]
        self.fired: set[int] = set()  # the parameters for which it has run since the last forward
        self.finds_unused = True
        self.complete = False  # it has run for all of its parameters in one pass
        self.is_rebuilt = False  # its buckets are what they will be
        self.attached = False

    @property
    def may_mark_others(self) -> bool:
        """Whether, as it runs for the first parameter, it may go through those that will get no gradient."""
        return self.finds_unused or not self.complete

    def begins(self, finds_unused: bool) -> None:
        """A forward has ended, and gradients are expected."""
        if self.parameters is not None and len(self.fired) == len(self.parameters):
            self.complete = True
        self.fired.clear()
        self.finds_unused = finds_unused

    def storages(self) -> Iterator[torch.UntypedStorage]:
        """The memory of all gradients and buckets."""
        for p in self.parameters or ():
            yield from p._storages()

    def finish(self) -> None:
        """Finish all that it may look at; that is not the parameters themselves."""
        tensors = [p.tensor() for p in self.parameters or ()]
        kept = {storage_of(t)._cdata for t in tensors if t is not None and has_memory(t)}
        with LOCK:
            materialize(b.storage for b in list(TABLE.values()) if b.cdata not in kept and b.error is None)

    def buckets(self) -> Iterator[torch.UntypedStorage]:
        """The memory of its buckets, as far as they are known."""
        return (p.bucket for p in self.parameters or () if p.bucket is not None)

    def attach(self) -> None:
        """Stand around its hooks, and look which buckets it has."""
        if not self.attached:
            self.attached = True
            self.look()
            for p in self.parameters or ():
                p.add_hooks()

    def detach(self) -> None:
        """Leave it alone, and its buckets' memory."""
        self.attached = False
        for p in self.parameters or ():
            p.remove_hooks()
            p.bucket = None

    def look(self) -> None:
        """Find out which parameter's gradient goes to which bucket."""
        reducer = self.torchs()
        if reducer is None:
            return
        try:
            with _Watching() as watching:
                groups = [bucket.parameters() for bucket in reducer._get_zeros_like_grad_buckets()]
        except RuntimeError:
            return  # what it has for sparse gradients is no bucket: its hooks run natively
        if self.parameters is None:
            self.parameters = [Parameter(self, p) for group in groups for p in group]
        mine = {id(p.tensor()): p for p in self.parameters}
        for group, storage in zip(groups, watching.seen, strict=True):
            for t in group:
                if id(t) in mine:
                    mine[id(t)].bucket = storage


KNOWN: weakref.WeakKeyDictionary[Any, Reducer] = weakref.WeakKeyDictionary()


def know(reducer: Any, parameters: list[Tensor] | None = None) -> Reducer:
    found = KNOWN.get(reducer)
    if found is None:
        found = KNOWN[reducer] = Reducer(reducer, parameters)
        weakref.finalize(reducer, found.detach).atexit = False
    return found


def attach() -> None:
    """A backward pass begins in a context: stand around the hooks of all reducers."""
    for reducer in list(KNOWN.values()):
        reducer.attach()


def detach() -> None:
    """The last context closes."""
    for reducer in list(KNOWN.values()):
        reducer.detach()
