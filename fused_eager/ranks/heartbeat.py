"""The heartbeat: each rank says that it lives, watches one other, and learns which one is lost.

Two threads do it. The *messenger* talks to the store: it publishes this rank's status, reads that of the next rank
that has not ended, and the job's fault, if there is one. The *watcher* never touches the store, so that it notices
where that does not answer. A rank that finds a fault publishes it, the first one counts; every rank that learns of it
cuts its connections to other ranks, so that whatever waits in a collective fails at once, in Python or in C++; and
`error_of` says why it has failed.

Each rank asks for a few texts a beat: the store's work grows with the ranks, not with their square. Only where there
are few do they look at all others: for whom they wait, and which connections are theirs.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
from typing import Any

from torch import distributed

from ..config import Config
from ..errors import FusedEagerError
from ..log.events import LOG
from ..progress import EVERY, doing
from . import sockets
from .channel import Channel, StoreGone
from .faults import CollectivesDiffer, Fault, RankLost
from .status import IDLE, Observer, Place, Status, place

BEATS = 8  # in the time after which a rank is lost
MANY = 64  # ranks: where there are more, only the first of a group says for whom it waits
WORKS = 0.2  # of a core: who takes more, or would if it were given it, is not silent for having stopped
STUCK = 3.0  # seconds after which a wait that nothing has interrupted ends the process
EXIT_CODE = 13
GONE = "has ended, and with it the store by which ranks find each other"


def _some(late: list[str]) -> str:
    shown = late[:4] + ([f"{len(late) - 4} more"] if len(late) > 4 else [])
    return "; ".join(shown) or "ranks that say they are here, too"


class Seen:
    """The last status of another rank, and when it was another one: by this process's clock, and in how many looks."""

    def __init__(self) -> None:
        self.status: Status | None = None
        self.at = time.monotonic()
        self.looks = 0
        self.worked, self._worked_at = 0.0, 0.0

    def take(self, status: Status | None) -> None:
        """It has been read again."""
        self.looks += 1
        if status is not None and (self.status is None or status.beat != self.status.beat):
            self.status, self.at, self.looks = status, time.monotonic(), 0
        elif self.looks == 1 and self.status is not None:  # not before: most looks find something new
            self.worked, self._worked_at = self.status.processor_time(), time.monotonic()

    def works(self) -> bool:
        """Whether it is as silent as it is because C code keeps the interpreter from its other threads, or because
        the machine has too much else to do."""
        if self.status is None or self.looks < 2 or self.status.process() not in ("R", "S", "D"):
            return False
        return self.status.processor_time() - self.worked > WORKS * (time.monotonic() - self._worked_at)


