"""Guards: what has to happen around calls that no dispatcher sees, as long as a context is open.

Raw access has to see finished values (`readers`); `backward()` and an optimizer step are where a loop is cut; a new
thread or process must not meet a pending value. All of it is undone when the last context closes: importing and leaving
change nothing.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import multiprocessing.pool
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.random
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fused_eager.fusion_rules.lowering import leaves

from ... import follower
from ...compiling import emit
from ...devices.host.buffers import TABLE
from ...executing import run
from ...executing.materialize import materialize_all
from ...log.reasons import Reason
from ...quiet import adopt, inside, is_own, uncompiled
from ...ranks import job
from ...recording import native
from . import (
    buckets,
    bypass,
    composites,
    distribution,
    formulas,
    gc_hooks,
    keys,
    profiling,
    readers,
    reducers,
    subnormals,
    tracers,
)
from .imports import after_import
from .intercept import FrontDoor, enter_child, stepped
from .readers import natively
from .threads import current_door, in_context_of

_lock = threading.Lock()
_users = 0
_undo = contextlib.ExitStack()


# A context may be entered in a loop: what was put in place of a callable is made once.
_made: dict[tuple[Any, str], tuple[Any, Any]] = {}


def _patch(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    own = name in vars(owner)
    known = _made.get((owner, name))
    if known is not None and original is known[1]:  # the program had it in hand, and has put it back
        original = known[0]
    if known is None or known[0] is not original:
        known = _made[owner, name] = original, make(original)
    setattr(owner, name, known[1])

    def undo() -> None:
        if not _stands(owner, name):
            return  # the program has put something else there, or has taken away what was
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)

    _undo.callback(undo)


def _stands(owner: Any, name: str) -> bool:
    """Whether what was put in place of `owner.name` is there still."""
    return vars(owner).get(name) is _made[owner, name][1]


def _recode(function: Any, body: Any, helper: Callable[..., Any]) -> None:
    """Have a function of torch's run `body`, which finds `helper` by its name. It stays the function that all know."""
    before, names = function.__code__, function.__globals__
    code = body.__code__.replace(
        co_name=before.co_name, co_filename=before.co_filename, co_firstlineno=before.co_firstlineno
    )
    names[helper.__name__] = helper
    function.__code__ = code

    def undo() -> None:
        if function.__code__ is code:
            function.__code__ = before
        names.pop(helper.__name__, None)

    _undo.callback(undo)


def _set_rng_state(new_state: Any) -> None:
    default_generator.set_state(_fused_eager_finished(new_state))  # type: ignore[name-defined]  # noqa: F821


