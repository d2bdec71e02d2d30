"""What more of everything costs is measured, each size in a process of its own, and printed as a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import scale


def test_an_axis_is_measured_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert scale.main(["stream", "--most", "100", "--json", str(tmp_path / "found.json")]) == 0
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("| ops in one stream, us an op | 100: ")
    assert float(row.split("100: ")[1].rstrip(" |")) > 0
    assert '"100"' in (tmp_path / "found.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("axis", scale.AXES)
def test_each_axis_is_measured(axis: str) -> None:
    assert scale.measured(axis, scale.AXES[axis].sizes[0]) > 0


def test_an_axis_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        scale.main(["width"])
    assert "there is no axis 'width'; there are stream, tensors" in capsys.readouterr().err


def test_what_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scale.AXES, "none", scale.AXES["stream"])
    with pytest.raises(RuntimeError, match=r"(?s)none at 3: .*KeyError"):
        scale.measured("none", 3)
