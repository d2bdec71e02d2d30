"""Ranks of one process: threads, of which one at a time runs, until it waits for another rank.

So what a process has once (the default process group, the random state of the CPU, the environment) can be each rank's
own: it is put away with the rank that stops, and comes back with it. And whether anybody can go on is known at any
moment: where nobody can, all of them are told, and none hangs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .faults import Fault

LOOK = 0.5  # seconds that a rank waits at a time
END = "The ranks of this process share what has happened: it ends, with an exit code other than 0"
Ready = Callable[[], bool]


class Own(Protocol):
    """Something that a process has once, and each of its ranks is to have for itself."""

    def begin(self, rank: int, size: int) -> None:
        """Have what a rank begins with."""

    def put_away(self) -> Any:
        """What the rank that stops has."""

    def bring_back(self, kept: Any) -> None:
        """Have it again."""


@dataclass(eq=False, slots=True)
class Rank:
    """One rank. `ready`: whether what it waits for is there; None: it waits for its turn alone. `whom`: the ranks whose
    part is missing. `is_blocked`: it waits for something that is not a rank, and lets the others run meanwhile.
    `times`: how many default groups it has had; with a new one it has dealt with what has happened to those before."""

    number: int
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ready: Ready | None = None
    whom: Callable[[], Sequence[int]] = tuple
    where: str = ""
    kept: list[Any] | None = None
    has_begun: bool = False
    has_ended: bool = False
    is_blocked: bool = False
    times: int = 0
    error: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        """Whether it has come to its end by an error, or with a code that is not 0."""
        return self.error is not None and not (isinstance(self.error, SystemExit) and self.error.code in (None, 0))

    def await_turn(self) -> None:
        """Return when it is this rank's turn. A signal that comes just before the main thread begins to wait does not
        end the wait, and Python's handler runs after it: so no wait is long."""
        while not self.go.acquire(timeout=LOOK):
            pass