class Heartbeat:
    """The heartbeat of one job in this process, which is rank `rank` of `size`."""

    def __init__(self, store: Any, rank: int, size: int, options: Config, generation: str = ""):
        self.rank, self.size = rank, size
        self.seconds, self.progress = options.heartbeat, options.progress
        self.checks = options.checks_collectives
        self.period = min(1.0, self.seconds / BEATS, 0.25 if self.checks else 1.0) if self.seconds else 0.25
        self.channel = Channel(store, self.seconds or 10.0)
        self.fault: Fault | None = None
        self._was_raised = False  # in the program, which may know what to do
        self._had_group = False  # when the fault was found
        self._failed = threading.Event()
        self._store_gone_at = 0.0
        self._observer = Observer(rank)
        self._own: Status | None = None
        self._seen: dict[int, Seen] = {}
        self._stopped = threading.Event()
        self._looks_at = 0.0
        self._world: weakref.ref[Any] | None = None
        self._beats = 0
        self._sockets: sockets.Sockets = {}
        self._ends: dict[int, list[str]] = {}  # of the other ranks' connections
        self.pid = os.getpid()

    @property
    def has_stopped(self) -> bool:
        """Whether it beats no more."""
        return self._stopped.is_set()

    def is_of(self, world: Any) -> bool:
        """Whether it is the heartbeat of the job with this default group, as long as that is the one there is."""
        if world is None:
            return self._world is None
        if self._world is None:  # it has begun while the group was made
            self._world = weakref.ref(world)
        return self._world() is world

    def start(self) -> None:
        """Begin to beat, and to watch."""
        for body in (self._carry, self._watch):
            threading.Thread(target=body, daemon=True, name=f"fused-eager {body.__name__.strip('_')}").start()

    # ---- the messenger ------------------------------------------------------------------------------------------

    def _carry(self) -> None:
        while not self._stopped.is_set():
            try:
                self._beat()
            except StoreGone:
                self._store_gone_at = time.monotonic()
                return
            self._stopped.wait(self.period)

    def _beat(self) -> None:
        self._own = own = self._observer.look()
        self.channel.put(f"rank/{self.rank}", own.text())
        self._beats += 1
        self._tell_ends()
        is_unknown = len(self._ends) < self.size - 1 and self._beats < 64
        if self.fault is not None or (self.size <= MANY and (is_unknown or self._beats & (self._beats - 1) == 0)):
            self._learn_ends()  # until all are known, and in the 2nd, 4th, 8th ... beat
        if self.fault is not None:
            sockets.cut(self._others())
            return
        found = self.channel.get("fault")
        if found:
            self.fail(Fault.parse(found))
        if self.fault is not None or not self.seconds:
            return
        self._look_at_next()
        if self.channel.is_held_by_first and self.rank:
            self.read(0)  # when it is lost, nobody can be asked where it was
        if own.collective and own.seconds >= 1.0 and not own.doing:
            self._look_at_all(own)

    def _tell_ends(self) -> None:
        """Publish the ends of this rank's connections, where there are others than before."""
        now = sockets.open_now()
        if now != self._sockets:
            self._sockets = now
            self.channel.put(f"ends/{self.rank}", json.dumps(sockets.ends(now, self.channel.port)))

    def _learn_ends(self) -> None:
        for rank in range(self.size):
            if rank != self.rank:
                text = self.channel.get(f"ends/{rank}")
                if text:
                    self._ends[rank] = json.loads(text)

    def _others(self) -> set[str]:
        return {end for ends in list(self._ends.values()) for end in ends}

    def read(self, rank: int) -> Seen:
        """Look at a rank again."""
        seen = self._seen.setdefault(rank, Seen())
        text = self.channel.get(f"rank/{rank}")
        seen.take(Status.parse(text) if text else None)
        return seen

    def _look_at_next(self) -> None:
        for step in range(1, self.size):
            rank = (self.rank + step) % self.size
            seen = self.read(rank)
            if seen.status is None or not seen.status.has_ended:
                self._judge(rank, seen)
                return

    def _judge(self, rank: int, seen: Seen) -> None:
        """Whether a rank that has not ended is lost."""
        status = seen.status
        if status is None:
            return  # it does not use this library, and says nothing
        process = status.process()
        if process == "gone":
            text = f"is lost: its process {status.pid} has ended without a word"
            self.publish(Fault("gone", rank, text, status.line))
            return
        late = time.monotonic() - seen.at
        # The looks are counted, too: this process may have been stopped itself.
        if late < self.seconds or seen.looks < BEATS // 2:
            return
        if seen.works():
            return
        text = f"is lost: it has said nothing for {late:.0f} s"
        if process in ("T", "t"):
            text += f", and its process {status.pid} is stopped"
        self.publish(Fault("silent", rank, text, status.line))

    def _look_at_all(self, own: Status) -> None:
        """While this rank waits: for whom, and whether one that has ended will never come."""
        now = time.monotonic()
        ranks = self._ranks_of(place(detailed=True))
        if now < self._looks_at or (len(ranks) > MANY and ranks[0] != self.rank):
            return
        self._looks_at = now + min(EVERY, self.seconds)
        late: list[str] = []
        for rank in ranks:
            if rank == self.rank:
                continue
            seen = self.read(rank)
            status = seen.status
            silent = time.monotonic() - seen.at
            if status is None:
                late.append(f"rank {rank}, which says nothing of itself")
            elif status.has_ended:
                late.append(f"rank {rank}, whose program has ended")
                if own.seconds > self.seconds and silent >= 0.9 * self.seconds:
                    self._blame_ended(status)
                    return
            elif silent > 3 * self.period:
                late.append(f"rank {rank}, silent for {silent:.0f} s, last {status.words()}")
            elif status.doing or (status.collective, status.line) != (own.collective, own.line):
                late.append(f"rank {rank}, {status.words()}")
        if self.progress:
            where = f"in {own.collective} at {own.line}, {own.seconds:.0f} s"
            self._say(f"rank {self.rank}: waiting for {_some(late)} ({where})")

    def _blame_ended(self, status: Status) -> None:
        self.publish(Fault("ended", status.rank, "has ended its program, and others wait for it", status.line))

    def _ranks_of(self, at: Place) -> list[int]:
        try:
            group = at.group if at.group is not None else distributed.group.WORLD
            return list(distributed.get_process_group_ranks(group))
        except (KeyError, RuntimeError, ValueError, TypeError):  # it has just been destroyed
            return list(range(self.size))

    # ---- faults -------------------------------------------------------------------------------------------------

    def publish(self, fault: Fault) -> None:
        """Tell all ranks of a fault, unless there has been one already, and fail for the first one."""
        try:
            fault = Fault.parse(self.channel.first("fault", fault.dump()))
        except StoreGone:  # the others will find out by themselves
            pass
        self.fail(fault)

    def fail(self, fault: Fault) -> None:
        """From now on every collective fails, for this reason."""
        if self.fault is not None:
            return
        self.fault, self._had_group = fault, self.is_of(distributed.group.WORLD)
        if fault.rank != self.rank:
            self._say(f"rank {self.rank} aborts its process groups: {fault.short()}")
        LOG.emit("rank-lost", rank=fault.rank, what=fault.kind, detail=fault.text, site=fault.line)
        self._failed.set()
        sockets.cut(self._others())  # and again by the messenger, who asks for those that are new

    def error_of(self, where: str, is_raised: bool = True) -> FusedEagerError | None:
        """Why a collective has failed that this rank was at; None if no rank is lost. Gloo notices at once that a
        connection is closed; who has closed it is known within the heartbeat's time at the latest. `is_raised`: as of
        `error`."""
        if self.seconds and self.fault is None:
            self._find_out()
        return None if self.fault is None else self.error(where, is_raised)

    def error(self, where: str, is_raised: bool = True) -> FusedEagerError:
        """The error to raise, in a program that is at `where`, once there is a fault. `is_raised`: whether it will be;
        else it goes where the program need not look."""
        assert self.fault is not None
        self._was_raised |= is_raised
        return self.fault.error(self.rank, where)

    @property
    def is_untold(self) -> bool:
        """Whether there is a fault of which the program has not been told: no error of it was raised. A fault that is
        found after the program has destroyed its process group is none of its."""
        return self.fault is not None and self._had_group and not self._was_raised

    def _find_out(self) -> None:
        """A connection is gone. Ask who has gone, until that is known or nobody can be meant."""
        until = time.monotonic() + self.seconds + 2 * self.period
        while self.fault is None and time.monotonic() < until:
            if self._store_gone_at:
                self._blame_holder(GONE)
            elif not self.channel.busy_since:  # else the watcher looks after it
                try:
                    self._ask()
                except StoreGone:
                    self._store_gone_at = time.monotonic()
            if self._failed.wait(min(self.period, 0.2)):
                return

    def _ask(self) -> None:
        found = self.channel.get("fault")
        if found:
            self.fail(Fault.parse(found))
        ended = []
        for rank in range(self.size) if self.size <= MANY else list(self._seen):
            seen = self.read(rank) if rank != self.rank and self.fault is None else None
            if seen is None or seen.status is None:
                continue
            if seen.status.has_ended:
                ended.append(seen.status)
            else:
                self._judge(rank, seen)
        if ended and self.fault is None:
            self._blame_ended(ended[0])

    def _blame_holder(self, text: str) -> None:
        first = self.channel.is_held_by_first and self.rank != 0
        known = self._seen.get(0)
        line = known.status.line if first and known is not None and known.status is not None else ""
        self.fail(Fault("store", 0 if first else None, text if first else f"{self.channel.holder} {text}", line))

    # ---- the watcher --------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        busy, looks = 0.0, 0  # as of `Seen`: this process may have been stopped while it asked
        while not self._stopped.wait(self.period):
            if not self.is_of(distributed.group.WORLD):
                self.stop()
                return
            if self.fault is not None:
                self._end_if_stuck()
                return
            if not self.seconds:
                continue
            now, own = time.monotonic(), self._own
            busy, looks = self.channel.busy_since, looks + 1 if self.channel.busy_since == busy else 0
            if busy and now - busy > self.seconds and looks >= BEATS // 2:
                self._blame_holder(f"is lost: the store that it holds has not answered for {now - busy:.0f} s")
            elif self._store_gone_at and now - self._store_gone_at > self.seconds and own is not None:
                own = self._observer.look()  # the messenger has ended
                if own.collective and own.seconds > self.seconds:
                    self._blame_holder(GONE)

    def _end_if_stuck(self) -> None:
        """The connections have been cut. Whatever waits on in a collective waits for something else: for a store, whose
        connection is cut next; or for what nobody can interrupt, and then the process ends. What the library itself
        lets it wait for, as a compilation, ends without the others, and then the collective fails."""
        began, worked, line, cut = 0.0, 0.0, "", False
        while not self._stopped.wait(0.2):
            at, waited = place(), time.monotonic() - began
            is_idle = time.process_time() - worked < IDLE * waited
            is_ours = bool(doing(threading.main_thread().ident or 0))
            if is_ours or not (at.is_sure and at.line == line and is_idle):
                began, worked, line, cut = time.monotonic(), time.process_time(), at.line, False
                continue
            if waited > STUCK / 2 and not cut and self.channel.port:
                cut = True
                sockets.cut_to(self.channel.port)
            if waited > STUCK and self.fault is not None:
                where = f"cannot be interrupted in {at.collective} at {at.line}, and ends here"
                self._say(str(self.fault.error(self.rank, where)))
                sys.stdout.flush()
                os._exit(EXIT_CODE)

    # ---- the end ------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Say that this rank's program has ended, or its process group, and be silent from then on."""
        if self._stopped.is_set() or os.getpid() != self.pid:
            return
        self._stopped.set()
        if self.fault is None and not self._store_gone_at and not self.channel.busy_since:
            own = self._own or Status(self.rank)
            try:
                ended = Status(self.rank, own.beat + 1, own.line, host=own.host, pid=own.pid, has_ended=True)
                self.channel.put(f"rank/{self.rank}", ended.text())
            except StoreGone:
                pass
        if not self.channel.busy_since:
            self.channel.close()

    def raised(self, error: BaseException, line: str) -> None:
        """The program ends with an error that nobody has caught."""
        if os.getpid() != self.pid or self._stopped.is_set() or self._store_gone_at:
            return
        if self.fault is not None or isinstance(error, (RankLost, CollectivesDiffer)):
            return
        words = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        self.publish(Fault("raised", self.rank, f"has raised {words}", line))

    def _say(self, text: str) -> None:
        print(f"fused_eager: {text}", file=sys.stderr, flush=True)
