"""The writer: the event log as JSON lines in a file, while the program runs.

The program's thread only appends to a list; another thread turns events into text and writes them twice a second, and
at once where something long begins. So a killed process loses half a second at most, and its file is readable.
Lines are written whole: two processes never share a file.

A file that takes no more (a full disk) costs the rest of the report and one warning, never the program. One that cannot
be right, or would be lost by being written, is an `OptionError` where the context is entered.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import socket
import stat
import sys
import threading
import time
import warnings
from typing import Any

from fused_eager.cache.exits import call_at_exit

from ..config import OPTIONS, Config, OptionError, as_option
from ..log import site
from ..log.events import LOG, Event
from ..process import resident
from .schema import VERSION

EVERY = 0.5  # seconds between writes
MEMORY_EVERY = 5.0  # seconds between looks at the memory
URGENT = frozenset({"compiling", "open", "close", "compile-failed"})
BEGINNING = b'{"kind": "start", "t": '  # of every log that we write
LONGEST = 1 << 24  # bytes that are read of a first line: it has the command line, which may have some millions


class Writer:
    """Writes events to the file of one process. `pause` and `resume` follow the contexts that ask for it."""

    def __init__(self, path: str):
        self.path = path
        self.users = 0
        self.queue: list[Event] = []
        self.wake = threading.Event()
        self.lock = threading.Lock()
        self.done = False
        self.pid = os.getpid()
        self.zero = time.perf_counter()
        self.looked = 0.0
        self.error: OSError | None = None  # what ended the writing, until it has been told
        name, job = claim(path)
        self.file = name
        objection = _objection(name)
        if objection:
            raise ValueError(f"{name} {objection}")
        # Unbuffered, and always at the end: what is written is in the file, whatever becomes of us.
        self.fd = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o644)
        self._write([_line("start", 0.0, 0, _start(job))])
        self.thread = threading.Thread(target=self._work, daemon=True, name="fused_eager report")
        self.thread.start()
        call_at_exit(self.close)

    def __call__(self, event: Event) -> None:
        """The sink."""
        if self.done:
            return  # nobody would empty the queue
        self.queue.append(event)
        if event.kind in URGENT:
            self.wake.set()

    def _work(self) -> None:
        while not self.done:
            self.wake.wait(EVERY)
            self.wake.clear()
            self.drain()

    def drain(self) -> None:
        """Write what has been told so far."""
        if self.pid != os.getpid():
            return  # before the lock, which the parent's thread may have held at the fork
        with self.lock:
            lines = []
            while self.queue:
                batch, self.queue = self.queue, []
                lines += [_line(e.kind, e.time - self.zero, e.thread, e.data) for e in batch]
            at = time.perf_counter()
            if lines and at - self.looked > MEMORY_EVERY:
                self.looked = at
                lines.append(_line("memory", at - self.zero, 0, _memory()))
            self._write(lines)
        self.tell()

    def _write(self, lines: list[str]) -> None:
        if lines and self.fd >= 0:
            data = "".join(lines).encode()
            try:
                while data:
                    data = data[os.write(self.fd, data) :]
            except OSError as error:
                self.error = error
                self._end()

    def _end(self) -> None:
        self.done = True
        self.wake.set()
        self.queue = []
        fd, self.fd = self.fd, -1
        try:
            os.close(fd)
        except OSError as error:  # some file systems tell only here that what was written has found no room
            self.error = self.error or error

    def tell(self) -> None:
        """Once writing has ended: take this off the log, and say so once if it failed. Raises nothing, ever."""
        if not self.done:
            return
        with _lock:
            error, self.error = self.error, None
            _remove(self)
        if error is None:
            return  # it was closed in order, or another thread says it
        text = f"cannot write the report {self.file}: {error.strerror}; it ends there, the program goes on without it"
        try:
            warnings.warn(text, stacklevel=2)
        except Warning as told:  # warnings are errors here: the report's must not end the program, nor go unseen
            warnings.showwarning(told, UserWarning, __file__, 0)

    def close(self) -> None:
        """Write what is left, and that the process has ended in order."""
        if self.pid != os.getpid():
            return
        self.drain()
        at = time.perf_counter() - self.zero
        with self.lock:
            self._write([_line("memory", at, 0, _memory()), _line("end", at, 0, {})])
            if self.fd >= 0:
                self._end()
        self.tell()


def _line(kind: str, t: float, thread: int, data: dict[str, Any]) -> str:
    return json.dumps({"kind": kind, "t": round(t, 7), "thread": thread, **data}, default=str) + "\n"


def _start(job: str) -> dict[str, Any]:
    import importlib.metadata as metadata

    versions = {"python": platform.python_version()}
    for name in ("torch", "jax", "jaxlib", "fused-eager"):
        try:
            versions[name.replace("-", "_")] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name.replace("-", "_")] = "?"
    return {
        "v": VERSION,
        "job": job,
        "pid": os.getpid(),
        "rank": _rank(),
        "host": socket.gethostname(),
        "wall": time.time(),
        "argv": list(sys.argv),
        "versions": versions,
    }


def _memory() -> dict[str, int]:
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    rss = resident()
    return {"rss": rss, "peak": max(peak, rss)}


def _rank() -> int | None:
    text = os.environ.get("RANK", "")
    return int(text) if text.isdigit() else None


def claim(path: str) -> tuple[str, str]:
    """The file that this process may write, and the name of the job it belongs to.

    Rank 0 and a process without a rank write `path`; the other ranks `path.rank1` and so on; and a process that finds
    `path` taken by one that still lives (its parent, say) writes `path.pid1234`.
    """
    rank = _rank()
    if rank is not None:
        place = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return path if rank == 0 else f"{path}.rank{rank}", ":".join([*place, restarts])
    owner = _owner(path)
    if owner is not None:
        return f"{path}.pid{os.getpid()}", str(owner["job"])
    return path, f"{socket.gethostname()}:{os.getpid()}:{time.time():.3f}"


def _owner(path: str) -> dict[str, Any] | None:
    """The first line of `path`, if the process that wrote it is another one on this machine and lives."""
    try:
        first = _fields(_first_line(path))
        if first["host"] != socket.gethostname() or first["pid"] == os.getpid():
            return None
        os.kill(first["pid"], 0)
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return first if "job" in first else None


def _first_line(path: str) -> bytes:
    # A pipe would have us wait for whoever writes into it, and what some devices say has no end.
    if not stat.S_ISREG(os.stat(path).st_mode):
        return b""
    with open(path, "rb") as file:
        return file.readline(LONGEST)


def _fields(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _begins_a_log(line: bytes) -> bool:
    if not line.endswith(b"\n") and line.startswith(BEGINNING):
        return True  # torn: its process was killed, or the disk was full
    first = _fields(line)
    return first.get("kind") == "start" and "v" in first


def _objection(path: str) -> str:
    """Why `path` is not to be written, in words; empty if nothing is lost by it.

    Raises:
        OSError: it cannot be looked at.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return ""
    if not stat.S_ISREG(found.st_mode):
        return "is a folder, a pipe or a device"
    for fd in (1, 2):
        with contextlib.suppress(OSError):  # it is closed
            if os.path.samestat(found, os.fstat(fd)):
                return "is what the program prints into"
    if found.st_size and not _begins_a_log(_first_line(path)):
        return "is no event log, and is left as it is"
    return ""


