"""Collectives of CPU tensors in a context: torch's own groups run them, on values that are computed before all others.

A functional collective consists of ops of `c10d` and others, each of which comes to the mode as well. So the copy that
it makes is recorded, and what it waits for is told of like any collective.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import distributed

from fused_eager.fusion_rules.lowering import leaves

from ...devices.buffer import LOCK
from ...executing import run
from ...log import site
from ...log.reasons import Reason
from ...quiet import call, functions_shown
from ...ranks import calls, job
from ...ranks.table import BY_OP, Collective
from ...recording import native
from ...tracing.opinfo import OpInfo
from ...tracing.stream import Stream
from . import buckets

if distributed.is_available():
    from ...ranks.work import FollowedWork, described, nbytes_of, told

NAMESPACES = frozenset({"c10d", "_c10d_functional"})


_KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # the op's own: past the mode, which sees what that calls


class _Within(threading.local):
    """Whether this thread is in a functional collective: the works of its parts are C++'s to wait for."""

    functional = False


_WITHIN = _Within()


def run_collective(
    stream: Stream, info: OpInfo, args: Any, kwargs: dict[str, Any], seeing: Callable[[], AbstractContextManager[Any]]
) -> Any:
    """Run a collective, or wait for one.

    Arguments:
        seeing: a context in which the ops that it consists of are seen.

    Raises:
        RankLost: another rank is lost.
        CollectivesDiffer: it is another one than other ranks have called.
    """
    space, _, name = info.op._schema.name.partition("::")
    row = BY_OP.get(name) if space == "c10d" else None
    with job.explained(job.here):
        if row is not None:
            return _started(stream, info, row, args, kwargs)
        if space != "c10d" and "group_name" in info.names:
            before, _WITHIN.functional = _WITHIN.functional, True
            try:
                with seeing():
                    return info.op.redispatch(_KERNEL, *args, **kwargs)
            finally:
                _WITHIN.functional = before
        return native.run_free(stream, info, args, kwargs, "a custom op may do more than compute")


def _started(stream: Stream, info: OpInfo, row: Collective, args: Any, kwargs: dict[str, Any]) -> Any:
    """Start a collective of `c10d`."""
    named = {**dict(zip(info.names, args, strict=False)), **kwargs}
    group = distributed.ProcessGroup.unbox(named["process_group"])
    calls.begin(row.op, named, stream.config, group)
    reason, began = Reason("sync.collective", row.op, site.describe(site.here())), time.monotonic()
    tensors = [t for name in (*row.reads, *row.updates) for t in leaves([named.get(name)])]
    with LOCK:
        if stream.unfinished is not None:
            run.flush(stream, Reason("cut.full", "after an interrupt"))
        # What follows may be done in another thread, as in hooks that compress.
        run.flush_first([*native.buffers_of(tensors), *buckets.pending()], reason)
        native.make_ready(info, args, kwargs, reason)
        buckets.finish(reason)
    place = str(reason.site)
    ended = told(row, group, nbytes_of(list(named.values())), time.monotonic() - began, place)
    with functions_shown():
        out = call(info.op, args, kwargs)
    boxed = out[-1] if isinstance(out, tuple) else out
    if boxed is None:
        return None  # a monitored barrier
    is_pythons = not (row.is_for_all or _WITHIN.functional)
    followed = FollowedWork(
        distributed.Work.unbox(boxed), ended, described(row, group, place), is_pythons, is_told_only=True
    )
    work = followed.boxed()
    return (*out[:-1], work) if isinstance(out, tuple) else work
