"""Advice on programs with one fault each: it is found there, gone once that is cured, and gains what it claimed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fused_eager.targets import topology

from .advice import PROGRAMS, figures

# What is gained only where ops are fused: one op at a time, the one-hot rows are written out and read again.
IN_FUSED = {"lookup"}
NO_TIME = {"rounding", "island", "recompiles"}


@pytest.mark.slow
@pytest.mark.skipif(bool(topology.obstacle()), reason=topology.obstacle() or "it is there")
@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_fault_is_found_and_its_cure_gains_what_was_claimed(kind: str, tmp_path: Path) -> None:
    before, after = (figures(kind, cured, tmp_path) for cured in (False, True))
    assert not before.failed and not after.failed
    found = before.advice[kind]
    assert f"{kind}.py:" in found["line"] and kind not in after.advice
    if kind in NO_TIME:
        assert found["seconds"] == 0
        return
    mode = "fused" if kind in IN_FUSED else "strict"
    gained = before.seconds[mode] - after.seconds[mode]
    assert 0.4 * gained < found["seconds"] < 2.5 * gained
