"""`bug-report`: what is in the file, whatever became of the program, and that its programs run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROGRAM = """
import ctypes
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
secret = torch.tensor([[0.123456789] * 8] * 2)
optimizer.zero_grad()
torch.nn.functional.cross_entropy(model(secret), torch.tensor([1, 2])).backward()
optimizer.step()
z = torch.fft.fft(secret).conj().imag
z[1:, ::2].mul_(2)
print(z.sum().item())
if sys.argv[1] == "ends":
    torch.arange(4)[torch.tensor([7])].tolist()
ctypes.string_at(0)
"""


def report(tmp_path: Path, *argv: str, **kwargs: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fused_eager", "bug-report", *argv]
    environment = {**os.environ, **kwargs}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("how", "ended"), [("ends", "exit code 1"), pytest.param("dies", "signal 11", marks=pytest.mark.slow)]
)
def test_a_report_has_what_is_needed_and_no_value(tmp_path: Path, how: str, ended: str) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    done = report(tmp_path, "--to", "it.zip", "--mode", "fused", "train.py", how, MY_TOKEN="hunter2")
    assert done.returncode == 0, done.stderr
    assert ended in done.stdout
    with zipfile.ZipFile(tmp_path / "it.zip") as made:
        texts = {name: made.read(name).decode() for name in made.namelist()}
    streams = {name: text for name, text in texts.items() if name.startswith("streams/")}
    assert set(texts) - set(streams) == {
        "README.txt", "doctor.txt", "doctor.json", "options.txt", "run.txt", "report.txt", "events.jsonl",
    }  # fmt: skip
    assert ended in texts["run.txt"]
    assert how != "ends" or "IndexError" in texts["run.txt"]
    everything = "".join(texts.values())
    for private in (str(tmp_path), "hunter2", "0.12345"):
        assert private not in everything
    kinds = {json.loads(line)["kind"] for line in texts["events.jsonl"].splitlines()}
    assert {"start", "flush"} <= kinds
    assert any("aten._foreach_" in text for text in streams.values())
    # Each is a program that computes the same in both ways; here they share a process.
    for name, text in streams.items():
        (tmp_path / Path(name).name).write_text(text)
    names = [Path(name).name for name in streams]
    each = "import runpy, sys\nfor name in sys.argv[1:]:\n    runpy.run_path(name, run_name='__main__')"
    ran = subprocess.run(
        [sys.executable, "-c", each, *names], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    said = ran.stdout.splitlines()
    assert len(said) == len(names) and all(line.startswith("0 of ") for line in said), ran.stdout


@pytest.mark.slow
def test_a_program_that_hangs_is_ended(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text("import time, torch\n(torch.ones(3) + 1).tolist()\ntime.sleep(600)\n")
    done = report(tmp_path, "--seconds", "15", "hangs.py")
    assert done.returncode == 0, done.stderr
    assert "its end, after 15 s" in done.stdout
    with zipfile.ZipFile(tmp_path / "fused-eager-bug.zip") as made:
        assert sum(name.startswith("streams/") for name in made.namelist()) >= 1


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "name a program"),
        (("--to", "there.zip", "x.py"), "there is a file 'there.zip' already"),
        (("--to", "nowhere/it.zip", "x.py"), "there is no folder 'nowhere'"),
        (("missing.py",), "there is no file 'missing.py'"),
    ],
)
def test_what_cannot_be_done_is_said(tmp_path: Path, argv: tuple[str, ...], words: str) -> None:
    (tmp_path / "there.zip").write_text("")
    done = report(tmp_path, *argv)
    assert done.returncode == 2
    assert words in done.stderr
    assert not (tmp_path / "fused-eager-bug.zip").exists()
