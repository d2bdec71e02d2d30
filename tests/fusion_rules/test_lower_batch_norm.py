"""Batch norm in all its overloads against eager, running statistics included."""

from __future__ import annotations

import pytest
import torch
from torch._ops import OpOverload

from .errors import assert_same, lowered
from .harness import sweep

A = torch.ops.aten
SHAPES = [(5, 3), (4, 3, 6), (2, 3, 4, 4), (4, 3, 1, 1)]


def parameters(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Weight, bias, running mean and running variance of 3 channels."""
    return tuple(torch.rand(3, dtype=dtype) for _ in range(4))


def with_running(op: OpOverload, x: torch.Tensor, *args: object) -> list[torch.Tensor]:
    """Eager's results of an op that updates the running statistics, and these: args 3 and 4 of `op`."""
    fresh = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    out = op(x, *fresh)
    return [*out, fresh[2], fresh[3]]  # type: ignore[list-item]


def test_corpus() -> None:
    names = ["nn.functional.batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"]
    mode = sweep(names, [torch.float32], limit=2)
    assert not mode.problems
    assert mode.checked


@pytest.mark.thinned(2)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("momentum", [0.1, 1.0])
def test_forward_and_running_statistics(shape: tuple[int, ...], training: bool, momentum: float) -> None:
    x, args = torch.randn(shape, dtype=torch.float64), parameters()
    for op in (A.native_batch_norm.default, A._native_batch_norm_legit.default):
        want = with_running(op, x, *args, training, momentum, 1e-5)
        functional = A._native_batch_norm_legit_functional.default if "legit" in str(op) else op
        got = lowered(functional, want, x, *args, training, momentum, 1e-5)
        torch.testing.assert_close(got, want)
        # Asked for the three visible results alone, it gives those.
        torch.testing.assert_close(lowered(functional, want[:3], x, *args, training, momentum, 1e-5), want[:3])


def test_without_statistics_or_parameters() -> None:
    x = torch.randn(4, 3, 5)
    assert_same(A.native_batch_norm.default, x, None, None, None, None, True, 0.1, 1e-5)
    assert_same(A._native_batch_norm_legit.no_stats, x, None, None, True, 0.1, 1e-5)


def test_a_constant_channel_without_eps() -> None:
    assert_same(A.native_batch_norm.default, torch.ones(4, 3), None, None, None, None, True, 0.1, 0.0)


def test_update_and_no_update() -> None:
    x, args = torch.randn(4, 3, 5), parameters(torch.float32)
    want = with_running(A._batch_norm_with_update.default, x, *args, 0.1, 1e-5)
    got = lowered(A._batch_norm_with_update_functional.default, want, x, *args, 0.1, 1e-5)
    torch.testing.assert_close(got, want)
    assert_same(A._batch_norm_no_update.default, x, *args, 0.1, 1e-5)
    assert_same(A._native_batch_norm_legit_no_training.default, x, *args, 0.1, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_half_types_are_rounded_where_eager_rounds(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, args = (torch.randn(shape) * 2 + 1).to(dtype), parameters(dtype)
    want = with_running(A.native_batch_norm.default, x, *args, True, 0.1, 1e-5)
    got = lowered(A.native_batch_norm.default, want, x, *args, True, 0.1, 1e-5)
    eps = torch.finfo(dtype).eps  # the sum with the bias cancels: a last digit of its terms, which are near one
    torch.testing.assert_close(got, want, rtol=2 * eps, atol=eps)
    assert_same(A.native_batch_norm.default, x, *parameters(torch.float32), True, 0.1, 1e-5)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", [[True, True, True], [False, True, True], [True, False, False]])
def test_backward(shape: tuple[int, ...], train: bool, mask: list[bool]) -> None:
    x, dy = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    weight, bias, mean, var = parameters()
    _, saved_mean, saved_invstd = A.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
    args = dy, x, weight, mean, var, saved_mean, saved_invstd, train, 1e-5, mask
    want = [r for r in A.native_batch_norm_backward(*args) if r is not None]
    torch.testing.assert_close(lowered(A.native_batch_norm_backward.default, want, *args), want)
    reserve = torch.empty(0, dtype=torch.uint8)
    torch.testing.assert_close(lowered(A.batch_norm_backward.default, want, *args, reserve), want)


def test_backward_without_weight() -> None:
    x, dy = torch.randn(4, 3, 5), torch.randn(4, 3, 5)
    _, mean, invstd = A.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)
    args = dy, x, None, None, None, mean, invstd, True, 1e-5, [True, False, False]
    want = [A.native_batch_norm_backward(*args)[0]]
    torch.testing.assert_close(lowered(A.native_batch_norm_backward.default, want, *args), want)
