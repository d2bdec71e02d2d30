"""Stand-ins: what stands, while a context is open, in the place of what distributed training calls in C++.

The reducer's own methods, which read and write memory by themselves; a communication hook, which begins by asking for
its bucket; and futures, whose callbacks may run in another thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from torch.autograd import Variable

from fused_eager.fusion_rules.lowering import leaves

from ...devices.buffer import LOCK
from ...executing.materialize import materialize_all
from ...log.reasons import Reason
from ...ranks import job
from ...recording import native
from .buckets import CURRENT, LOOKS, materialize, shut
from .readers import natively
from .reducers import know, leave, seeing_door
from .threads import THREAD

IS_AVAILABLE = distributed.is_available()
if IS_AVAILABLE:
    from torch._C import _distributed_c10d as c10d

    from ...ranks.work import kept_for_reducers


def _made(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if seeing_door() is not None:
            materialize_all(LOOKS)
        natively(original, self, *args, **kwargs)
        know(self, list(args[0] if args else kwargs["params"]))

    return __init__


def _prepared(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare_for_backward(self: Any, outputs: Any) -> None:
        reducer = know(self)
        reducer.begins(not isinstance(outputs, list) or len(outputs) > 0)
        if THREAD.door is not None:
            reducer.attach()
        original(self, outputs)

    return prepare_for_backward


def _rebuilt(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _rebuild_buckets(self: Any) -> Any:
        reducer = know(self)
        if reducer.is_rebuilt or seeing_door() is None:
            out = original(self)
        else:
            reducer.attach()
            with LOCK:
                materialize(reducer.storages())
            out = natively(original, self)
        if out:
            reducer.is_rebuilt = True
            if reducer.attached:
                reducer.look()
        return out

    return _rebuild_buckets


def _alone(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if seeing_door() is not None:
            shut()
            materialize_all(LOOKS)
        return natively(original, *args, **kwargs)

    return call


def _finish_values(tree: Any) -> None:
    """Have tensors finished that another thread, or C++, may look at; what cannot be seen through is looked for."""
    for leaf in leaves([tree]):
        if isinstance(leaf, torch.Tensor):
            with LOCK:
                native.materialize([leaf], LOOKS)


def _bucket_given(original: Callable[..., Any]) -> Callable[..., Any]:
    """A hook for communication begins. It may look at anything, hand it to other threads, and go on in those: all is
    finished, and what the hook does runs natively. So does the end of the pass, where the reducer asks whether what the
    hook has returned shares memory with the bucket, once for each parameter."""

    @functools.wraps(original)
    def call(self: Any, *args: Any) -> Any:
        door = seeing_door()
        if door is not None:
            shut()
            materialize_all(LOOKS)
            task = torch._C._current_graph_task_id()
            if task != -1:
                leave(door)
                if task != CURRENT.ends_natively:
                    CURRENT.ends_natively = task
                    Variable._execution_engine.queue_callback(_at_the_end)
        return original(self, *args)

    return call


def _at_the_end() -> None:
    door = seeing_door()
    if door is not None:
        materialize_all(LOOKS)
        leave(door)


def _called_back(original: Callable[..., Any]) -> Callable[..., Any]:
    """What follows a future may run in another thread: it finds finished values, and what it returns is finished."""

    @functools.wraps(original)
    def call(self: Any, callback: Callable[..., Any]) -> Any:
        if seeing_door() is None:
            return original(self, callback)
        materialize_all(Reason("sync.thread", "a future is given something to call"))

        def called(future: Any) -> Any:
            out = callback(future)
            if THREAD.door is not None:
                _finish_values(out)
            return out

        return original(self, called)

    return call


def _given(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_result(self: Any, result: Any) -> None:
        if seeing_door() is not None:
            _finish_values(result)
        original(self, result)

    return set_result


Row = tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]


def rows() -> tuple[Row, ...]:
    """What is to be put in place while a context is open: whose, its name, and what is made of it."""
    if not IS_AVAILABLE:
        return ()
    return (
        (c10d.Reducer, "_rebuild_buckets", _rebuilt),
        (c10d.Reducer, "_delay_all_reduce", _alone),
        (c10d.Reducer, "_autograd_hook", _alone),
        (c10d.Reducer, "_run_comm_hook", _alone),
        (c10d.Reducer, "_run_allreduce_hook", _alone),
        (distributed, "_verify_params_across_processes", _alone),
        (c10d.GradBucket, "buffer", _bucket_given),
        (c10d.GradBucket, "gradients", _bucket_given),
        (c10d.GradBucket, "set_buffer", _bucket_given),
        (c10d.Work, "wait", job.waits),
        (torch._C.Future, "then", _called_back),
        (torch._C.Future, "add_done_callback", _called_back),
        (torch._C.Future, "set_result", _given),
    )


def watch() -> None:
    """Get to know each reducer, whether a context is open or not: it may be made and used before one is."""
    kind: Any = c10d.Reducer if IS_AVAILABLE else None
    if kind is not None and not hasattr(kind, "_fused_eager_watched"):
        kind._fused_eager_watched = True
        kind.__init__ = _made(kind.__init__)
        kind.prepare_for_backward = _prepared(kind.prepare_for_backward)
        kind._set_forward_pass_work_handle = kept_for_reducers(kind._set_forward_pass_work_handle)


watch()
