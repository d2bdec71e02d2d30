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


@pytest.mark.slow
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


ON_EACH_DEVICE = """
import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests, onlyCPU
from torch.testing._internal.common_utils import TestCase

class TestThings(TestCase):
    def test_adds(self, device):
        assert (torch.ones(3, device=device) + 1).tolist() == [2.0, 2.0, 2.0]

    def test_is_at_home(self, device):
        assert torch.ones(3, device=device).is_cpu

    @onlyCPU
    def test_of_the_cpu(self, device):
        pass

instantiate_device_type_tests(TestThings, globals())
"""


@pytest.mark.slow
def test_on_a_device_a_test_is_compared_with_itself_on_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_each.py").write_text(ON_EACH_DEVICE)
    given = [str(tmp_path), "--device", "tpu", "--workers", "1"]
    assert command.main(given) == 1
    told = capsys.readouterr().out
    assert "test_each.py tpu, strict: 2 pass plain, 1 of them do not here" in told
    assert "test_each.py::TestThingsCPU::test_is_at_home_cpu" in told
    monkeypatch.setattr(accepted, "ON_DEVICE", (Accepted("*::test_is_at_home_cpu", "it is not", ("strict",)),))
    assert command.main(given) == 0


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("TestAPRIVATEUSE1::test_b_tpu_float32", "TestACPU::test_b_cpu_float32"),
        ("TestATPU::test_tpu_b_tpu", "TestACPU::test_cpu_b_cpu"),
        ("TestA::test_b", None),
    ],
)
def test_names_on_a_device(name: str, found: str | None) -> None:
    assert runs.as_on_the_cpu(name, "tpu") == found


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
