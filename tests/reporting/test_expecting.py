"""Budgets: what a body may compile, wait for and leave to ATen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fused_eager import BudgetExceeded, Report, expect, fused_eager, sync
from fused_eager.log.events import LOG
from tests.streams import stable_shapes


@pytest.fixture(autouse=True)
def compiled_at_sight() -> Iterator[None]:
    with stable_shapes():
        yield


def step(x: torch.Tensor) -> torch.Tensor:
    return (x * 3.5 + 0.25).relu()


def test_a_body_within_its_budget_passes() -> None:
    x = torch.ones(4, 7)
    with fused_eager(cache="off"):
        step(x).sum().item()
        with expect(max_compiles=0, max_syncs=1, max_islands=0):
            step(x).sum().item()


def test_a_compilation_is_told_with_its_reason_and_line() -> None:
    five, six = torch.ones(5, 7), torch.ones(6, 7)
    with fused_eager(cache="off"):
        step(five).sum().item()
        with pytest.raises(BudgetExceeded) as caught, expect(max_compiles=0):
            step(six).sum().item()
    text = str(caught.value)
    assert "1 region compiled; allowed: 0 (max_compiles)" in text
    assert "only shape[0] of input 0 changed, 5 -> 6" in text and "test_expecting.py:" in text
    assert isinstance(caught.value.report, Report) and caught.value.report.compilations == 1


def test_waits_are_told_by_line_and_exits_do_not_count() -> None:
    x = torch.ones(3)
    with fused_eager():
        with expect(max_syncs=2):
            step(x)[0].item()
            step(x).tolist()
        with pytest.raises(BudgetExceeded, match=r"waited 3 times; allowed: 2") as caught, expect(max_syncs=2):
            for _ in range(3):
                step(x)[0].item()
    assert "sync.value" in str(caught.value) and "what to change:" in str(caught.value)
    with expect(max_syncs=0), fused_eager():
        y = step(x)
    assert y[0] == 3.75


def test_islands_are_told_with_the_reason() -> None:
    with fused_eager(), pytest.raises(BudgetExceeded, match=r"linalg_eig.*no lowering"), expect(max_islands=0):
        torch.linalg.eigvals(torch.eye(3))


def test_none_allows_anything_and_the_bodys_exception_wins() -> None:
    with fused_eager(), expect():
        step(torch.ones(2))[0].item()
    with pytest.raises(ZeroDivisionError), fused_eager(), expect(max_syncs=0):
        step(torch.ones(2))[0].item()
        _ = 1 / 0


def test_what_is_pending_does_not_count_until_it_runs() -> None:
    with fused_eager(cache="off"):
        with expect(max_compiles=0):
            y = step(torch.ones(9, 11))
        with pytest.raises(BudgetExceeded), expect(max_compiles=0):
            sync()
    assert y.shape == (9, 11)


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "2"])
def test_a_wrong_limit_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"max_syncs cannot be .*allowed"):
        expect(max_syncs=wrong)  # type: ignore[arg-type]


def test_one_budget_may_be_used_again() -> None:
    budget = expect(max_syncs=1)
    for _ in range(3):
        with fused_eager(), budget:
            step(torch.ones(2))[0].item()


@pytest.mark.parametrize("inside", [False, True])
def test_nothing_goes_uncounted(inside: bool) -> None:
    """Where torch alone would be faster, while something is compiled, and where lengths keep changing."""
    context, x = fused_eager(native="measured", compile="auto"), torch.randn(16, 16)

    def program() -> None:
        for i in range(40):
            (x * 2).sum().item()
            torch.ones(3 + i).mul(3).sum().item()

    with fused_eager(native="measured", compile="auto"):
        program()  # it rests by now
    first, second = (context, expect(max_syncs=3)) if inside else (expect(max_syncs=3), context)
    with pytest.raises(BudgetExceeded, match="waited 80 times"), first, second:
        program()
    assert not LOG.budgets


def test_islands_that_were_found_before_count() -> None:
    x = torch.randn(8, 8)

    def program() -> None:
        for _ in range(4):
            torch.linalg.eig(x @ x)[0].abs().sum().item()

    with fused_eager(native="measured", compile="auto"):
        program()
        with pytest.raises(BudgetExceeded, match=r"linalg_eig"), expect(max_islands=0):
            program()
        with expect(max_islands=4):
            program()


def test_a_budget_ends_with_what_the_body_raises() -> None:
    with fused_eager(), pytest.raises(ZeroDivisionError), expect(max_syncs=0):
        torch.ones(3).sum().item()
        raise ZeroDivisionError
    assert not LOG.budgets
