"""Background: a stream that comes again is compiled while the program goes on; until then ATen runs it.

What comes once is not compiled at all: setting a model up, a last odd batch, a line typed at a prompt. When a stream
comes for the second time its regions are compiled on a thread of the library's own, one stream after the other, and a
program that keeps meeting it in the meantime stops recording until that thread is done: its ops run natively, as in
eager. A compilation that takes less than half as long as the stream itself is waited for.

The thread needs no lock of the runtime's: what it works on (nodes, a plan, executables) holds plain values only, and
nobody sees it before it is complete.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fused_eager.cache.background import Writer
from fused_eager.cache.exits import call_at_exit, has_failed

from .. import progress
from ..bounded import Bounded
from ..log.events import LOG
from ..policy.hotness import Backoff
from ..tracing.infer import load as load_inference
from .xla_cpu.subprocess_compiler import COMPILER

if TYPE_CHECKING:
    from ..tracing.trace import Step
    from .ready import Ready

# With a stream that is being compiled, or reads in that time, until a thread stops recording. Where a report is wanted,
# which lives on what is recorded:
MEETINGS = 16
# And else, so that a loop's other streams are met and compiled too. More would make the first steps slow, for what is
# recorded takes several times as long as in eager, and more beside a thread that compiles and wants Python's lock.
UNHEARD = 2
PER_OP = 0.01  # seconds that XLA takes to compile one op, roughly
PART = 0.5  # of a stream's own time on ATen that a program waits for its compilation
NICE = 5  # where cores are short the program goes first
# Seconds that the compiling thread keeps Python's lock while the program waits for it. Torch lets go of the lock in
# each op, and would wait for five milliseconds after each, Python's own number: a step of 400 ops took 0.4 s, once.
YIELD = 1e-4


def _meetings() -> int:
    return MEETINGS if LOG.is_wanted else UNHEARD


def is_quick(ops: int, seconds: float) -> bool:
    """Whether so many ops that take `seconds` on ATen are compiled in a part of that, as far as can be known."""
    return ops * PER_OP < PART * seconds


@dataclass(eq=False)
class Waiting:
    """A stream without executables: what runs it `meanwhile`, and how they are to be made; whether an op of it has to
    be decomposed for that, where torch infers shapes."""

    meanwhile: Ready
    make: Callable[[], Ready]
    ops: int
    first: Step | None = None  # of such streams
    decomposes: bool = False
    asked: bool = False
    failed: bool = False
    met: int = 0
    ready: Ready | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def ask(self) -> None:
        """Have it compiled."""
        if not self.asked:
            if self.decomposes:
                load_inference()  # here, and not on the thread that compiles
            self.asked = True
            if not _QUEUE.add(self.run):
                self.failed = True  # the interpreter ends

    def wait_a_little(self, seconds: float) -> None:
        """Wait for the compilation where it takes less than a part of `seconds`, as far as can be known."""
        if is_quick(self.ops, seconds):
            self.done.wait(PART * seconds)

    def meet(self, backoff: Backoff) -> Ready:
        """It has come while it is being compiled: what runs it."""
        if self.ready is None:
            self.met += 1
            if self.met >= _meetings():
                _QUEUE.rest(backoff)
        return self.ready or self.meanwhile

    def run(self) -> None:
        """Compile it, on the library's thread."""
        try:
            if not _QUEUE.closing:
                self.ready = self.make()
                if self.first is not None:
                    self.first.warm = True
        except BaseException as error:
            # Tried again where the program can be told, when the stream comes next.
            self.failed = True
            LOG.count(f"tried again: {type(error).__name__}")
        finally:
            self.done.set()


