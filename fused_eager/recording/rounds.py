"""Rounds: where a stream that is about to be full is cut, so that a loop that never stops for anything is cut alike.

A stream may hold so many ops. Cut there, a loop whose rounds are of another length is cut at another op each time, and
each of those streams has to be compiled. So past one half of the limit the stream ends before the op that it began
with, if that comes again with values that the stream has not made, as at the beginning of a round; past three quarters,
if it comes again at all, as in a loop that goes on with what it has made.
"""

from __future__ import annotations

from typing import Any

import torch

from fused_eager.fusion_rules.lowering import leaves

from ..log import site
from ..memory.buffers import buffer_of, has_memory
from ..tracing.opinfo import OpInfo
from ..tracing.stream import Stream


def comes_again(stream: Stream, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a stream that is at least half full is to end before this op."""
    first, limit = stream.nodes[0], stream.config.max_pending
    if first.op is not info.op or first.place != site.here():
        return False
    return len(stream.nodes) >= limit * 3 // 4 or not any(map(_is_pending, leaves([args, kwargs])))


def _is_pending(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not has_memory(value):
        return False
    found = buffer_of(value)
    return found is not None and found.stream is not None