def _fused_eager_finished(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        readers.materialized(state, readers.Guard(torch.random, "set_rng_state"))
    return state


def _materialize_everything(reason: Reason) -> None:
    """Before something that may look at any tensor from outside; not from inside the runtime."""
    if not inside():
        materialize_all(reason)


def _before_start(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def start(thread: threading.Thread, *args: Any, **kwargs: Any) -> Any:
        door = current_door()
        if inside() or is_own(thread):
            adopt(thread)
        elif door is not None:
            thread.run = functools.partial(_run_in, door, thread, vars(thread).get("run"))  # type: ignore[method-assign]
        else:
            _materialize_everything(Reason("sync.thread", "a thread starts"))
        return original(thread, *args, **kwargs)

    return start


def _run_in(door: FrontDoor, thread: threading.Thread, own: Callable[[], Any] | None) -> Any:
    # What stands for `run` refers to the thread: were it to stay, both would wait for the garbage collector.
    del thread.run
    if own is not None:
        thread.run = own  # type: ignore[method-assign]
    return in_context_of(door, thread.run)


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
        _materialize_everything(Reason("sync.thread", "a pool gets work"))
        return original(*args, **kwargs)

    return call


def _before_put(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def put(box: Any, item: Any, *args: Any, **kwargs: Any) -> Any:
        # Whoever takes it out may be a thread that was there before the context. What is hidden in an object or a
        # function cannot be known, so all is finished for those.
        if not all(isinstance(a, readers.PLAIN) for a in leaves([item])):
            _materialize_everything(Reason("sync.thread", "an object is put in a queue"))
        return original(box, item, *args, **kwargs)

    return put


@functools.cache  # one for both modules that know its name: torch itself puts one in the place of the other
def _after_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        door = current_door()
        if door is None or not kwargs.get("accumulate_grad"):  # `autograd.grad` leaves no gradients, and cuts nothing
            return original(*args, **kwargs)
        reducers.attach()
        try:
            with job.explained(lambda: job.here("backward")):
                if not door.bypassed and door.policy.backoff.left and native.nothing_is_pending():
                    out = natively(original, *args, **kwargs)  # nothing of it is recorded: it need not be seen
                else:
                    out = original(*args, **kwargs)
        finally:
            buckets.shut()
        if not door.bypassed:
            door.backwards += 1
            # What follows is most often an optimizer's step, and a thread that rests had better go on where a round
            # begins.
            cut(Reason("cut.backward"), is_turn=door.backwards > 1)
        bypass.passed_backward(door)
        return out

    return call


def cut(reason: Reason, is_turn: bool = True) -> None:
    """Flush the calling thread's stream, if it has one in mode fused. Where it rests until something has happened, it
    goes on if that `is_turn`."""
    door = current_door()
    if door is not None and not door.bypassed and door.stream.config.mode == "fused":
        if is_turn or door.policy.backoff.until is None:
            door.policy.pass_sync()
        run.flush(door.stream, reason)
        follower.attend()


def _optimizer_steps(optimizer: Any, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():  # another thread's, which has no context
        return
    door = current_door()
    if door is not None:
        door.policy.autotuner.stepping = True


def _optimizer_stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    door = current_door()
    if door is not None:
        if not door.bypassed:
            cut(Reason("cut.optimizer", type(optimizer).__name__))
        stepped(door)


for _hook in (_optimizer_steps, _optimizer_stepped):
    tracers.have_traced(uncompiled(_hook))


def install() -> None:
    """Count one more open context; put the guards in place for the first."""
    global _users
    with _lock:
        _users += 1
        if _users > 1:
            return
        for guard in readers.READERS:
            _patch(guard.owner, guard.name, functools.partial(readers.settling, guard))
        for name in readers.NUMBERS:
            _patch(torch.Tensor, name, readers.noticing)
        _patch(torch.Tensor, "__new__", readers.constructing)
        for owner in (torch.autograd, torch.autograd.graph):
            _patch(owner, "_engine_run_backward", _after_backward)
        _recode(torch.random.set_rng_state, _set_rng_state, _fused_eager_finished)
        _patch(threading.Thread, "start", _before_start)
        _patch(concurrent.futures.ThreadPoolExecutor, "submit", _before_submit)
        for name in ("apply_async", "_map_async", "imap", "imap_unordered"):
            _patch(multiprocessing.pool.Pool, name, _finished_first)
        _patch(queue.Queue, "put", _before_put)
        rows = *keys.rows(), *tracers.rows(), *profiling.rows(), *distribution.rows(), *subnormals.rows()
        for owner, name, make in rows:
            _patch(owner, name, make)
        _undo.callback(profiling.meet_marks())
        profiling.look()
        _undo.callback(profiling.forget)
        _undo.callback(reducers.detach)
        _undo.callback(composites.meet_composites())
        _undo.callback(formulas.meet_formulas())
        _undo.callback(gc_hooks.watch())
        _undo.callback(register_optimizer_step_pre_hook(_optimizer_steps).remove)
        _undo.callback(register_optimizer_step_post_hook(_optimizer_stepped).remove)
        _undo.callback(register_module_parameter_registration_hook(emit.parameter_made).remove)
    # Not in the lock: another thread may be importing it, and then come here.
    give_up = after_import(tracers.DYNAMO, _constructor_as_ever, _meet_dynamo)
    with _lock:
        _undo.callback(give_up)


@contextlib.contextmanager
def _constructor_as_ever() -> Iterator[None]:
    """In the body, `torch.Tensor.__new__` is torch's own: Dynamo notes it by identity when it is imported."""
    with _lock:
        stood = bool(_users) and _stands(torch.Tensor, "__new__")
        if stood:
            del torch.Tensor.__new__
    try:
        yield
    finally:
        with _lock:
            if stood and _users and "__new__" not in vars(torch.Tensor):
                torch.Tensor.__new__ = _made[torch.Tensor, "__new__"][1]  # type: ignore[method-assign]


def _meet_dynamo() -> None:
    """Torch's compiler has been imported, or was before: patch it, if a context is open still."""
    with _lock:
        if _users:
            for owner, name, make in tracers.rows_of_dynamo():
                _patch(owner, name, make)


def renew() -> None:
    """Make the readers of numbers anew: in C++, as the compiled follower can be had from now on."""
    with _lock:
        for name in readers.NUMBERS:
            if (torch.Tensor, name) not in _made:
                continue
            stood, original = bool(_users) and _stands(torch.Tensor, name), _made[torch.Tensor, name][0]
            _made[torch.Tensor, name] = original, readers.noticing(original)
            if stood:
                setattr(torch.Tensor, name, _made[torch.Tensor, name][1])


def uninstall() -> None:
    """Count one context less; take the guards away after the last."""
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            _undo.close()


def _before_fork() -> None:
    if not TABLE:
        return
    try:
        _materialize_everything(Reason("sync.fork"))
    except Exception as error:
        # Whatever is raised in this hook is printed and forgotten: the parent is told at its next sync.
        run.DEFERRED.owed.append((threading.get_ident(), error))


# In a child XLA's threads do not exist. Everything was bound before the fork, so ATen can go on alone.
os.register_at_fork(before=_before_fork, after_in_child=enter_child)
