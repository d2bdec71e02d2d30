"""What torch notes of modes for the whole process is right again when the last context is left, in whatever order."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from fused_eager import fused_eager
from fused_eager.frontends.context.entered import NOTES

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "wait": {"compile": "wait"},
    "strict": {"mode": "strict"},
    "debug": {"mode": "debug"},
}


def notes() -> list[bool]:
    return [getattr(_python_dispatch, name) for name in NOTES]


def overlapping(make: Callable[[], Any], other: Callable[[], Any], look: Callable[[], None]) -> None:
    """One thread enters `make()`, another one `other()`; the first leaves, then the second, which looks before it
    does."""
    entered, both, left = threading.Event(), threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def first() -> None:
        with make():
            torch.ones(3).sin()
            entered.set()
            both.wait(60)
        left.set()

    def second() -> None:
        try:
            entered.wait(60)
            with other():
                torch.ones(3).sin()
                both.set()
                left.wait(60)
                torch.ones(3).sin()
                look()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=body) for body in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


@pytest.mark.parametrize("mode", OPTIONS)
def test_contexts_of_two_threads_overlap(mode: str) -> None:
    seen: list[list[bool]] = []
    before = notes()
    overlapping(
        lambda: fused_eager(**OPTIONS[mode]), lambda: fused_eager(**OPTIONS[mode]), lambda: seen.append(notes())
    )
    assert seen == [[True] * len(NOTES)], "a context is open"
    assert notes() == before == [False] * len(NOTES)


def test_a_context_ends_with_a_mode_of_the_programs_around_it() -> None:
    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Passing():
        with fused_eager(), Passing():
            assert notes() == [True] * len(NOTES)
        assert notes() == [True] * len(NOTES)
    assert notes() == [False] * len(NOTES)


def test_dynamo_compiles_after_contexts_that_overlapped() -> None:
    import torch._dynamo.config as config

    older = {"inline_torch_dispatch_torch_compile": False}  # without it Dynamo asks the notes in any case
    graphs: list[Any] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    overlapping(fused_eager, fused_eager, lambda: None)
    # Its own patch: pytest's would have the setting gone afterwards.
    with config.patch({name: value for name, value in older.items() if hasattr(config, name)}):
        torch.compile(function, backend=backend)(torch.ones(3))
    assert len(graphs) == 1


def test_a_forked_child_leaves_the_context_of_its_one_thread() -> None:
    entered, done = threading.Event(), threading.Event()

    def other() -> None:
        with fused_eager():
            entered.set()
            done.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait(60)
    try:
        with fused_eager():
            child = os.fork()
        if child == 0:
            os._exit(0 if notes() == [False] * len(NOTES) else 1)
        assert notes() == [True] * len(NOTES)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        done.set()
        thread.join()
    assert notes() == [False] * len(NOTES)
