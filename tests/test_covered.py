"""The table that `make coverage` prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.covered import main


def test_lines_are_added_up_by_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "fused_eager/errors.py": (3, 4),
        "fused_eager/devices/home.py": (1, 2),
        "fused_eager/devices/host/heap.py": (2, 2),
        "cache/store.py": (0, 0),
    }
    report = {
        "files": {
            name: {"summary": {"covered_lines": ran, "num_statements": lines}} for name, (ran, lines) in files.items()
        }
    }
    file = tmp_path / "coverage.json"
    file.write_text(json.dumps(report))
    assert main(str(file)) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["0%", "0", "lines", "cache"],
        ["75%", "4", "lines", "fused_eager"],
        ["75%", "4", "lines", "fused_eager/devices"],
        ["75%", "8", "lines", "in", "all"],
    ]
