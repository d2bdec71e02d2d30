"""Slices that move on from round to round: one program for all places, and numbers as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fused_eager import report
from fused_eager.bounded import Bounded
from fused_eager.executing import load
from fused_eager.frontends.device.doors import DOORS, set_options
from fused_eager.planning import budget
from fused_eager.policy.hotness import SKELETONS, Skeletons

from .compare import TPU

LENGTH, ROUNDS = 60, 6


def _read(x: Tensor, k: int) -> Tensor:
    return (x[:, 8 * k : 8 * k + 8] * 2 + 1).sum(0)


def _read_around_the_ends_of_rows(x: Tensor, k: int) -> Tensor:
    return torch.as_strided(x, (3, 2), (7, 3), 5 * k + (4 if k % 2 else 0)) * 3


def _read_every_fifth(x: Tensor, k: int) -> Tensor:
    return x[:, k::5][:, :6].to(torch.float64) * 0.5


def _read_as_another_dtype(x: Tensor, k: int) -> Tensor:
    return x.view(torch.int32)[:, k : k + 3] + 1


def _write(x: Tensor, k: int) -> Tensor:
    x[:, k : k + 2] = k
    return x


def _write_what_is_read_beside(x: Tensor, k: int) -> Tensor:
    x[:, 8 * k : 8 * k + 4] += x[:, 8 * k + 3 : 8 * k + 7]
    return x


def _write_into_an_expanded_part(x: Tensor, k: int) -> Tensor:
    x[::2, k].mul_(x[1::2, k + 1])
    return x


CASES: list[Callable[[Tensor, int], Tensor]] = [
    _read,
    _read_around_the_ends_of_rows,
    _read_every_fifth,
    _read_as_another_dtype,
    _write,
    _write_what_is_read_beside,
    _write_into_an_expanded_part,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_moving_part_is_compiled_twice_and_no_more(case: Callable[[Tensor, int], Tensor]) -> None:
    x = torch.arange(8.0 * LENGTH).reshape(8, LENGTH)
    on = x.to(TPU)
    for k in range(ROUNDS):
        assert torch.equal(case(on, k).cpu(), case(x, k)), k
        if k == 1:
            before = report().compilations
    assert report().compilations == before


def _dropped(mode: str, shapes_change: bool) -> list[float]:
    """Windows of a text, with dropout: `shapes_change`, so that nothing is ever compiled whole."""
    before = DOORS[0].stream.config.mode
    set_options(mode=mode)
    try:
        torch.manual_seed(0)
        text = torch.arange(3.0 * LENGTH).reshape(3, LENGTH).to(TPU)
        found = []
        for k in range(7):
            size = 4 + (k if shapes_change else 0)
            found.append(F.dropout(text[:, 4 * k : 4 * k + size], 0.3).sum().item())
        return found
    finally:
        set_options(mode=before)


@pytest.mark.parametrize("shapes_change", [False, True])
def test_what_is_dropped_of_windows_is_the_same_op_by_op(shapes_change: bool) -> None:
    assert _dropped("fused", shapes_change) == pytest.approx(_dropped("strict", shapes_change), rel=1e-5)


def test_a_draw_on_the_host_is_the_devices() -> None:
    op = torch.ops.fused_eager.random_uniform
    torch.tpu.manual_seed(7)
    on = torch.empty(5, device=TPU).uniform_()
    assert torch.equal(op([5], 7, 0, dtype=torch.float32), on.cpu())


def _growing(device: object, width: int = 6) -> list[float]:
    """A cache that grows by a row each round, read by all rounds after."""
    x, out = torch.linspace(-1, 2, width).to(device).view(1, 1, width), []  # type: ignore[call-overload]
    cache = x[:, :0]
    for _ in range(3 * ROUNDS):
        cache = torch.cat([cache, x], 1)
        x = torch.tanh(torch.softmax(x @ cache.transpose(1, 2), -1) @ cache + x)
        out.append(x.sum().item())
    return out


@pytest.mark.parametrize("islands", ["allow", "refuse"])
def test_what_keeps_growing_is_not_compiled_for_ever(islands: str) -> None:
    before = report().compilations
    set_options(islands=islands)
    try:
        assert _growing(TPU) == pytest.approx(_growing("cpu"), rel=1e-5, abs=1e-5)
    finally:
        set_options(islands="allow")
    if islands == "allow":  # by what is left all further lengths run on the host
        assert report().compilations - before <= 6


@pytest.mark.parametrize(("mode", "width"), [("strict", 7), ("debug", 9)])
def test_what_keeps_growing_is_not_compiled_for_ever_op_by_op(
    mode: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each op was, for each length."""
    before, want = DOORS[0].stream.config.mode, _growing("cpu", width)
    monkeypatch.setattr(budget.LINES, "further", budget.TOGETHER)  # the program has had many forms compiled
    set_options(mode=mode)
    try:
        counts = [len(load.EXECUTABLES)]
        for spent in (SKELETONS, _Spent()):  # what has taken ATen as long as it takes to compile is compiled
            monkeypatch.setattr(load, "SKELETONS", spent)
            assert _growing(TPU, width) == pytest.approx(want, rel=1e-5, abs=1e-5)
            counts.append(len(load.EXECUTABLES))
    finally:
        set_options(mode=before)
    few, all_of_them = counts[1] - counts[0], counts[2] - counts[0]
    assert few <= 5 * budget.FEW and all_of_them >= 50


class _Always(Bounded[Any, float]):
    """Much, whatever is asked for."""

    def get(self, key: Any, default: Any = None) -> Any:
        return 1e9


class _Spent(Skeletons):
    """As if all that came had taken ATen long."""

    def __init__(self) -> None:
        super().__init__(spent=_Always(1))
