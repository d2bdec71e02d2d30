"""Collectives of CPU tensors in a context: torch's own groups run them, and their errors say which rank is lost."""

from __future__ import annotations

from typing import Any

from ...ranks import calls, job
from ...recording import native
from ...tracing.opinfo import OpInfo
from ...tracing.stream import Stream
from . import buckets

NAMESPACES = frozenset({"c10d", "_c10d_functional"})


def call(stream: Stream, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a collective, or wait for one.

    Raises:
        RankLost: another rank is lost.
        CollectivesDiffer: it is another one than other ranks have called.
    """
    buckets.finish_buckets()
    named = {**dict(zip(info.names, args, strict=False)), **kwargs}
    if "process_group" in named or "group_name" in named:
        calls.begin(info.op._schema.name.partition("::")[2], named, stream.config)
    with job.explained(job.here):
        return native.run_free(stream, info, args, kwargs, "a custom op may do more than compute")
