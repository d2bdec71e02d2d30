"""Whether another process of this host is alive, from what it has written of itself: so that nobody waits for the dead.

Asked of Linux's /proc, and only of this user's processes in this container: others may be hidden, or have the number of
another one here. Of those, and on other systems, nothing is known.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re

DEAD, STOPPED, ALIVE, UNKNOWN = "dead", "stopped", "alive", "unknown"
ENDED = "ZXx"  # a process's state, as `ps` shows it
_MARK = re.compile(r"([0-9]{1,10})\.([0-9]{1,20})\.([0-9a-f]{16})")


def mark() -> str:
    """This process, in letters that mean something to `state_of` on this host; "" where it could tell nothing."""
    try:
        found, where = stat_of(os.getpid()), _where(os.geteuid())
    except OSError:
        return ""
    return f"{os.getpid()}.{found[1]}.{where}" if found and where else ""


def state_of(mark: str) -> str:
    """DEAD, STOPPED (by a signal or a debugger, perhaps for a moment), ALIVE or UNKNOWN. Any text is fine."""
    parts = _MARK.fullmatch(mark)
    if parts is None or parts[3] != _where(os.geteuid()):
        return UNKNOWN
    try:
        found = stat_of(int(parts[1]))
    except OSError:
        return UNKNOWN
    if found is None or found[0] in ENDED or found[1] != parts[2]:  # its number may be another one's by now
        return DEAD
    return STOPPED if found[0] in "Tt" else ALIVE


def stat_of(process: int) -> tuple[str, str] | None:
    """Its state as `ps` shows it, and when it was started; None: there is no such process. Raises OSError."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0].decode(), fields[19].decode()


@functools.lru_cache(8)
def _where(user: int) -> str:
    """Who can see whom: the machine since it was started, the container, the user. "" where that cannot be known."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts = [file.read().strip(), os.readlink("/proc/self/ns/pid"), str(user)]
    except OSError:
        return ""
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]
