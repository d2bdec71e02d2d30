"""The runner, on files of a few lines that stand for PyTorch's: what differs is found, named and judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import __main__ as command
from . import accepted, runs
from .accepted import Accepted

# One that passes everywhere, one that a context changes, one that fails anyway, and one that ends its process.
FILE = """
import os
import torch
from torch.testing._internal.common_cuda import tf32_on_and_off

class TestOps:
    @tf32_on_and_off()
    def test_adds(self):
        assert (torch.ones(3) + 1).tolist() == [2.0, 2.0, 2.0]

    def test_counts_modes(self):
        assert torch._C._len_torch_dispatch_stack() == 0, "a mode is there"

    def test_fails(self):
        assert False

    def test_dies(self):
        if torch._C._len_torch_dispatch_stack():
            os._exit(3)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("of_torch")
    (folder / "test_few.py").write_text(FILE)
    return folder


@pytest.fixture(autouse=True)
def kept(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.getbasetemp() / "kept"
    monkeypatch.setattr(runs, "KEPT", folder)
    return folder


def test_what_differs_is_named_and_judged(
    folder: Path, kept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.main([str(folder), "--modes", "strict", "--workers", "1"]) == 1
    told = capsys.readouterr().out
    assert "test_few.py strict: 3 pass plain, 2 of them do not here" in told
    assert "test_few.py::TestOps::test_counts_modes | AssertionError: a mode is there" in told
    assert "test_few.py::TestOps::test_dies" in told
    assert "upstream strict: 1 of 3 pass (33.33%), 0 differ as accepted, 2 not" in told
    assert len(list(kept.iterdir())) == 1  # what passes plain is not run again
    rows = (Accepted("*::test_counts_modes", "it counts modes"), Accepted("*::test_dies", "it ends", ("strict",)))
    monkeypatch.setattr(accepted, "ACCEPTED", rows)
    assert command.main([str(folder), "--modes", "strict", "--workers", "1", "--select", "counts or adds"]) == 0
    assert "| it counts modes" in capsys.readouterr().out


def test_a_row_holds_for_the_modes_that_it_names() -> None:
    row = Accepted("test_a.py::*::test_b*", "why", ("strict",))
    assert row.covers("test_a.py::TestC::test_b_cpu", "strict")
    assert not row.covers("test_a.py::TestC::test_b_cpu", "wait")
    assert not row.covers("test_a.py::TestC::test_c", "strict")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--modes", "fast"], "there is no mode 'fast'; allowed are default, wait"),
        (["--files", "test_none.py"], "no test files"),
    ],
)
def test_bad_arguments_are_named(
    folder: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main([str(folder), *arguments])
    assert said in capsys.readouterr().err
