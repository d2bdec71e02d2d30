"""How much memory is free: a region that needs more at once is not run by XLA, where ATen, op by op, may need less.

What the system can give (`MemAvailable`) counts, or what is left to the process's control groups, as in a container:
the least of them. Linux ends a process that takes more, without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ASKED = 1 << 28  # bytes from which on it is asked: below, looking would cost more than it is worth
SHARE = 0.9  # of what is free that one region may take
WASTE = 3.0  # times the bytes of all its values that a region may take beside its inputs

_MEMINFO, _GROUPS, _MOUNT = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def lacks(needed: int) -> int | None:
    """The bytes that are free, if a region that needs so many should not be run; None if it may, or nobody can tell."""
    found = free()
    return found if found is not None and needed > SHARE * found else None


def free() -> int | None:
    """Bytes that this process can still have; None where nobody can tell."""
    return min(_sources(), default=None)


def _sources() -> Iterator[int]:
    try:
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    yield from _groups()


def _groups() -> Iterator[int]:
    """What is left to each control group that the process is in (version 2), the innermost first."""
    try:
        own = [line[3:] for line in _GROUPS.read_text().splitlines() if line.startswith("0::")]
    except OSError:
        return
    for path in own:
        group = _MOUNT / path.strip("/")
        for each in (group, *group.parents):
            if each == _MOUNT.parent:
                break
            try:
                limit = int((each / "memory.max").read_text())  # or "max"
                used = int((each / "memory.current").read_text())
                stat = dict(line.split() for line in (each / "memory.stat").read_text().splitlines())
                yield limit - used + int(stat.get("inactive_file", 0))  # which goes when it is needed
            except (OSError, ValueError):
                continue
