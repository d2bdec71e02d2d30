"""The connections between ranks, and cutting them.

Gloo has no way to give up a collective that waits: its threads sit in it until the group's timeout, half an hour, and
a process that ends waits for them. A connection that is closed is what gloo understands at once, in whatever it waits.
Nothing tells which sockets are gloo's. But each rank can tell the others the ends of its own connections, and the
sockets that lead to one of those ends are the ones between ranks, whoever has made them and when.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Collection, Iterator

_FOLDER = next((folder for folder in ("/proc/self/fd", "/dev/fd") if os.path.isdir(folder)), "")
Sockets = dict[int, int]  # from a file descriptor to its inode: another one may have the number later


def open_now() -> Sockets:
    """The sockets of this process; none where the system does not tell."""
    found: Sockets = {}
    for name in os.listdir(_FOLDER) if _FOLDER else ():
        with contextlib.suppress(OSError, ValueError):
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def since(before: Sockets) -> Sockets:
    """Those that have been opened since `before`."""
    return {number: inode for number, inode in open_now().items() if before.get(number) != inode}


def leading_to(port: int, among: Sockets) -> Sockets:
    """Those of some sockets that are connected to a port."""
    found: Sockets = {}
    for number, inode in among.items():
        with _borrowed(number, inode) as own:
            if own is not None and own.family in (socket.AF_INET, socket.AF_INET6) and own.getpeername()[1] == port:
                found[number] = inode
    return found


@contextlib.contextmanager
def _borrowed(number: int, inode: int) -> Iterator[socket.socket | None]:
    """A socket by its number, if it is the same still and connected."""
    try:
        if os.stat(number).st_ino != inode:
            yield None
            return
        own = socket.socket(fileno=os.dup(number))
    except OSError:
        yield None
        return
    with own:
        try:
            own.getpeername()
        except OSError:  # one that listens: gloo ends the process if that fails
            yield None
            return
        yield own


def any_closed(found: Sockets) -> bool:
    """Whether the other end of one of them has closed it."""
    for number, inode in found.items():
        with _borrowed(number, inode) as own:
            try:
                if own is None or own.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":
                    return True
            except BlockingIOError:
                continue
            except OSError:
                return True
    return False


def _end(address: tuple[str, int]) -> str:
    return f"{address[0].removeprefix('::ffff:')} {address[1]}"


def ends(found: Sockets, but: int) -> list[str]:
    """This process's ends of its connections, as text; without those from or to the port `but`, the store's."""
    out = []
    for number, inode in found.items():
        with _borrowed(number, inode) as own:
            if own is not None and own.family in (socket.AF_INET, socket.AF_INET6):
                here, there = own.getsockname(), own.getpeername()
                if but not in (here[1], there[1]):
                    out.append(_end(here))
    return out


def cut(others: Collection[str]) -> int:
    """Shut down the connections to these ends, which other processes have told of: what waits in them fails at once,
    and so does what comes later. Returns how many there were."""
    count = 0
    for number, inode in open_now().items() if others else ():
        with _borrowed(number, inode) as own:
            if own is not None and own.family in (socket.AF_INET, socket.AF_INET6):
                count += _end(own.getpeername()) in others and _shut(own)
    return count


def cut_to(port: int) -> int:
    """The same for the connections that this process has opened to a port: to a store that does not answer."""
    count = 0
    for number, inode in leading_to(port, open_now()).items():
        with _borrowed(number, inode) as own:
            count += own is not None and _shut(own)
    return count


def _shut(own: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        own.shutdown(socket.SHUT_RDWR)
        return True
    return False
