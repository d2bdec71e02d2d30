"""Guards: what has to happen around calls that no dispatcher sees, as long as a context is open.

Raw access (`numpy`, `data_ptr`, pickle, DLPack, printing) has to see finished values; `backward()` and an optimizer
step are where a loop is cut; a new thread or process must not meet a pending value. All of it is undone when the last
context closes: importing and leaving change nothing.
"""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing.pool
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.dlpack
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fused_eager.fusion_rules.lowering import leaves

from . import aside, follower, native, run, site, telling
from .buffers import LOCK, TABLE, storage_of
from .intercept import looked_at, passed_sync, stepped
from .quiet import adopt, inside, is_own, stack, without
from .reasons import Reason
from .threads import THREAD, current_door, in_context_of


@dataclass(frozen=True, slots=True)
class Guard:
    """One patched callable: `owner.name`, whether it hands the tensor's memory to somebody outside, and whether it
    reads that of all its operands instead of the first alone."""

    owner: Any
    name: str
    exposes: bool = False
    operands: bool = False


# Everything on this list reads a tensor's memory without going through the dispatcher.
READERS: tuple[Guard, ...] = (
    Guard(torch.Tensor, "numpy", exposes=True),
    Guard(torch.Tensor, "__array__", exposes=True),
    Guard(torch.Tensor, "__dlpack__", exposes=True),
    Guard(torch.Tensor, "share_memory_", exposes=True),
    Guard(torch.Tensor, "data_ptr", exposes=True),
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
    Guard(torch, "tensor"),
    Guard(torch, "as_tensor"),
    Guard(torch, "from_dlpack", exposes=True),
    Guard(torch, "set_rng_state"),
    Guard(torch, "to_dlpack", exposes=True),
    Guard(torch.utils.dlpack, "to_dlpack", exposes=True),
    Guard(torch.Tensor, "__repr__"),
    Guard(torch.Tensor, "__format__"),
    Guard(torch.Tensor, "__deepcopy__"),
)
# These do go through the dispatcher, where a value is read; they are met to know when that is over.
NUMBERS: tuple[str, ...] = ("item", "__bool__", "__int__", "__float__", "__complex__", "__index__")

_listed = torch.Tensor.tolist  # the unpatched one


def _between_0_and_1(self: torch.Tensor, q: torch.Tensor) -> None:
    comparable = self.dtype is q.dtype and q.dim() <= 1 and self.numel() > 0  # else the composite says what is wrong
    if comparable and not all(0 <= value <= 1 for value in _listed(q.reshape(-1))):
        raise RuntimeError("quantile() q values must be in the range [0, 1]")


@dataclass(frozen=True)
class ReadingComposite:
    """A composite in C++ that reads the memory of an operand (at `position`) before it dispatches anything, or, where
    a mode is active, leaves out the `check` for which it would. Whoever has imported the function itself passes by a
    patched name, so these are met in the dispatcher.
    """

    op: OpOverload
    position: int
    check: Callable[[torch.Tensor, torch.Tensor], None] | None = None


READING_COMPOSITES: tuple[ReadingComposite, ...] = (
    ReadingComposite(torch.ops.aten.tensor_split.tensor_indices_or_sections, 1),
    ReadingComposite(torch.ops.aten.quantile.default, 1, _between_0_and_1),
    ReadingComposite(torch.ops.aten.nanquantile.default, 1, _between_0_and_1),
)
# Their checks fail under any dispatch mode, torch's own included: they run on finished tensors, natively.
TRACERS: tuple[str, ...] = ("trace", "trace_module")
PACKAGES = ("fused_eager", "fused_eager.fusion_rules", "fused_eager.cache")

_PLAIN = (type(None), bool, int, float, complex, str, bytes)  # what cannot hold a tensor

_lock = threading.Lock()
_users = 0
_undo: list[Callable[[], None]] = []


def _settled(t: Any, guard: Guard) -> bool:
    """Have a tensor's memory hold its value. Returns whether it did not before."""
    if t.is_nested or t.layout is not torch.strided or not torch._C._has_storage(t):
        return False
    storage = storage_of(t)
    with LOCK:
        b = TABLE.get(storage._cdata)
        if b is not None:
            run.settle(b, Reason("sync.memory", f"Tensor.{guard.name}"))
        # Whoever gets at the memory may write it: what pending ops are to read of it is read first.
        native.protect(storage)
        if guard.exposes:
            native.mark_exposed(storage)
    return b is not None


