"""The reducer of DistributedDataParallel on a device: it keeps which parameters were used on the host.

It counts there, and for an accelerator copies the counts by way of pinned memory to reduce them, which a device that is
registered in Python cannot have. Its group reduces CPU tensors as well, so they stay where they are.

Its built-in hook that compresses asks for a future that C++ knows to be one of tensors. One that Python has made is
none, so the same hook in Python takes its place.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from torch._C import _distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode

from ...ranks.work import kept_for_reducers
from ..device.transfers import is_ours

_EMPTY = torch.ops.aten.empty.memory_format
_GROUPS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # of the reducers of a device's tensors


class _CountsOnTheHost(TorchDispatchMode):
    """The only whole numbers that a reducer asks room for are these."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is _EMPTY and given.get("dtype") is torch.int32:
            given = {**given, "device": torch.device("cpu")}
        return func(*args, **given)


def _made(original: Callable[..., Any], serve: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, parameters: Any, buckets: Any, sizes: Any, group: Any, *args: Any, **kwargs: Any) -> None:
        if not any(map(is_ours, parameters)):
            original(self, parameters, buckets, sizes, group, *args, **kwargs)
            return
        serve(group)
        with _CountsOnTheHost():
            original(self, parameters, buckets, sizes, group, *args, **kwargs)
        _GROUPS[self] = group

    return __init__


def _set(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _set_static_graph(self: Any) -> None:  # which begins to count anew
        with _CountsOnTheHost():
            original(self)

    return _set_static_graph


def _built_in(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _register_builtin_comm_hook(reducer: Any, comm_hook_type: Any) -> None:
        if comm_hook_type != c10d.BuiltinCommHookType.FP16_COMPRESS or reducer not in _GROUPS:
            original(reducer, comm_hook_type)
            return
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        c10d._register_comm_hook(reducer, _GROUPS[reducer], fp16_compress_hook)

    return _register_builtin_comm_hook


def install(serve: Callable[[Any], Any]) -> None:
    """Once for each process. `serve`: lets a group have CPU tensors reduced."""
    kind: Any = c10d.Reducer
    kind.__init__ = _made(kind.__init__, serve)
    kind._set_static_graph = _set(kind._set_static_graph)
    kind._set_forward_pass_work_handle = kept_for_reducers(kind._set_forward_pass_work_handle)
    package: Any = distributed
    package._register_builtin_comm_hook = _built_in(c10d._register_builtin_comm_hook)
