"""`export` on the command line: torch's own file becomes a folder, and what is wrong is said in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fused_eager import Exported
from fused_eager.commands.cli import main

pytest.importorskip("flatbuffers", reason="JAX writes programs with it (the extra `export`)")


def test_a_file_of_torchs_becomes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, x = torch.nn.Linear(4, 2), torch.randn(3, 4)
    batch = {0: torch.export.Dim("batch")}
    torch.export.save(torch.export.export(model, (x,), dynamic_shapes=(batch,)), tmp_path / "net.pt2")
    assert main(["export", str(tmp_path / "net.pt2"), str(tmp_path / "net"), "--platforms", "cpu"]) == 0
    assert "float32" in capsys.readouterr().out
    for n in (1, 3, 8):
        x = torch.randn(n, 4)
        torch.testing.assert_close(Exported(tmp_path / "net")(x), model(x).detach())


@pytest.mark.parametrize("more", [["--target", "v5f:2x2"], ["--platforms", "abacus"], ["--weights", "elsewhere"]])
def test_what_is_wrong_is_said(more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.export.save(torch.export.export(torch.nn.Linear(4, 2), (torch.randn(3, 4),)), tmp_path / "net.pt2")
    assert main(["export", str(tmp_path / "net.pt2"), str(tmp_path / "net"), *more]) == 1
    assert more[1] in capsys.readouterr().err
    assert main(["export", str(tmp_path / "no.pt2"), str(tmp_path / "net")]) == 1
