"""What a rank says of itself: where its program is, and in which collective it waits.

It is found out by looking at the stack of the main thread from another one, about once a second, so that the program
itself pays nothing for it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import socket
import sys
import sysconfig
import threading
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from fused_eager.cache import alive

from .. import progress
from ..log import site

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "frontends", "collectives") + os.sep
_WORK = os.path.join(os.path.dirname(__file__), "work.py")
_CALLS = os.path.join(_TORCH, "distributed", "distributed_c10d.py")
_SURE = (_CALLS, os.path.join(_TORCH, "distributed", "_functional_collectives.py"), _OURS, _WORK)
_USERS = (os.path.join(_TORCH, "distributed") + os.sep, os.path.join(_TORCH, "nn", "parallel") + os.sep)
_WRAPS = os.path.join(_TORCH, "distributed", "c10d_logger.py")
IDLE = 0.2  # of a core: a process that takes less of it waits
_BACKWARD = os.path.join(_TORCH, "autograd", "graph.py")


_DECORATES = "typing_extensions.py"  # torch marks functions as deprecated with it

_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = sysconfig.get_path("platlib") + os.sep  # inside of it
_JAX = os.path.join(_INSTALLED, "jax") + os.sep  # a collective may wait in it


@functools.lru_cache(1024)
def is_programs(file: str) -> bool:
    """Whether code of this file is the program's: not torch's, JAX's, ours, or the standard library's."""
    if site.is_internal(file) or file.startswith(_JAX) or os.path.basename(file) == _DECORATES:
        return False
    return not file.startswith(_STANDARD) or file.startswith(_INSTALLED)


@dataclass(frozen=True, slots=True)
class Status:
    """One rank at one moment.

    `beat` counts up, and is all that says that the rank lives. `line` is the program's, `collective` what it waits in
    there ("": it does not), `doing` what the library lets it wait for, as "compiling ...", and `seconds` for how long
    it has been at that. `host` names the machine so that processes of two containers are not taken for one.
    """

    rank: int
    beat: int = 0
    line: str = "?"
    collective: str = ""
    doing: str = ""
    seconds: float = 0.0
    host: str = ""
    pid: int = 0
    has_ended: bool = False

    def text(self) -> str:
        """As it goes through the store."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def parse(text: str) -> Status:
        """What `text` has made."""
        return Status(**json.loads(text))

    def words(self) -> str:
        """What it is at: behind "rank 3, "."""
        what = self.doing or (f"in {self.collective} at {self.line}" if self.collective else f"at {self.line}")
        return f"{what} {self.seconds:.0f} s" if self.doing else f"{what} for {self.seconds:.0f} s"

    def process(self) -> str:
        """What the system says of its process: a letter as `ps` shows it, "gone", or "" where it cannot be known."""
        if self.host != this_host() or not self.pid:
            return ""
        try:
            found = alive.stat_of(self.pid)
        except OSError:
            return ""
        return "gone" if found is None or found[0] in alive.ENDED else found[0]

    def processor_time(self) -> float:
        """The seconds for which its process has had a processor, and its threads have stood in the system's queue for
        one; 0.0 where that cannot be known. Who sleeps, or is stopped, stands in no queue."""
        if self.host != this_host() or not self.pid:
            return 0.0
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            threads = os.listdir(f"/proc/{self.pid}/task")
        except OSError:
            return 0.0
        queued = sum(_queued(f"/proc/{self.pid}/task/{thread}/schedstat") for thread in threads)
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + queued


def _queued(path: str) -> float:
    """Of a thread; 0.0 where the system does not tell, or the thread has just ended."""
    try:
        with open(path) as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


@functools.cache
def this_host() -> str:
    """This machine, as seen by processes that can see one another."""
    parts = [socket.gethostname()]
    for path, read in (("/proc/sys/kernel/random/boot_id", _contents), ("/proc/self/ns/pid", os.readlink)):
        try:
            parts.append(read(path).strip())
        except OSError:
            parts.append("?")
    return "/".join(parts)


def _contents(path: str) -> str:
    with open(path) as file:
        return file.read()


@dataclass(frozen=True, slots=True)
class Place:
    """Where the main thread is: the program's line, and the collective that it is in ("": none), by the name of the
    function. Where that `is_sure` it is a collective itself; else something that may be waiting for one, or computing.
    `group` is its process group, if it was looked for.
    """

    line: str
    collective: str
    is_sure: bool = False
    group: Any = None


def place(detailed: bool = False, thread: int | None = None) -> Place:
    """Where the main thread is now, or another one. With `detailed`, the group of the collective is looked for, too."""
    frame: FrameType | None = sys._current_frames().get(thread or threading.main_thread().ident or 0)
    line, collective, is_sure, group = "?", "", False, None
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if is_programs(file):
            line = f"{file}:{frame.f_lineno}"
            break
        if file.startswith(_SURE):
            is_works = file == _WORK or file.startswith(_OURS)
            waited_for = _waited_for(frame.f_locals) if is_works else ""
            is_inner = is_works or name.startswith("_")  # no function that a program calls
            collective, is_sure = waited_for or (collective if is_inner and is_sure else name), True
            if detailed and file == _CALLS:
                group = frame.f_locals.get("group", group)
        elif not is_sure and file != _WRAPS and file.startswith(_USERS) and name != "<module>":  # imported just now
            collective = name
        elif not is_sure and file == _BACKWARD and name == "_engine_run_backward":
            collective = "backward"
        frame = frame.f_back
    return Place(line, collective, is_sure, group)


def _waited_for(values: dict[str, Any]) -> str:
    """The collective that one of our functions is at, by its local values."""
    called = getattr(values.get("self"), "called", "")
    return str(called or getattr(values.get("row"), "op", "").strip("_"))


class Observer:
    """Looks where this rank is, and for how long it has been there."""

    def __init__(self, rank: int):
        self.rank, self._beat = rank, 0
        self._what: tuple[str, ...] = ()
        self._since = time.monotonic()
        self._seen = (self._since, time.process_time())

    def look(self) -> Status:
        """The rank's status now."""
        at = place()
        doing = progress.doing(threading.main_thread().ident or 0)
        now, worked = time.monotonic(), time.process_time()
        is_idle = worked - self._seen[1] < IDLE * (now - self._seen[0])
        self._seen = now, worked
        # Autograd waits for a reducer's collectives in C++, and a model computes in what wraps it.
        collective = at.collective if at.is_sure or is_idle else ""
        what = (doing,) if doing else (at.line, collective)
        if what != self._what:
            self._what, self._since = what, now
        self._beat += 1
        seconds = round(now - self._since, 1)
        return Status(self.rank, self._beat, at.line, collective, doing, seconds, this_host(), os.getpid())