_writers: dict[str, Writer] = {}
_lock = threading.Lock()


def attach(config: Config) -> Writer:
    """Write the event log to `config.report` from here on, until `detach`. Contexts may ask for it more than once.

    Raises:
        OptionError: the file cannot be written, or holds something else.
    """
    path = os.path.abspath(config.report)
    with _lock:
        writer = _writers.get(path)
        if writer is None or writer.pid != os.getpid():
            try:
                writer = _writers[path] = Writer(path)
            except (OSError, ValueError) as error:
                raise _refusal(config.report, path, error) from error
        writer.users += 1
        if writer.users == 1 and not writer.done:
            LOG.sinks.append(writer)
            _details(1)
    writer.tell()
    defaults = {name: option.default for name, option in OPTIONS.items()}
    changed = {name: getattr(config, name) for name in defaults if getattr(config, name) != defaults[name]}
    LOG.emit("open", mode=config.mode, options=changed, site=str(site.caller()))
    return writer


def detach(writer: Writer) -> None:
    """One context less that wants the file."""
    LOG.emit("close")
    with _lock:
        writer.users -= 1
        if writer.users == 0:
            _remove(writer)
    writer.drain()


def _remove(writer: Writer) -> None:
    if writer in LOG.sinks:
        LOG.sinks.remove(writer)
        _details(-1)


def _refusal(given: str, path: str, error: OSError | ValueError) -> OptionError:
    row = OPTIONS["report"]
    origin = f"environment variable {row.env}" if os.environ.get(row.env) == given else "an argument"
    # What is no OSError is our own objection, or a text that no system takes for a path.
    why = f"{error.filename or path} cannot be written: {error.strerror}" if isinstance(error, OSError) else str(error)
    return OptionError(
        f"option {row.name!r} cannot be {given!r} (from {origin}): {why}; "
        "allowed: a file that is new, empty or the event log of an earlier run, in a folder that exists; "
        f"default: {as_option(row.default)}"
    )


_asking = 0


def _details(by: int) -> None:
    global _asking
    _asking += by
    LOG.detailed = _asking > 0
    site.ask_for_details(by)


def want_details(by: int) -> None:
    """Count one more (1) or one less (-1) who wants what takes time to find out."""
    with _lock:
        _details(by)


def _in_child() -> None:
    # The writer's thread does not exist here (it may have held the lock), and the file is the parent's.
    global _asking, _lock
    _lock = threading.Lock()
    for writer in _writers.values():
        if writer in LOG.sinks:
            LOG.sinks.remove(writer)
    if _asking:
        site.ask_for_details(-_asking)
    _asking, LOG.detailed = 0, False
    _writers.clear()


os.register_at_fork(after_in_child=_in_child)
