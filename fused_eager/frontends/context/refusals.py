"""Refusals: what is said of an access that the trap has refused, where its exception passes the library again.

The words of the exception are torch's: the storage can carry others, but only from C++, one copy for each. So a note
names the line of the program, what that line called, and which values are pending there, with the op and line of each.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from types import TracebackType

import torch

from ...devices.buffer import LOCK, Buffer
from ...devices.host import trap
from ...devices.host.buffers import buffer_of
from ...devices.storage import has_memory
from ...log import site
from ...log.events import LOG
from ...tracing.stream import Stream

_NAMED = 4  # pending values, at most
_BEGINS = "fused_eager: "


def explain(error: BaseException | None) -> None:
    """Add what is known to an exception of the trap's; any other is left as it is."""
    if error is None or not trap.is_refusal(error):
        return
    if any(note.startswith(_BEGINS) for note in getattr(error, "__notes__", ())):
        return
    frames = list(_frames(error.__traceback__))
    mine = [frame for frame in frames if not site.is_internal(frame.tb_frame.f_code.co_filename)]
    line, called = "an unknown line", ""
    if mine:
        code, number = mine[-1].tb_frame.f_code, mine[-1].tb_lineno
        line = f"{code.co_filename}:{number}"
        called = linecache.getline(code.co_filename, number).strip()
    # From the program's own line inwards: torch's Python on the way knows the tensor by another name.
    pending = _pending(frames[frames.index(mine[-1]) :] if mine else frames)
    LOG.emit("island", op=called or "C++", reason="C++ was refused the memory of a pending value", site=line)
    said = (
        f"{_BEGINS}at {line}{f' (`{called}`)' if called else ''} C++ looks at the memory of a value that is still "
        f"pending, and no dispatch mode sees it. Pending there: {pending or 'nothing that has a name'}. "
        "`fused_eager.sync()` in front of that line finishes all values"
    )
    if hasattr(error, "add_note"):
        error.add_note(said)
    else:  # Python 3.10
        error.args = (f"{error}\n{said}", *error.args[1:])


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _pending(frames: list[TracebackType]) -> str:
    """The names of pending tensors in these frames, and what makes each."""
    found: dict[int, str] = {}
    with LOCK, torch._C.DisableTorchFunction():
        for frame in frames:
            for name, value in list(frame.tb_frame.f_locals.items()):
                for t in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(t, torch.Tensor) and has_memory(t):
                        buffer = buffer_of(t)
                        if buffer is not None and len(found) < _NAMED:
                            found.setdefault(buffer.cdata, f"`{name}`{_maker(buffer)}")
    return ", ".join(found.values())


def _maker(buffer: Buffer) -> str:
    if not isinstance(buffer.stream, Stream):
        return ""
    for node in buffer.stream.nodes:
        if any(result.vid == buffer.vid for result in node.results):
            return f" (made by {node.op} at {site.describe(node.place)})"
    return ""