class Queue:
    """Streams to be compiled, one thread that compiles them, and the threads of the program that rest until it has."""

    def __init__(self) -> None:
        self.closing = False
        self.is_kept = False  # what is compiled, for other processes
        self._lock = threading.Lock()
        self._writer: Writer | None = None
        self._open = 0
        self._disturbed = 0  # reads since something is being compiled
        self._resting: list[Backoff] = []

    @property
    def busy(self) -> bool:
        """Whether anything is being compiled."""
        return self._open > 0

    def add(self, compilation: Callable[[], None]) -> bool:
        """Compile something; False where no thread can be had for it."""
        with self._lock:
            if self._writer is None:
                self._writer = Writer(max_bytes=0, exit_flush_s=threading.TIMEOUT_MAX, name="fused-eager-compiler")
                call_at_exit(self._close)  # after the writer's own, so it comes before that
            self._open += 1

        def job() -> None:
            _begin()
            try:
                with _yielding():
                    compilation()
            finally:
                self._finished()

        if self._writer.submit(0, job):
            return True
        self._finished()
        return False

    def rest(self, backoff: Backoff) -> None:
        """Let a thread of the program run natively until everything is compiled."""
        with self._lock:
            if self._open:
                backoff.rest(lambda: not self.busy)
                self._resting.append(backoff)

    def disturb(self, backoff: Backoff) -> None:
        """A thread of the program has read a value: how long it took says nothing, as something is being compiled."""
        self._disturbed += 1
        if self._disturbed >= _meetings():
            self.rest(backoff)

    def wait(self) -> None:
        """Return when everything that was asked for is compiled."""
        if self._writer is not None and self._open:
            progress.until(self._writer.flush, "compiling in the background")

    def _finished(self) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                self._disturbed = 0
                for backoff in self._resting:
                    backoff.wake()
                self._resting.clear()

    def _close(self) -> None:
        """At the end of the process: what has not begun need not begin.

        What XLA is at in a process of its own is waited for where the next process can find it, and where the program
        has come to its end. In this process XLA cannot be interrupted, and a process that ends under it crashes.
        """
        self.closing = True
        if not self._open:
            return
        assert self._writer is not None
        try:
            if self.is_kept and not has_failed():
                progress.until(self._writer.flush, "finishing the compilation that XLA is at")
        finally:
            COMPILER.close()
            progress.until(self._writer.flush, "finishing the compilation that XLA is at")

    def forget(self) -> None:
        """In a forked child: the thread is not there, and nothing is compiled."""
        self._lock = threading.Lock()
        self._open = 0
        self._resting.clear()


_QUEUE = Queue()
add = _QUEUE.add
wait = _QUEUE.wait
disturb = _QUEUE.disturb
os.register_at_fork(after_in_child=_QUEUE.forget)

_own = threading.local()


def busy() -> bool:
    """Whether anything is being compiled in the background."""
    return _QUEUE.busy


def keep() -> None:
    """What is compiled is kept for other processes: at the end of this one it is worth finishing."""
    _QUEUE.is_kept = True


def is_closing() -> bool:
    """Whether the interpreter ends: what has not begun need not begin."""
    return _QUEUE.closing


def nice() -> int:
    """By how much the priority of what the calling thread has compiled is lowered: not where the program waits."""
    return NICE if is_own_thread() else 0


def is_own_thread() -> bool:
    """Whether this is the thread that compiles in the background."""
    return hasattr(_own, "begun")


def _begin() -> None:
    """Mark the calling thread as ours, and lower its priority where the system has one for each thread."""
    if not is_own_thread():
        _own.begun = True
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


@contextmanager
def _yielding() -> Iterator[None]:
    """In the body, threads take turns at Python's lock sooner, unless the program has it otherwise."""
    before = sys.getswitchinterval()
    if before <= YIELD:
        yield
        return
    sys.setswitchinterval(YIELD)
    ours = sys.getswitchinterval()
    try:
        yield
    finally:
        if sys.getswitchinterval() == ours:
            sys.setswitchinterval(before)


# Streams by their shapes: once one comes again, all its forms (other values alive, other memory to be reused) are
# compiled, those that came before as well.
FORMS: Bounded[Hashable, list[weakref.ref[Waiting]]] = Bounded(1024)


def came_again(shapes: Hashable, stream: Waiting) -> bool:
    """A stream with these shapes has come; from its second time on it is compiled. Returns whether it is."""
    forms = FORMS.get(shapes)
    if forms is None:
        FORMS[shapes] = [weakref.ref(stream)]
        return False
    stream.ask()
    for form in forms:
        before = form()
        if before is not None:
            before.ask()
    forms.clear()
    return True
