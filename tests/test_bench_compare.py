"""Two runs of the benchmarks are compared: what moved beyond noise is told from what did not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import compare, main, render


def run(machine: str = "one", **ratios: tuple[float, float] | str) -> dict[str, Any]:
    def timing(figure: tuple[float, float] | str) -> dict[str, Any]:
        if isinstance(figure, str):
            return {"ratio": None, "ratio_spread": None, "failure": figure}
        return {"ratio": figure[0], "ratio_spread": figure[1], "failure": ""}

    rows = [
        {"workload": name, "timings": {"eager": timing((1.0, 0.0)), "fused": timing(figure)}}
        for name, figure in ratios.items()
    ]
    return {"settings": {"machine": machine}, "rows": rows}


OLD = run(a=(1.0, 0.02), b=(1.0, 0.02), c=(1.0, 0.3), d=(0.5, 0.0), e=(0.9, 0.1), g="wrong results")
NEW = run(machine="two", a=(1.2, 0.02), b=(0.7, 0.02), c=(1.2, 0.1), d=(0.51, 0.0), f=(0.9, 0.1), g=(1.0, 0.1))


def test_what_moved_beyond_noise_is_told() -> None:
    rows, missing = compare(OLD, NEW)
    assert {row.workload: row.is_beyond_noise for row in rows} == {"a": True, "b": True, "c": False, "d": False}
    assert missing == [
        "e, fused: has a figure before, not measured after",
        "g, fused: wrong results before, has a figure after",
        "f, fused: not measured before, has a figure after",
    ]


def test_the_slowest_comes_first_and_other_settings_are_named() -> None:
    lines = render(OLD, NEW).splitlines()
    assert lines[0] == "machine: one before, two after"
    assert lines[3].startswith("| a | fused | 1.00 (0.02) | 1.20 (0.02) | slower by 20%")
    assert lines[4].startswith("| b |") and lines[4].endswith("faster by 30% |")
    assert lines[-1] == "2 of 4 rows moved beyond noise"


def test_files_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old.json").write_text(json.dumps(OLD))
    (tmp_path / "none.json").write_text("[]")
    assert main([str(tmp_path / "old.json"), str(tmp_path / "old.json")]) == 0
    assert "0 of 5 rows moved" in capsys.readouterr().out
    for name in ("none.json", "gone.json"):
        assert main([str(tmp_path / "old.json"), str(tmp_path / name)]) == 2
        assert name in capsys.readouterr().err