def _wrap(guard: Guard, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        door = THREAD.door
        if (door is None or door.hidden) and not guard.exposes and native.nothing_is_pending():
            return original(*args, **kwargs)  # as in printing, which reads each element of what is being read
        waited = []
        for a in leaves([args, kwargs] if guard.operands else args[:1]):
            if isinstance(a, torch.Tensor):
                with torch._C.DisableTorchFunctionSubclass():
                    waited.append(_settled(a, guard))
        # Many run ops on the way (printing many small ones, DLPack one that applies a conjugation): natively, so that
        # they find what they make, and that a print compiles nothing.
        out = _call_natively(original, *args, **kwargs)
        if waited:
            _was_read(any(waited))
        return out

    return call


def _was_read(waited: bool) -> None:
    door = current_door()
    if door is None:
        return
    if not door.aside:
        if door not in stack():
            return  # inside of an op: it is we who read
        looked_at(door.stream, site.here(), waited)
    aside.read(door)


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(*args: Any, **kwargs: Any) -> Any:
        number = original(*args, **kwargs)
        door = THREAD.door
        if door is None or door.hidden:
            return number
        if door.unseen:  # a loop that does little else would feel it
            door.unseen -= 1
        else:
            aside.read(door)
            follower.attend()
        return number

    return read


def _call_natively(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    door = current_door()
    if door is None or door.hidden:
        return function(*args, **kwargs)
    door.hidden = True
    try:
        with without(door):
            return function(*args, **kwargs)
    finally:
        door.hidden = False


def _settle_first(row: ReadingComposite) -> Callable[..., Any]:
    op, guard = row.op, Guard(torch.Tensor, row.op._opname)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        _settled(args[row.position], guard)
        if row.check is not None:
            row.check(args[0], args[row.position])
        return op._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)

    return kernel


def _meet_composites() -> Callable[[], None]:
    """Give the reading composites kernels of ours; returns what takes them away again.

    An override in torch's own namespace, for as long as a context is open: there is no Python name that all callers
    go through.
    """
    library = torch.library.Library("aten", "IMPL")
    for row in READING_COMPOSITES:
        for key in ("CPU", "AutogradCPU"):
            library.impl(row.op, _settle_first(row), key)
    return library._destroy


# A context may be entered in a loop: what was put in place of a callable is made once.
_made: dict[tuple[Any, str], tuple[Any, Any]] = {}


def _patch(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    own = name in vars(owner)
    known = _made.get((owner, name))
    if known is None or known[0] is not original:
        known = _made[owner, name] = original, make(original)
    setattr(owner, name, known[1])

    def undo() -> None:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)

    _undo.append(undo)


def _settle_everything(reason: Reason) -> None:
    """Before something that may look at any tensor from outside; not from inside the runtime."""
    if not inside():
        run.settle_all(reason)


def _before_start(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def start(thread: threading.Thread, *args: Any, **kwargs: Any) -> Any:
        door = current_door()
        if inside() or is_own(thread):
            adopt(thread)
        elif door is not None:
            thread.run = functools.partial(in_context_of, door, thread.run)  # type: ignore[method-assign]
        else:
            _settle_everything(Reason("sync.thread", "a thread starts"))
        return original(thread, *args, **kwargs)

    return start


def _before_submit(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def submit(pool: Any, job: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        door = current_door()
        if inside() or door is None:
            return original(pool, job, *args, **kwargs)
        return original(pool, in_context_of, door, job, *args, **kwargs)

    return submit


def _finished_first(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        _settle_everything(Reason("sync.thread", "a pool gets work"))
        return original(*args, **kwargs)

    return call


def _before_put(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def put(box: Any, item: Any, *args: Any, **kwargs: Any) -> Any:
        # Whoever takes it out may be a thread that was there before the context. What is hidden in an object or a
        # function cannot be known, so all is finished for those.
        if not all(isinstance(a, _PLAIN) for a in leaves([item])):
            _settle_everything(Reason("sync.thread", "an object is put in a queue"))
        return original(box, item, *args, **kwargs)

    return put


def hide_from_dynamo() -> None:
    """Tell torch's compiler not to trace the library itself when it runs inside a context."""
    from torch._dynamo import trace_rules as rules

    # Once: each time makes torch's list, and the pattern made of it, longer.
    if not hasattr(rules, "_fused_eager_told"):
        for package in PACKAGES:
            rules.add(package)
        rules._fused_eager_told = True  # type: ignore[attr-defined]


def _before_compile(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        hide_from_dynamo()
        # Dynamo compiles nothing below a dispatch mode: the function runs as written, which `fullgraph` would refuse.
        if kwargs.get("fullgraph") and current_door() is not None:
            kwargs["fullgraph"] = False
        return original(*args, **kwargs)

    return call


def _natively(reason: Reason) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            _settle_everything(reason)
            return _call_natively(original, *args, **kwargs)

        return call

    return make


def _after_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        door = current_door()
        if door is None:
            return original(*args, **kwargs)
        if door.stream.spell.left and native.nothing_is_pending():
            out = _call_natively(original, *args, **kwargs)  # nothing of it is recorded: it need not be seen
        else:
            out = original(*args, **kwargs)
        door.backwards += 1
        # What follows is most often an optimizer's step, and a thread that rests had better go on where a round begins.
        cut(Reason("cut.backward"), is_turn=door.backwards > 1)
        aside.passed_backward(door)
        return out

    return call


def cut(reason: Reason, is_turn: bool = True) -> None:
    """Flush the calling thread's stream, if it has one in mode fused. Where it rests until something has happened, it
    goes on if that `is_turn`."""
    door = current_door()
    if door is not None and not door.aside and door.stream.config.mode == "fused":
        if is_turn or door.stream.spell.until is None:
            passed_sync(door.stream)
        run.flush(door.stream, reason)
        follower.attend()


def _optimizer_steps(optimizer: Any, args: Any, kwargs: Any) -> None:
    door = current_door()
    if door is not None:
        door.stream.pace.stepping = True


def _optimizer_stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
    cut(Reason("cut.optimizer", type(optimizer).__name__))
    door = current_door()
    if door is not None:
        stepped(door)


def install() -> None:
    """Count one more open context; put the guards in place for the first."""
    global _users
    with _lock:
        _users += 1
        if _users > 1:
            return
        for guard in READERS:
            _patch(guard.owner, guard.name, functools.partial(_wrap, guard))
        for name in NUMBERS:
            _patch(torch.Tensor, name, _telling)
        for name in TRACERS:
            _patch(torch.jit, name, _natively(Reason("sync.memory", f"torch.jit.{name}")))
        _patch(torch, "compile", _before_compile)
        _patch(torch.autograd, "backward", _after_backward)
        _patch(threading.Thread, "start", _before_start)
        _patch(concurrent.futures.ThreadPoolExecutor, "submit", _before_submit)
        for name in ("apply_async", "_map_async", "imap", "imap_unordered"):
            _patch(multiprocessing.pool.Pool, name, _finished_first)
        _patch(queue.Queue, "put", _before_put)
        _undo.append(_meet_composites())
        _undo.append(register_optimizer_step_pre_hook(_optimizer_steps).remove)
        _undo.append(register_optimizer_step_post_hook(_optimizer_stepped).remove)
        _undo.append(register_module_parameter_registration_hook(telling.parameter_made).remove)


def uninstall() -> None:
    """Count one context less; take the guards away after the last."""
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            while _undo:
                _undo.pop()()


def _before_fork() -> None:
    if not TABLE:
        return
    try:
        _settle_everything(Reason("sync.fork"))
    except Exception as error:
        # Whatever is raised in this hook is printed and forgotten: the parent is told at its next sync.
        run.BACKLOG.owed.append((threading.get_ident(), error))


def _in_child() -> None:
    from . import intercept

    # XLA's threads do not exist here. Everything was bound before the fork, so ATen can go on alone.
    intercept.enter_child()


os.register_at_fork(before=_before_fork, after_in_child=_in_child)