class Turns:
    """The ranks of this process, and whose turn it is.

    Arguments:
        owns: what each rank is to have for itself.
    """

    def __init__(self, size: int, owns: Sequence[Own] = ()):
        self.ranks = [Rank(number) for number in range(size)]
        self.fault: Fault | None = None
        self._of_times = 0  # the default group that the fault has happened to
        self._owns = owns
        self._lock = threading.Lock()
        self._holder: Rank | None = None
        self._over = threading.Event()

    # ---- the threads ---------------------------------------------------------------------------------------------

    def run(self, program: Callable[[int], object], line_of: Callable[[BaseException], str]) -> list[Rank]:
        """Call `program` with the number of each rank; this thread is rank 0, as signals come to it. Returns the ranks.

        Arguments:
            line_of: the program's line where an error was raised.
        """
        before = [own.put_away() for own in self._owns]
        threads = [
            threading.Thread(target=self._thread, args=(r, program, line_of), name=f"rank {r.number}", daemon=True)
            for r in self.ranks[1:]
        ]
        try:
            for thread in threads:
                thread.start()
            with self._lock:
                self._give(self.ranks[0])
            self._thread(self.ranks[0], program, line_of)
            # Who has interrupted it does not wait for a rank that never waits itself.
            self._over.wait(1.0 if isinstance(self.ranks[0].error, KeyboardInterrupt) else None)
        finally:
            for own, kept in zip(self._owns, before, strict=True):
                own.bring_back(kept)
        return self.ranks

    def _thread(self, me: Rank, program: Callable[[int], object], line_of: Callable[[BaseException], str]) -> None:
        _mine.at = self, me
        error: BaseException | None = None
        try:
            me.await_turn()
            program(me.number)
        except BaseException as raised:
            error = raised
        finally:
            _mine.at = None
            self._end(me, error, "" if error is None else line_of(error))

    def _end(self, me: Rank, error: BaseException | None, line: str) -> None:
        with self._lock:
            me.has_ended, me.error = True, error
            if me.has_failed:
                self.fail(me, Fault("raised", me.number, f"has raised {_short(error)}", line))
            if all(r.has_ended for r in self.ranks):
                self._over.set()
                return
            if self._holder is not me:  # interrupted while another rank runs
                return
            following = self._next(me)
            if following is None and not self._is_anybody_blocked():
                self._stuck()
                following = self._next(me)
            self._give(following)

    def cause(self) -> tuple[Rank, BaseException] | None:
        """The rank whose error is the reason of the others', with it; None where none has raised."""
        raised = [(r, r.error) for r in self.ranks if r.error is not None and r.has_failed]
        of = self.fault.rank if self.fault is not None and self.fault.kind == "raised" else None
        return next((pair for pair in raised if pair[0].number == of), raised[0] if raised else None)

    # ---- whose turn it is; the lock is held ----------------------------------------------------------------------

    def _give(self, to: Rank | None) -> None:
        self._holder = to
        if to is None:
            return
        if to.has_begun:
            for own, kept in zip(self._owns, to.kept or (), strict=True):
                own.bring_back(kept)
        else:
            to.has_begun = True
            for own in self._owns:
                own.begin(to.number, len(self.ranks))
        to.go.release()

    def _next(self, me: Rank) -> Rank | None:
        """Who can go on, after this rank."""
        at = me.number + 1
        for r in (*self.ranks[at:], *self.ranks[: me.number]):
            if not (r.has_ended or r.is_blocked) and (r.ready is None or self._fault_of(r) is not None or r.ready()):
                return r
        return None

    def _is_anybody_blocked(self) -> bool:
        return any(r.is_blocked and not r.has_ended for r in self.ranks)

    def _fault_of(self, r: Rank) -> Fault | None:
        """What has happened that a rank is to be told."""
        return self.fault if r.times <= self._of_times else None

    def _stuck(self) -> None:
        """Nobody can go on: have all be told why."""
        waiting = [r for r in self.ranks if not r.has_ended]
        for r in waiting:
            if self._ended_of(r) is not None:
                return
        said = ", ".join(f"rank {r.number} {r.where}" for r in waiting)
        for r in waiting:
            self.fail(r, Fault("differ", None, f"the ranks wait for one another: {said}"))

    def _ended_of(self, r: Rank) -> Fault | None:
        """What has become of a rank that this one waits for, if it has come to its end."""
        gone = next((self.ranks[number] for number in r.whom() if self.ranks[number].has_ended), None)
        if gone is None:
            return None
        if gone.has_failed:
            text = f"has raised {_short(gone.error)}"
            self.fail(r, Fault("raised", gone.number, text))
        else:
            self.fail(r, Fault("ended", gone.number, "has come to the end of its program, and others wait for it"))
        return self.fault

    # ---- what a rank does ----------------------------------------------------------------------------------------

    def fail(self, me: Rank, fault: Fault) -> None:
        """Have all ranks be told of what has happened to the groups that this one has, where they wait or next time
        that they do."""
        if self.fault is None or self._of_times < me.times:
            self.fault, self._of_times = fault, me.times

    def refuse(self, me: Rank, where: str) -> None:
        """Raise if a rank is lost.

        Raises:
            RankLost, CollectivesDiffer: one is.
        """
        fault = self._fault_of(me)
        if fault is not None:
            raise fault.error(me.number, where, END)

    def begin_anew(self, me: Rank) -> None:
        """This rank makes a default group."""
        me.times += 1

    def wait_until(self, me: Rank, ready: Ready, where: str, whom: Callable[[], Sequence[int]] = tuple) -> None:
        """Let the others run until something is there.

        Arguments:
            ready: whether it is; asked by other threads.
            where: what this rank is at, for errors: "waits in all_reduce at train.py:12".
            whom: the ranks whose part is missing.

        Raises:
            RankLost, CollectivesDiffer: it will never be.
        """
        while not ready():
            self.refuse(me, where)
            with self._lock:
                me.ready, me.where, me.whom = ready, where, whom
                following = None if self._ended_of(me) is not None else self._next(me)
                if following is None and self._fault_of(me) is None and not self._is_anybody_blocked():
                    self._stuck()
                if self._fault_of(me) is not None:
                    me.ready = None
                    continue
                me.kept = [own.put_away() for own in self._owns]
                self._give(following)
            me.await_turn()
            me.ready = None

    def pass_on(self, me: Rank) -> None:
        """Let each other rank run that can."""
        with self._lock:
            following = self._next(me)
            if following is None:
                return
            me.kept = [own.put_away() for own in self._owns]
            self._give(following)
        me.await_turn()

    @contextlib.contextmanager
    def blocking(self, me: Rank) -> Iterator[None]:
        """The body waits for something that is not a rank of this process, or for one by a way that is not seen here:
        the others run meanwhile. What each rank has for itself is not this one's there."""
        with self._lock:
            me.is_blocked = True
            me.kept = [own.put_away() for own in self._owns]
            self._give(self._next(me))
        try:
            yield
        finally:
            with self._lock:
                me.is_blocked = False
                if self._holder is None:
                    self._give(me)
            me.await_turn()


class _Mine(threading.local):
    at: tuple[Turns, Rank] | None = None


_mine = _Mine()


def mine() -> tuple[Turns, Rank] | None:
    """The rank that this thread is, and the turns that it takes; None: it is no rank of several in a process."""
    return _mine.at


def _short(error: BaseException | None) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
