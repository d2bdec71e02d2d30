"""The context: `with fused_eager():` opens the front door of a thread, and closes it with everything finished."""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Any, TypeVar

import torch

from ... import follower
from ...bounded import Bounded
from ...compiling import background
from ...compiling.caching import keeper
from ...config import Config, resolve
from ...devices.host.device import HOST
from ...errors import FusedEagerError
from ...executing import run
from ...executing.materialize import materialize_all
from ...log import site
from ...log.events import LOG
from ...log.reasons import Reason
from ...policy.allowance import ALLOWANCE, limits
from ...recording.native import nothing_is_pending
from . import bypass, connection, guards, moments, parking, refusals, shutdown, signals, threads
from .bypass import turned
from .intercept import FrontDoor, boundary
from .threads import THREAD, ThreadState

F = TypeVar("F", bound=Callable[..., Any])
_IN_PIECES = (
    (inspect.iscoroutinefunction, "a coroutine"),
    (inspect.isasyncgenfunction, "an asynchronous generator"),
    (inspect.isgeneratorfunction, "a generator"),
)


def _refuse_others(function: Callable[..., Any]) -> None:
    """Of what is wrapped only the call is left: whoever hands over a module or a class would lose the rest of it."""
    if isinstance(function, (type, torch.nn.Module)) or not callable(function):
        raise TypeError(
            f"fused_eager decorates functions and methods, and {function!r:.200} is none. Write `with fused_eager():` "
            "around the lines that use it"
        )
    for is_kind, kind in _IN_PIECES:
        if is_kind(function):
            name = getattr(function, "__qualname__", repr(function))
            raise TypeError(
                f"fused_eager cannot decorate {name}, which is {kind}: it runs in pieces, between those of others "
                "in its thread. Write `with fused_eager():` around what it calls, or around the loop that runs it"
            )


def current_mode() -> str:
    """The mode of the innermost open context of this thread: "debug", "strict", "fused" or "off"."""
    return THREAD.door.stream.config.mode if THREAD.door is not None else "off"


def sync(*, compiled: bool = False) -> None:
    """Finish all pending work of this thread: afterwards every tensor's memory holds its value.

    With `compiled`, wait as well until what is being compiled in the background is compiled.

    Raises:
        Exception: what a pending op would have raised in eager, with the op and its line in the message.
    """
    door = THREAD.door
    if door is not None:
        materialize_all(Reason("sync.call"), only=door.stream)
        if not door.bypassed:
            door.policy.pass_sync()
            boundary(door.stream, site.here(), True)
        turned(door, "sync")
    if compiled:
        background.wait()


_checked: Bounded[Hashable, bool] = Bounded(64)


def _check(options: dict[str, Any]) -> None:
    """Tell of a mistake where it is written, not where the context is entered. The same options are looked at once."""
    # `1` equals `True`, and is a mistake where that is none.
    told = tuple([(name, type(value), value) for name, value in options.items()])
    try:
        if told not in _checked:
            resolve(options)
            _checked[told] = True
    except TypeError:  # a value that has no hash
        resolve(options)


