"""Verifying finds what XLA gets wrong, tells where, and leaves rounding alone."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_eager.fusion_rules import RULES
from fused_eager.fusion_rules.rule import rule_for

from fused_eager import OptionError, WrongResult, fused_eager
from fused_eager.compiling.compile import MEMORY
from fused_eager.executing import verify as verifying
from fused_eager.log.events import LOG
from fused_eager.tracing import trace


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Scripts that show a mismatch go to the system's folder for temporary files, and stay there: not these."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def _forget() -> None:
    rule_for.cache_clear()
    trace.MEMORY.forget()
    MEMORY.clear()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Give an op a wrong lowering for the length of a test."""

    def spoil(op: str, change: Callable[[Any], Any]) -> None:
        row = RULES[op]
        wrong = dataclasses.replace(row, lower=lambda cx, *a, **k: change(row.lower(cx, *a, **k)))
        monkeypatch.setitem(RULES, op, wrong)
        _forget()

    yield spoil
    monkeypatch.undo()
    _forget()


def program() -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, y = torch.randn(4, 5), torch.randn(5)
    a = x * 2.5 + y
    a[1:].add_(1)
    b = a.sin()
    b.t().mul_(2)
    return [a, b, b.sum(0).softmax(0), b.argmax(1)]


def verified(function: Callable[[], Any], share: float = 1.0) -> tuple[Any, list[str]]:
    """What a function returns when verified, and what was warned of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with fused_eager(verify=share, cache="off"):
            out = function()
    return out, [str(w.message) for w in told if w.category is WrongResult]


def test_what_is_right_is_left_alone() -> None:
    before = LOG.counts["verified region"]
    out, told = verified(program)
    assert told == []
    assert LOG.counts["verified region"] > before
    for a, b in zip(out, program(), strict=True):
        torch.testing.assert_close(a, b)


def test_every_region_is_audited_however_fast_torch_alone_is() -> None:
    def loop() -> float:
        x = torch.ones(4)
        for _ in range(100):  # enough for a loop of tiny ops to be left to torch
            x = (x * 0.5 + 1).clamp(0, 3)
            x.sum().item()
        return float(x[0])

    before = LOG.counts["verified region"]
    with fused_eager(verify=1.0, cache="off", native="measured", compile="auto"):
        assert loop() == pytest.approx(2.0)
    assert LOG.counts["verified region"] >= before + 100


def test_a_wrong_op_is_named_with_its_line_and_replaced(broken: Callable[..., None]) -> None:
    broken("aten.sin.default", lambda x: x + 1e-3)
    out, told = verified(program)
    assert len(told) == 1
    assert told[0].startswith("aten.sin.default at ") and "test_verify.py" in told[0] and "by itself" in told[0]
    assert "20 of 20 elements differ, by up to 0.001" in told[0] and "float32[4, 5]" in told[0]
    for a, b in zip(out, program(), strict=True):
        assert torch.equal(a, b)
    event = LOG.of("mismatch")[-1]
    assert event.data["op"] == "aten.sin.default" and event.data["alone"] is True


def test_without_auditing_the_mistake_would_have_gone_through(broken: Callable[..., None]) -> None:
    broken("aten.sin.default", lambda x: x + 1e-3)
    out, told = verified(program, share=0.0)
    assert told == [] and not torch.allclose(out[1], program()[1], atol=1e-4)


def test_the_first_wrong_op_is_told(broken: Callable[..., None]) -> None:
    broken("aten.add.Tensor", lambda x: x * 1.01)
    _, told = verified(lambda: ((torch.ones(3, 3) + torch.eye(3)).sin() * 2).sum(0))
    assert told[0].startswith("aten.add.Tensor at ")


def test_whole_numbers_are_compared_exactly(broken: Callable[..., None]) -> None:
    broken("aten.bitwise_xor.Tensor", lambda x: x.at[0].add(1))
    _, told = verified(lambda: torch.arange(7).bitwise_xor(torch.full((7,), 5)) * 2)
    assert "1 of 7 elements differ" in told[0]


def test_the_script_shows_it_again(broken: Callable[..., None]) -> None:
    broken("aten.sin.default", lambda x: x + 1e-3)
    _, told = verified(program)
    path = re.search(r"python (\S+)$", told[0])
    assert path is not None
    # Here the mistake is this process's alone, so the script finds the two in agreement: it runs, and compares.
    done = subprocess.run([sys.executable, path[1]], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    wrong = subprocess.run(
        [sys.executable, "-c", f"source = open({path[1]!r}).read().replace('got = program', 'got = 2 + program')\n"
         f"exec(compile(source, {path[1]!r}, 'exec'), {{'__file__': {path[1]!r}}})"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert wrong.returncode == 1 and "not close" in wrong.stderr


def test_rounding_that_has_grown_is_no_mistake() -> None:
    def cancelling() -> torch.Tensor:
        torch.manual_seed(3)
        x = torch.randn(640, 64)
        return (x.exp().sum(0) - x.exp().flip(0).cumsum(0)[-1]) / 1e-6

    out, told = verified(cancelling)
    assert told == []
    assert not torch.allclose(out, cancelling(), rtol=1e-5)  # far apart, and yet only rounding


def test_a_program_that_raises_raises_as_ever() -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        verified(lambda: torch.arange(3.0)[torch.tensor([7, 1])] * 2)


def test_the_programs_random_numbers_are_untouched() -> None:
    def draw() -> torch.Tensor:
        torch.manual_seed(5)
        a = torch.rand(3)
        b = a * 2 + 1
        return torch.cat([b, torch.rand(3)])

    out, _ = verified(draw)
    assert torch.equal(out, draw())


def test_a_fraction_is_a_fraction() -> None:
    assert not verifying.is_due(0.0) and verifying.is_due(1.0)
    assert 50 < sum(verifying.is_due(0.1) for _ in range(1000)) < 200


@pytest.mark.parametrize("share", [-0.1, 1.5, "all"])
def test_only_fractions_are_allowed(share: object) -> None:
    with pytest.raises(OptionError, match="verify"):
        fused_eager(verify=share)
