"""Garbage: what a program drops is gone at once, as in eager, and does not wait for the garbage collector."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fused_eager import fused_eager

N = 17


def load() -> None:
    n = N
    model = torch.nn.LSTM(n, n, bidirectional=True)
    model.load_state_dict(copy.deepcopy(model).state_dict())


def load_what_does_not_fit() -> None:
    with pytest.raises(RuntimeError):
        torch.nn.Linear(4, N).load_state_dict({"weight": torch.ones(3, 3), "x": torch.ones(2)})


def train() -> None:
    n = N
    model = torch.nn.Linear(n, 4)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(torch.ones(2, n)) ** 2).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    loss.item()


def train_recurrent() -> None:
    n = N
    model = torch.nn.LSTM(n, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 2, n))[0].square().mean().backward()
        optimizer.step()


def hooks() -> None:
    n = N
    model = torch.nn.Linear(n, 4)
    handle = model.register_forward_hook(lambda module, given, out: out * 2)
    y = model(torch.ones(2, n, requires_grad=True))
    y.register_hook(lambda grad: grad * 2)
    y.sum().backward()
    handle.remove()


def refused() -> None:
    x = torch.ones(N) * 2
    indices = torch.arange(N)
    for wrong in (lambda: x + torch.ones(4), lambda: x.index_add_(0, indices, x), lambda: x.view(3, 5)):
        try:
            wrong()
        except RuntimeError:
            continue
        raise AssertionError("not refused")


def refused_index() -> None:
    x = torch.ones(N) * 2
    try:
        x[torch.tensor([5000]) * 1].sum().item()
    except IndexError:
        pass


def refused_matrix() -> None:
    try:
        torch.linalg.cholesky(-torch.eye(N) * 1)
    except torch.linalg.LinAlgError:
        pass


def too_wide(x: torch.Tensor) -> torch.Tensor:
    return x + torch.ones(3)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    SCRIPTED = torch.jit.script(too_wide)


def refused_in_scripted_code() -> None:
    try:
        SCRIPTED(torch.ones(N) * 2)
    except RuntimeError:
        pass


def copies() -> None:
    x = torch.ones(N) * 2
    copy.deepcopy(x)
    pickle.loads(pickle.dumps(x))
    file = io.BytesIO()
    torch.save({"x": x * 2}, file)
    file.seek(0)
    torch.load(file)
    repr(x + 1)
    (x * 3).numpy()


def a_thread() -> None:
    thread = threading.Thread(target=lambda: (torch.ones(N) * 2).sum())
    thread.start()
    thread.join()


def a_thread_whose_run_is_replaced() -> None:
    thread = threading.Thread()
    thread.run = lambda: None  # type: ignore[method-assign]
    thread.start()
    thread.join()


def transforms() -> None:
    torch.func.grad(lambda x: (x**2).sum())(torch.ones(N) * 2)


def recomputed() -> None:
    x = torch.ones(N, requires_grad=True)
    torch.utils.checkpoint.checkpoint(lambda a: (a * 2).sin(), x, use_reentrant=False).sum().backward()


def nothing() -> None:
    pass


PROGRAMS = (
    nothing, load, load_what_does_not_fit, train, train_recurrent, hooks, refused, refused_index, refused_matrix,
    refused_in_scripted_code, copies, a_thread, a_thread_whose_run_is_replaced, transforms, recomputed,
)  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "auto": {"compile": "auto"},
    "wait": {"compile": "wait"},
    "python": {"compile": "wait", "follower": "python"},
    "strict": {"mode": "strict"},
}


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> None:
    """What other tests have left is not gone through in each of the many collections here."""
    gc.collect()
    gc.freeze()


def left(program: Callable[[], None]) -> int:
    """How many objects wait for the collector after a program."""
    gc.collect()
    gc.disable()
    try:
        program()
        return gc.collect()
    finally:
        gc.enable()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_nothing_waits_for_the_collector_that_does_not_in_eager(program: Callable[[], None], options: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program()  # what torch imports at first use
        expected = min(left(program) for _ in range(2))
        with fused_eager(progress=False, **OPTIONS[options]):
            for _ in range(3):
                program()  # what compiling leaves is JAX's own
            found = min(left(program) for _ in range(3))
    assert found <= expected


@pytest.mark.parametrize("options", OPTIONS)
def test_what_an_error_refers_to_dies_with_it(options: str) -> None:
    with fused_eager(**OPTIONS[options]):
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                x = torch.ones(3) * 2
                seen = weakref.ref(x)
                try:
                    x.index_add_(0, torch.arange(3), x)
                except RuntimeError:
                    pass
                try:
                    x + torch.ones(4)
                except RuntimeError:
                    pass
                del x
                assert seen() is None
        finally:
            gc.enable()
