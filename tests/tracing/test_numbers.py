"""Which numbers ATen takes is asked once for all of a kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fused_eager import fused_eager
from fused_eager.tracing.numbers import BOUNDS, are_taken, kind, kinds
from fused_eager.tracing.opinfo import info_of
from tests.streams import events

U, N, X = torch.arange(4, dtype=torch.uint8), torch.arange(1, 4), torch.arange(4.0) - 1
SHORT, H = torch.arange(4, dtype=torch.int16), torch.arange(4.0).half()
INF, NAN = math.inf, math.nan


def of_in_place(function: Callable[..., torch.Tensor], number: float) -> torch.Tensor:
    y = X.clone().requires_grad_()
    function(y * 1, number, inplace=True).sum().backward()
    assert y.grad is not None
    return y.grad


# What is computed with a number, one that ATen takes, and one that it refuses.
CASES: dict[str, tuple[Callable[[Any], torch.Tensor], float, float]] = {
    "add, alpha": (lambda k: torch.add(U, U, alpha=k), 2, 300),
    "add, alpha below": (lambda k: torch.add(U, U, alpha=k), 2, -300),
    "add, alpha, int16": (lambda k: torch.add(SHORT, SHORT, alpha=k), 2, 70_000),
    "add, alpha, half": (lambda k: torch.add(H, H, alpha=k), 2.0, 7e4),
    "addmm": (lambda k: torch.addmm(U.view(2, 2), U.view(2, 2), U.view(2, 2), alpha=k), 2, -300),
    "index_add": (lambda k: U.clone().index_add(0, torch.tensor([0, 1]), U[:2], alpha=k), 2, -300),
    "clamp": (lambda k: U.clamp(max=k), 2, 300),
    "clamp, half": (lambda k: H.clamp(max=k), 2.0, 7e4),
    "threshold": (lambda k: F.threshold(U, k, 1), 2, 300),
    "softshrink": (lambda k: F.softshrink(X, k), 0.1, -1.0),
    "celu": (lambda k: F.celu(X, k), 1.0, 0.0),
    "renorm": (lambda k: X.view(2, 2).renorm(2, 0, k), 1.0, -1.0),
    "fill_": (lambda k: N.clone().fill_(k), 1.0, NAN),
    "full": (lambda k: torch.full((2,), k, dtype=torch.int64), 1.0, INF),
    "full, uint8": (lambda k: torch.full((2,), k, dtype=torch.uint8), 1, 300),
    "full, half": (lambda k: torch.full((2,), k, dtype=torch.float16), 1.0, 7e4),
    "full, float32": (lambda k: torch.full((2,), k, dtype=torch.float32), 1.0, 1e39),
    "full_like": (lambda k: torch.full_like(H, k), 1.0, 7e4),
    "leaky_relu in place": (lambda k: of_in_place(F.leaky_relu, k), 0.1, -1.0),
    "elu in place": (lambda k: of_in_place(F.elu, k), 1.0, -1.0),
}


@pytest.mark.parametrize("follower", ["compiled", "python"])
@pytest.mark.parametrize("name", CASES)
def test_a_number_is_refused_after_others_were_taken(name: str, follower: str) -> None:
    compute, good, bad = CASES[name]
    with pytest.raises(RuntimeError) as wanted:
        compute(bad)
    for _ in range(3):
        with fused_eager(follower=follower):
            found = compute(good)
        torch.testing.assert_close(found, compute(good))
    with pytest.raises(RuntimeError) as raised, fused_eager(follower=follower):
        compute(bad)
    assert str(raised.value).startswith(str(wanted.value).splitlines()[0])
    with fused_eager(follower=follower):
        found = compute(good)
    torch.testing.assert_close(found, compute(good))


def test_kinds_tell_signs_and_dtypes_apart() -> None:
    numbers = [NAN, 0, *(s * n for s in (1, -1) for b in BOUNDS for n in (b, math.nextafter(b, INF)))]
    found = [kind(n) for n in numbers]
    assert max(found) < 256
    for dtype in (torch.int8, torch.int16, torch.int32, torch.uint8):
        limits = torch.iinfo(dtype)
        fitting = {kind(n) for n in numbers if limits.min <= n <= limits.max}
        assert fitting.isdisjoint(kind(n) for n in numbers if n < limits.min or n > limits.max)
    assert kind(0.0) == kind(-0.0) == kind(0) and kind(3) == kind(2.5) != kind(-3)
    assert len({kind(INF), kind(-INF), kind(NAN), kind(1e39), kind(1e300)}) == 4, "beyond float32 is one kind"


def test_aten_is_asked_once_for_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def asking(info: Any, args: Any, *rest: Any) -> bool:
        asked.append(args[1])
        return are_taken(info, args, *rest)

    monkeypatch.setattr("fused_eager.recording.record.are_taken", asking)
    x = torch.ones(7, 3, 2)
    with events("island") as islands:
        for number in (2.0, 3.0, -1.0, 4.0, -2.0, 300.0, 0.0, 0.5):
            with fused_eager():
                y = (x + 1).clamp(max=5.0) * number
            assert torch.equal(y, torch.full((7, 3, 2), 2 * number))
    of_mul = [n for n in asked if n in (2.0, 3.0, -1.0, 4.0, -2.0, 300.0, 0.0, 0.5)]
    assert of_mul == [2.0, -1.0, 300.0, 0.0] and not islands


def test_of_large_tensors_a_part_is_asked() -> None:
    """What each element is computed from alone needs no 64 MB of zeros."""
    info, x = info_of(torch.ops.aten.softshrink.default), torch.empty(1, dtype=torch.float32).expand(1 << 12, 1 << 12)
    assert are_taken(info, (x, 0.5), {}, [x], torch.float32)
    assert not are_taken(info, (x, -0.5), {}, [x], torch.float32)
    assert kinds([0.5, -0.5, 0]) == bytes([kind(0.5), kind(-0.5), kind(0)])


def test_of_an_optimizers_lists_a_part_is_asked() -> None:
    """On a device the whole of a model's parameters would be fetched for ATen to be asked."""
    info = info_of(torch.ops.aten._foreach_mul_.Scalar)
    for dtype, taken in ((torch.float32, True), (torch.int32, False)):
        x = torch.empty(1, dtype=dtype).expand(1 << 12, 1 << 13)
        assert are_taken(info, ([x, x], 0.5), {}, [x, x], dtype) is taken
