"""The systems that run a workload: how each is entered, what it asks of the user, how it is waited for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.workloads import Wrap


def _as_it_is(function: Any) -> Any:
    return function


def no_wait() -> None:
    """Plain PyTorch on the CPU has finished when it returns."""


@dataclass(frozen=True)
class System:
    """One column of the table."""

    name: str
    about: str
    enter: Callable[[], AbstractContextManager[Any]]
    sync: Callable[[], None] = no_wait
    wait: Callable[[], None] = no_wait  # until what runs has run, wherever its results lie
    finish: Callable[[], None] = no_wait  # until nothing is being compiled any more
    wrap: Wrap = _as_it_is
    place: Callable[[], AbstractContextManager[Any]] = nullcontext  # where a workload is set up, on the system's device
    fetch: Callable[[Tensor], Tensor] = _as_it_is  # a result to the CPU, within `enter`
    compilations: Callable[[], int | None] = lambda: None  # since the process started; None where nobody counts
    waiting: Callable[[], bool] = lambda: False  # to see more of the program before it goes about it
    same_random: bool = True  # draws the random numbers that plain eager draws
    same_dtypes: bool = True  # False: knows no 64 bits and computes with 32, which is no wrong result
    optional: bool = False  # a failure leaves the cell empty, with the reason, and is no error


def _mode(name: str, **options: Any) -> Callable[[], AbstractContextManager[Any]]:
    def enter() -> AbstractContextManager[Any]:
        from fused_eager import fused_eager

        return fused_eager(mode=name, **options)

    return enter


def _reported() -> AbstractContextManager[Any]:
    from fused_eager import fused_eager

    # One file per process, outside of the tree; what it holds is not looked at, only what writing it costs.
    path = os.path.join(tempfile.gettempdir(), f"fused_eager_benchmark_{os.getpid()}.jsonl")
    return fused_eager(mode="fused", report=path)


def _sync() -> None:
    from fused_eager import sync

    sync()


def _wait() -> None:
    """Not `sync()`, which moves what is trained to the program's own memory, for the next step to move it back."""
    from fused_eager.executing import run

    run.wait()


def _finish() -> None:
    """Not `sync(compiled=True)`, which would be one more boundary in a loop that is to be measured as it is."""
    from fused_eager.compiling import background

    background.wait()


def _resting() -> bool:
    """Whether writing ops down waits for its share of the time."""
    from fused_eager.policy.allowance import ALLOWANCE

    return ALLOWANCE.resting


def regions_compiled() -> int:
    """The one place that knows how the library's report counts compilations."""
    from fused_eager import report

    return int(report().compilations)


def _graphs_compiled() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


AUTOTUNE = "max-autotune-no-cudagraphs"


def _inductor(mode: str | None = None) -> Wrap:
    return lambda function: torch.compile(function, mode=mode)


def _our_backend(mode: str | None = None) -> Wrap:
    def wrap(function: Any) -> Any:
        # Not by its name: a checkout has no entry points.
        from fused_eager.frontends.compiler.backend import compile_graph

        return torch.compile(function, backend=compile_graph, mode=mode)

    return wrap


def _ours(name: str, about: str) -> System:
    return _fused(name, about, _mode(name))


def _fused(name: str, about: str, enter: Callable[[], AbstractContextManager[Any]]) -> System:
    return System(name, about, enter, _sync, _wait, _finish, compilations=regions_compiled, waiting=_resting)


def _compiled(name: str, about: str, mode: str | None = None) -> System:
    return System(
        name,
        about,
        nullcontext,
        wrap=_inductor(mode),
        compilations=_graphs_compiled,
        same_random=False,
        optional=True,
    )


def _compiled_fused(name: str, about: str, mode: str | None = None) -> System:
    return System(name, about, nullcontext, wrap=_our_backend(mode), compilations=regions_compiled)


def _torchax(name: str, about: str, wrap: Wrap = _as_it_is) -> System:
    return System(
        name,
        about,
        peers.running,
        peers.wait,
        peers.wait,
        wrap=wrap,
        place=peers.placed,
        fetch=peers.fetched,
        compilations=peers.compilations,
        same_random=False,
        same_dtypes=False,
        optional=True,
    )


SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System("eager", "plain PyTorch, the reference", nullcontext),
        _ours("fused", 'fused_eager(mode="fused")'),
        _ours("strict", 'fused_eager(mode="strict")'),
        _ours("debug", 'fused_eager(mode="debug")'),
        _fused(
            "recorded",
            "fused, every op recorded even where torch alone is faster",
            _mode("fused", native="never"),
        ),
        _fused("reported", "fused, with the event log written to a file", _reported),
        _compiled("compile", "torch.compile (inductor) around the model or the function, which the user has to add"),
        _compiled("compile_autotune", f"the same, mode {AUTOTUNE!r}", AUTOTUNE),
        _compiled_fused("compile_fused", 'torch.compile(backend="fused_eager") around the model or the function'),
        _compiled_fused("compile_fused_autotune", f"the same, mode {AUTOTUNE!r}", AUTOTUNE),
        _torchax("torchax", "torchax in eager mode, one op at a time (the extra `peers`)"),
        _torchax("torchax_jit", "torchax, the model or the function jitted, which the user has to add", peers.jitted),
    )
}
REFERENCE = SYSTEMS["eager"]