class fused_eager:
    """Run the PyTorch code in the body, or in the decorated function, traced and fused on the fly.

    >>> with fused_eager():
    ...     train()
    >>> @fused_eager(mode="strict")
    ... def step(batch): ...

    A context belongs to its thread: one in the body of a generator or a coroutine is open, too, for whatever runs
    between two pieces of that.

    Args:
        mode: "debug", "strict", "fused" or "off"; None takes FUSED_EAGER_MODE, else "fused". Inside another context,
            None keeps that one's mode.
        options: any option that `python -m fused_eager config` lists.

    Raises:
        OptionError: an unknown option or a value that is not allowed.
        TypeError: what is to be decorated is no function, or a generator or a coroutine.
    """

    def __init__(self, mode: str | None = None, **options: Any):
        self._entered: list[int] = []  # by which threads
        self.place: Any = None  # what tells its entry from others, if not the line
        self.options = {"mode": mode, **options}
        _check(self.options)

    def __new__(cls, mode: Any = None, **options: Any) -> Any:
        if mode is not None and inspect.isroutine(mode):
            return cls(**options)(mode)  # `@fused_eager` without parentheses
        return super().__new__(cls)

    def __call__(self, function: F) -> F:
        _refuse_others(function)

        code = getattr(function, "__code__", None)

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            context = object.__new__(fused_eager)  # not `__init__`: the options have been looked at
            context._entered, context.options, context.place = [], self.options, code
            with context:
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]

    def __enter__(self) -> fused_eager:
        thread = THREAD
        config = thread.configs[-1].replace(**self.options) if thread.configs else resolve(self.options)
        if config.deterministic is None and torch.are_deterministic_algorithms_enabled():
            config = config.replace(deterministic=True)
        if self.options.get("check_nan") or not thread.configs:
            config.refuse_unused()
        if LOG.budgets:
            config = config.replace(native="never")  # what torch runs alone nobody counts
        writer = self._writer(thread, config)
        try:
            self._enter(thread, config)
        except BaseException:
            self._no_longer(writer)
            raise
        thread.configs.append(config)
        thread.writers.append(writer)
        self._entered.append(threading.get_ident())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.get_ident() not in self._entered:
            raise FusedEagerError(
                "a context is to be left in the thread that has entered it: it stays open there (a generator with one "
                "in its body was closed, or ended, by another thread)"
            )
        self._entered.remove(threading.get_ident())
        refusals.explain(error)
        thread = THREAD
        thread.configs.pop()
        writer = thread.writers.pop()
        try:
            self._leave(thread, error)
        finally:
            self._no_longer(writer)

    def _enter(self, thread: ThreadState, config: Config) -> None:
        if thread.door is None:
            if config.mode != "off":
                self._opened = self.place or site.here()
                self._open(config, self._opened)
        else:
            if thread.door.lender is not None and len(thread.configs) == 1:
                guards.install()
                threads.keep(thread.door)
            self._switch(thread.door, config)

    def _leave(self, thread: ThreadState, error: BaseException | None) -> None:
        door = thread.door
        if door is None:
            return
        goes_on, again = any(c.mode != "off" for c in thread.configs), False
        if isinstance(error, (KeyboardInterrupt, SystemExit)) and door.stream.config.mode == "fused":
            # Who wants it to end does not want to wait for a compiler: ATen runs what is pending.
            door.stream.config = door.stream.config.replace(compile="auto", deterministic=False)
        try:
            if goes_on:
                try:
                    self._switch(door, thread.configs[-1])
                finally:
                    if door.lender is not None and len(thread.configs) == 1:
                        guards.uninstall()
                        threads.give_back(door)
            else:
                again = error is None and parking.comes_again(self._opened)
                self._end(door)
        except Exception as late:
            again = False
            if error is None:
                raise
            # The body's own exception wins; what the pending work raised is told with it.
            if hasattr(error, "add_note"):
                error.add_note(f"fused_eager: pending work failed as well: {type(late).__name__}: {late}")
        finally:
            if not goes_on:
                self._close(door, again)

    @staticmethod
    def _writer(thread: ThreadState, config: Config) -> Any:
        """Who writes this context's event log; None if nobody, or who writes that of the context around it."""
        if not config.report or config.mode == "off" or any(c.report == config.report for c in thread.configs):
            return None
        from ...reporting.writer import attach

        return attach(config)

    @staticmethod
    def _no_longer(writer: Any) -> None:
        if writer is not None:
            from ...reporting.writer import detach

            detach(writer)

    @staticmethod
    def _open(config: Config, place: Any) -> None:
        signals.hold()
        guarded = False
        try:
            door = parking.take(place, config)
            again = guarded = door is not None
            if door is None:
                shutdown.arrange()
                HOST.housekeeping.begin()
                keeper(config)
                _follow(config)
                door = FrontDoor(config)
                guards.install()
                guarded = True
            else:
                door.reopen(config)
            if limits(config):
                ALLOWANCE.enter(door.policy.backoff)
            bypass.enter(door, place, again)
        except BaseException:
            if guarded:
                guards.uninstall()
            signals.release()
            raise
        THREAD.door = door
        if not again:
            moments.watch(door)

    @staticmethod
    def _end(door: FrontDoor) -> None:
        stream, began = door.stream, time.perf_counter()
        try:
            if stream.config.measures:
                if not door.bypassed:
                    # What is done to leave belongs to the last segment, whether it has ended by now or not.
                    waiting = stream.policy.autotuner.waiting
                    materialize_all(Reason("cut.exit"), only=stream)
                    if waiting:
                        stream.policy.autotuner.amend(time.perf_counter() - began)
                    else:
                        boundary(stream, site.here(), True)
                    stream.policy.pass_sync()
                stream.policy.leave(door.bypassed)
                ALLOWANCE.look()
        finally:
            threads.close(door, idle=door.bypassed and nothing_is_pending())

    def _close(self, door: FrontDoor, again: bool) -> None:
        THREAD.door = None
        try:
            door.__exit__(None, None, None)
        finally:
            if again and door.lender is None and door.config.mode == "fused":
                parking.park(door, self._opened, door.config)
            else:
                guards.uninstall()
            signals.release()

    @staticmethod
    def _switch(door: FrontDoor, config: Config) -> None:
        config = door.allowed(config)
        if config == door.stream.config:
            return
        door.come_back()
        if config.mode == "off":
            materialize_all(Reason("cut.options"), only=door.stream)
        else:
            keeper(config)
            _follow(config)
            run.flush(door.stream, Reason("cut.options"))
        door.take(config)


def _follow(config: Config) -> None:
    """Have the ops of a context be followed in C++, if its mode has any that come again."""
    if config.mode == "fused":
        follower.enter(config, connection.load, guards.renew)

