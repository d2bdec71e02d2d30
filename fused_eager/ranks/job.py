"""This process's part in a job: when its heartbeat begins and ends, and what becomes of errors of the groups."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from torch import distributed

from fused_eager.cache.exits import call_at_exit, error_at_exit, fail_at_exit, note_codes

from .. import progress
from ..config import Config
from ..errors import FusedEagerError
from . import order, status
from .channel import base
from .heartbeat import Heartbeat

_lock = threading.Lock()
_current: list[Heartbeat] = []
_failed: list[Heartbeat] = []  # of jobs before, of whose fault the program has not been told
_watched: list[object] = []
ENDING: list[Callable[[], None]] = []  # called while the ranks can still be reached, as the default group is destroyed


def current() -> Heartbeat | None:
    """The heartbeat of the job that this process is a rank of, if it has one."""
    return _current[0] if _current and _current[0].pid == os.getpid() else None


def join(store: Any, rank: int, size: int, options: Config) -> None:
    """Begin to beat, as a rank of the job whose default group has this store. Does nothing where that is so already."""
    with _lock:
        known = current()
        if known is not None:
            if not known.has_stopped and known.is_of(distributed.group.WORLD):
                return
            _end(known)
        if size < 2 or not (options.heartbeat or options.checks_collectives) or not is_shared(store):
            return
        began = Heartbeat(store, rank, size, options)
        if distributed.group.WORLD is not None:
            began.is_of(distributed.group.WORLD)  # from now on, and of no other
        _current[:] = [began]
        began.start()
        if not _watched:
            call_at_exit(_ends)
            progress.IN_VAIN.append(_has_failed)
            _watched.append(_chain_excepthook())
            _follow_default_group()
            note_codes()


def begin_anew() -> None:
    """A default group is about to be made: a job that there was is over, also if its heartbeat has not seen that yet,
    which would take the new group for its own, and beat for ranks that listen elsewhere."""
    with _lock:
        known = current()
        if known is not None:
            _end(known)


def _follow_default_group() -> None:
    """Know at once where a default group begins and ends: a process that has left it may be gone in the next moment,
    and is not to be taken for one that was killed."""
    module: Any = distributed.distributed_c10d
    original = module._update_default_pg

    @functools.wraps(original)
    def _update_default_pg(pg: Any) -> None:
        if pg is None and current() is not None:
            for told in ENDING:
                told()
        original(pg)
        known = current()
        if known is not None and pg is None:
            known.stop()
        elif known is not None:
            known.is_of(pg)

    module._update_default_pg = _update_default_pg


def _end(known: Heartbeat) -> None:
    known.stop()
    if known.is_untold:
        _failed.append(known)
    order.forget(known)
    _current.clear()


def join_default(options: Config) -> None:
    """The same, of the default group that there is: called for each collective."""
    world: Any = distributed.group.WORLD
    if world is None or (_current and not _current[0].has_stopped and _current[0].is_of(world)):
        return
    store = distributed.distributed_c10d._get_default_store()
    join(distributed.PrefixStore(_attempt(store), store), world.rank(), world.size(), options)


def _attempt(store: Any) -> str:
    """What tells the ranks that have met from those of an attempt before, whose texts torchrun leaves in the store:
    where gloo is to be found on the first of them."""
    of_gloo = distributed.PrefixStore("cpu/", store)
    address = of_gloo.get("0/0") if is_shared(store) and of_gloo.check(["0/0"]) else b""
    return f"{hashlib.sha256(address).hexdigest()[:16]}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _has_failed() -> bool:
    """Whether a rank of the job is lost."""
    found = current()
    return found is not None and found.fault is not None and found.is_of(distributed.group.WORLD)


def is_lost() -> bool:
    """Whether a fault has ended the job of this process, or the last one that it had."""
    return any(beat.fault is not None for beat in (*_failed, *_current) if beat.pid == os.getpid())


def _ends() -> None:
    found = current()
    if found is not None:
        error = error_at_exit()
        if error is not None:
            found.raised(error, _line_of(error.__traceback__))
        found.stop()
    for beat in (*_failed, *_current):
        if beat.pid == os.getpid() and beat.is_untold:
            fail_at_exit(beat.error("has come to its end"))


def _line_of(trace: TracebackType | None) -> str:
    """The program's own line where an error was raised."""
    lines = [f for f in traceback.extract_tb(trace) if status.is_programs(f.filename)]
    return f"{lines[-1].filename}:{lines[-1].lineno}" if lines else ""


def _chain_excepthook() -> Any:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        found = current()
        if found is not None:
            found.raised(error, _line_of(trace))
        before(kind, error, trace)

    sys.excepthook = hook
    return hook


# What gloo says where a connection is gone, or nobody has come.
_OF_CONNECTIONS = ("gloo/transport", "gloo/rendezvous", "timed out", "timeout", "Connection", "connect", "Broken pipe")


def explain(error: BaseException, where: str, is_raised: bool = True) -> BaseException:
    """What a rank raises in the place of an error of a group's: why it has come, if another rank is lost. It may wait
    for the heartbeat's time until that is known.

    Arguments:
        where: what this rank was at, after its number: "waits in all_reduce at train.py:12".
        is_raised: whether the program is told by it; else it may never look.
    """
    found = current()
    if found is None or isinstance(error, FusedEagerError) or not isinstance(error, RuntimeError):
        return error
    of_connections = any(word in str(error) for word in _OF_CONNECTIONS)
    if not of_connections and found.fault is None:
        return error
    return found.error_of(where, is_raised) or error


@contextlib.contextmanager
def explained(where: Callable[[], str]) -> Iterator[None]:
    """In the body ranks are waited for, perhaps in C++: where that fails because one is lost, say which."""
    try:
        yield
    except RuntimeError as error:
        why = explain(error, where())
        if why is error:
            raise
        raise why from error


def waits(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Work.wait`, whose errors say which rank is lost."""

    @functools.wraps(original)
    def wait(*args: Any, **kwargs: Any) -> Any:
        with explained(here):
            return original(*args, **kwargs)

    return wait


def here(name: str = "a collective") -> str:
    """What this rank is at, for an error: "waits in all_reduce at train.py:12"; `name` where the stack does not say."""
    at = status.place()
    return f"waits in {at.collective or name} at {at.line}"


def refuse_if_failed(where: str) -> None:
    """Raise, before a collective is called, if a rank is lost: there is nobody to call it with.

    Raises:
        RankLost: it is.
        CollectivesDiffer: the ranks have called different ones.
    """
    found = current()
    if found is not None and _has_failed():
        raise found.error(where)


def is_shared(store: Any) -> bool:
    """Whether a store is one for processes: in others the ranks are threads of one."""
    return isinstance(base(store), (distributed.TCPStore, distributed.FileStore))
