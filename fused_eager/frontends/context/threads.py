"""Which context a thread is in: the ones it opened itself, or the one that is open in the thread that started it.

A mode belongs to one thread. A program that starts a thread inside a context expects it to see the same tensors, and
most of them are pending; so such a thread, and a job given to a pool, runs in a context of its own with the starter's
options, for as long as the starter's is open.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any

from ... import follower
from ...compiling import measuring
from ...config import Config
from ...devices.buffer import LOCK
from ...devices.host.scratch import SCRATCH
from ...executing.materialize import materialize_all
from ...log.reasons import Reason
from ...quiet import without
from . import refusals
from .intercept import FrontDoor


class ThreadState(threading.local):
    door: FrontDoor | None = None
    configs: list[Config]
    writers: list[Any]  # of the event log, one for each of `configs`; None where the one outside writes already

    def __init__(self) -> None:
        self.configs = []
        self.writers = []


THREAD = ThreadState()


def current_door() -> FrontDoor | None:
    """The calling thread's open front door."""
    return THREAD.door


measuring.time_ops_of(current_door)


def in_context_of(door: FrontDoor, body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `body` in a context like that of `door`, unless this thread is in one or `door` is closed by now."""
    with _lent(door):
        try:
            return body(*args, **kwargs)
        except RuntimeError as error:
            refusals.explain(error)
            raise


@contextmanager
def _lent(lender: FrontDoor) -> Iterator[None]:
    ended = THREAD.door  # of a pool's thread that was started in a context that is closed by now
    with LOCK:
        config = lender.stream.config
        if (ended is not None and ended.open) or not lender.open or config.mode == "off":
            door = None
        else:
            door = FrontDoor(config, lender)
            lender.lent.add(door)
    if door is None:
        yield
        return
    before = ended, THREAD.configs, THREAD.writers
    with nullcontext() if ended is None else without(ended):
        door.__enter__()
        THREAD.door, THREAD.configs, THREAD.writers = door, [config], [None]
        until = follower.overlook(0.0)
        try:
            yield
        finally:
            follower.overlook(until)
            THREAD.door, THREAD.configs, THREAD.writers = before
            with LOCK:
                lender.lent.discard(door)
            try:
                close(door)
            finally:
                door.__exit__(None, None, None)


def keep(door: FrontDoor) -> None:
    """The thread opens a context of its own inside the one it was lent: that one stays open when the lender closes."""
    assert door.lender is not None
    with LOCK:
        door.lender.lent.discard(door)
        door.open = True


def give_back(door: FrontDoor) -> None:
    """The thread's own context closes: what is left is the one that was lent, if its lender is still there."""
    assert door.lender is not None
    with LOCK:
        if door.lender.open:
            door.lender.lent.add(door)
        else:
            close(door)


@lru_cache(maxsize=64)  # a pool closes a context with each job, and all options are checked in making a new set
def _switched_off(config: Config) -> Config:
    return config.replace(mode="off")


def close(door: FrontDoor, idle: bool = False) -> None:
    """Nothing is recorded any more behind `door` or behind those that were lent in its name; all they hold is finished,
    unless all is `idle`.

    Raises:
        Exception: what the pending work of one of them raises, after all are closed.
    """
    failed: list[Exception] = []
    with LOCK:
        door.open = False
        if idle and not door.lent:
            door.stream.config = _switched_off(door.stream.config)
            return
        # A job of a pool ends, and the loop that gave it goes on: what the loop has made stays on the device.
        lender = door.lender
        goes_on = lender is not None and lender.open and not lender.someone_is_bypassed()
        steps: list[Callable[[], None]] = [partial(close, each) for each in door.lent]
        if door.stream.config.mode != "off":
            steps.append(partial(materialize_all, Reason("cut.exit"), only=door.stream, made=goes_on))
        for step in steps:
            try:
                step()
            except Exception as error:
                failed.append(error)
        door.stream.config = _switched_off(door.stream.config)
        door.lent.clear()
        if not goes_on:
            SCRATCH.forget()
    if failed:
        raise failed[0]
