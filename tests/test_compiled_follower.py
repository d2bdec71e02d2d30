"""The compiled prototype is honest: it compares all that is claimed of it, and computes what eager computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from benchmarks.follower.__main__ import Nothing
from benchmarks.follower.prototype import Follower, obstacle

pytestmark = pytest.mark.slow  # the compiler takes half a minute
Tensor = torch.Tensor


class Counting(Nothing):
    """The Python that a miss falls back to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.fixture(scope="module")
def follower(tmp_path_factory: pytest.TempPathFactory) -> Follower:
    why = obstacle()
    if why:
        pytest.skip(why)
    return Follower(tmp_path_factory.mktemp("follower"))


def program(x: Tensor, w: Tensor, scale: float = 0.5) -> Tensor:
    y = torch.tanh(x @ w) * scale
    z = torch.cat([y, x.t()], 1) + 1
    return z.sum(0, keepdim=True) - y.mean()


X, W = torch.randn(4, 4), torch.randn(4, 4)


@contextmanager
def followed(follower: Follower, first: Callable[[], object]) -> Iterator[Counting]:
    """In the body the ops of `first` are the remembered stream."""
    with Counting() as mode:
        with follower.record():
            first()
        mode.seen.clear()
        with follower.follow():
            yield mode


def test_a_repeated_stream_is_followed_without_python(follower: Follower) -> None:
    with followed(follower, lambda: program(X, W)) as mode:
        before = follower.followed
        out = program(X, W)
        assert follower.followed - before == follower.steps == 8
        assert mode.seen == []
        with pytest.raises(RuntimeError):
            out.data_ptr()  # handed out, and written by nobody yet
        follower.flush()
        assert out.data_ptr()
    assert torch.equal(out, program(X, W))


def test_a_stream_is_followed_again_and_again_with_other_values_and_numbers(follower: Follower) -> None:
    with followed(follower, lambda: program(X, W)) as mode:
        outs = []
        for x, w, scale in ((X, W, 0.5), (W, X, 0.25)):
            outs.append(program(x, w, scale))
            follower.flush()
        assert mode.seen == []
    assert torch.equal(outs[0], program(X, W))
    assert torch.equal(outs[1], program(W, X, 0.25))


def test_reading_a_value_computes_it_first(follower: Follower) -> None:
    with followed(follower, lambda: program(X, W)) as mode:
        mean = program(X, W).mean().item()
        assert mode.seen == ["aten.mean.default", "aten._local_scalar_dense.default"]
    assert mean == program(X, W).mean().item()


def first_op(x: Tensor, y: Tensor, number: Any = 2.0) -> Tensor:
    z = torch.mul(x, y)
    return torch.add(z, number)


@pytest.mark.parametrize(
    ("other", "op"),
    [
        (lambda: first_op(X, X), "aten.mul.Tensor"),  # the same value twice
        (lambda: first_op(X, W.t()), "aten.mul.Tensor"),  # seen differently
        (lambda: first_op(X, W.double()), "aten.mul.Tensor"),
        (lambda: first_op(X[:2], W[:2]), "aten.mul.Tensor"),
        (lambda: first_op(X, W, 2), "aten.add.Tensor"),  # another type of number
        (lambda: torch.add(torch.mul(X, W), 2.0), "aten.mul.Tensor"),  # from another line
        (lambda: torch.div(X, W), "aten.div.Tensor"),
    ],
    ids=["identity", "strides", "dtype", "sizes", "type", "line", "op"],
)
def test_the_first_difference_goes_to_python(follower: Follower, other: Callable[[], Tensor], op: str) -> None:
    want = other()
    with followed(follower, lambda: first_op(X, W)) as mode:
        missed = follower.missed
        out = other()
        assert follower.missed == missed + 1
        assert next(seen for seen in mode.seen if "to_copy" not in seen) == op
        assert torch.equal(out, want)


def test_a_structural_argument_is_compared(follower: Follower) -> None:
    def total(dim: int) -> Tensor:
        return X.sum(dim)

    with followed(follower, lambda: total(0)) as mode:
        assert torch.equal(total(0), X.sum(0))
        follower.flush()
        out = total(1)
        assert mode.seen[-1] == "aten.sum.dim_IntList"
    assert torch.equal(out, X.sum(1))


def test_gradients_are_those_of_eager(follower: Follower) -> None:
    w = W.clone().requires_grad_()

    def step() -> Tensor:
        return torch.autograd.grad((X @ w).tanh().pow(2).sum(), w)[0]

    want = step()
    with followed(follower, step):
        out = step()
        follower.flush()
        assert torch.equal(out, want)
