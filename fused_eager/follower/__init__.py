"""The compiled follower: ops that come again are followed in C++ (`kernels.h`), where there is a compiler.

It does what `recording.follow` does, on the same objects, in a quarter of the time; what it declines goes to Python,
which stays the whole truth about recording. It is built once, in the background (`build`), and taken up
(`frontends.context.connection`) where no op of this thread is under way. Until then, and where nothing can be built,
everything is as it is without.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .. import progress
from ..compiling import background
from ..config import Config
from ..log.events import LOG
from ..policy import autotuner
from . import build
from .build import FollowerUnavailable

AFTER = 10.0  # seconds of a program in contexts before anything is built for it


class _State:
    """What has become of it in this process."""

    module: ModuleType | None = None
    why: str = "no context has asked for it"  # there is none
    attending = False  # somebody waits for it to be built, or for the time to begin
    since = 0.0  # when the first context asked
    builder: threading.Thread | None = None
    load: Callable[[Path], ModuleType]  # what connects it with the runtime's objects, as whoever asked has it
    taken_up: Callable[[], None]  # what is to be done once it is there
    serving: tuple[Callable[[ModuleType], None], ...] = ()  # whom it is to serve beside contexts
    closed = False  # for good
    hooked = False  # torch asks it of the accelerator


_STATE = _State()
_LOCK = threading.Lock()


def is_open() -> bool:
    """Whether ops are followed in C++ in this process."""
    return _STATE.module is not None


def status() -> str:
    """Whether ops are followed in C++ in this process, and why not, in words."""
    return "compiled" if is_open() else f"python: {_STATE.why}"


def ways() -> tuple[int, int, int]:
    """How many ops of this process went to Python, to ATen without Python, and were followed in C++."""
    return (0, 0, 0) if _STATE.module is None else _STATE.module.ways()


def reader(original: Callable[..., Any]) -> Callable[..., Any] | None:
    """What calls `original`, a method that reads a number, and notices that; None where ops are not followed in C++."""
    return None if _STATE.module is None else _STATE.module.reader(original)


def state_of(generator: Any) -> Any:
    """The state of a generator of the device (`frontends.device.random.Generator`); None of any other."""
    return None if _STATE.module is None else _STATE.module.state_of(generator)


def give_hooks(make_generator: Callable[[int], Any]) -> bool:
    """Have torch's questions to an accelerator answered in C++; whether they are. A generator's state, of a device of a
    number, is made by `make_generator`."""
    if _STATE.module is not None:
        _STATE.module.register_hooks(make_generator)
        _STATE.hooked = True
    return _STATE.hooked


def has_hooks() -> bool:
    """Whether torch's questions to an accelerator are answered in C++."""
    return _STATE.hooked


def generators_over(states: Sequence[Any]) -> tuple[torch.Generator, ...] | None:
    """Generators of the devices 0, 1, ... over their states, as torch knows them; None without a compiled follower."""
    module = _STATE.module
    return None if module is None else tuple(module.generator_over(*given) for given in enumerate(states))


def overlook(until: float) -> float:
    """Till when reads of this thread are counted and no more, by the clock of `time.perf_counter`; returns till when
    they have been."""
    return 0.0 if _STATE.module is None else _STATE.module.overlook(until)


def overlooked() -> int:
    """How many reads of this thread were counted and no more since this was asked last."""
    return 0 if _STATE.module is None else _STATE.module.overlooked()


def enter(config: Config, load: Callable[[Path], ModuleType], taken_up: Callable[[], None]) -> None:
    """A context whose ops it follows is entered, or a device registered: take up what is built, or see to it that it
    will be.

    `load` makes a module of the library and connects it with the runtime's objects; `taken_up` is called when ops are
    followed by it.

    Raises:
        FollowerUnavailable: the option asks for it, and it cannot be had.
    """
    if is_open() or config.follower == "python":
        return
    with _LOCK:
        if is_open():
            return
        _STATE.load, _STATE.taken_up = load, taken_up
        if build.is_built():
            _take_up()
        elif config.follower == "compiled":
            with progress.waiting("building the compiled follower", config.progress):
                build.build(patiently=False)
            _take_up()
        elif _STATE.builder is None and not _STATE.attending:
            why = build.obstacle()
            _STATE.why, _STATE.attending, _STATE.since = why or "it is not built yet", not why, time.monotonic()
        if config.follower == "compiled" and not is_open():
            raise FollowerUnavailable(f"no compiled follower: {_STATE.why}")


def serve(begin: Callable[[ModuleType], None]) -> None:
    """Have `begin` called with the follower: now if there is one, or else as it is taken up."""
    with _LOCK:
        if _STATE.module is not None:
            begin(_STATE.module)
        else:
            _STATE.serving += (begin,)


def attend() -> None:
    """No op of this thread is under way: begin to build, or take up what has been built meanwhile. Called often."""
    if not _STATE.attending or not _LOCK.acquire(blocking=False):
        return
    try:
        if _STATE.builder is None:
            if time.monotonic() - _STATE.since > AFTER:
                _STATE.builder = threading.Thread(target=_build, daemon=True, name="fused-eager follower")
                _STATE.builder.start()
        elif not _STATE.builder.is_alive():
            # Torch changes its tables without a lock, and what compiles runs ops below modes of its own.
            if build.is_built() and background.busy():
                return
            _STATE.attending = False
            if build.is_built():
                _take_up()
    finally:
        _LOCK.release()


def _build() -> None:
    began = time.perf_counter()
    try:
        build.build()
        _tell("built", time.perf_counter() - began)
    except FollowerUnavailable as error:
        _STATE.why = str(error)
        _tell("failed", time.perf_counter() - began)


def _take_up() -> None:
    began = time.perf_counter()
    try:
        _STATE.module = _STATE.load(build.library())
    except (ImportError, RuntimeError, AttributeError) as error:
        _STATE.why = f"it does not fit this torch: {error}"
        _tell("failed", time.perf_counter() - began)
        return
    _STATE.attending, _STATE.why = False, ""
    for begin in _STATE.serving:
        begin(_STATE.module)
    _STATE.taken_up()
    autotuner.forget()  # what was measured with Python's follower
    _tell("taken up", time.perf_counter() - began)


def _tell(what: str, seconds: float) -> None:
    LOG.emit("follower", what=what, why=_STATE.why, seconds=seconds)


def close() -> None:
    """All ops go to Python from now on: in a forked child, where XLA has no threads."""
    _STATE.closed = True
    pause(True)


def pause(whether: bool) -> None:
    """All ops go to Python, or no longer: while a profiler is told of them, and looks at their operands."""
    if _STATE.module is not None:
        _STATE.module.open(not (whether or _STATE.closed))


__all__ = [
    "FollowerUnavailable",
    "attend",
    "close",
    "enter",
    "generators_over",
    "give_hooks",
    "has_hooks",
    "is_open",
    "overlook",
    "overlooked",
    "pause",
    "reader",
    "serve",
    "state_of",
    "status",
    "ways",
]
