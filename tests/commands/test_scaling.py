"""`forecast --ranks`: a program runs as one rank of many, and its step on all of them is predicted."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fused_eager.commands import forecasting
from fused_eager.commands.link_times import LARGE, SMALL, fitted
from fused_eager.commands.scaling import CannotScale, arguments_for, numbers

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group()
batch, kind = int(sys.argv[1]), sys.argv[2]
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).to("tpu")
model = torch.nn.parallel.DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(20):
    model(torch.ones(batch, 64, device="tpu")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_numbers_of_ranks() -> None:
    assert numbers("64,8,8") == [8, 64]
    for wrong in ("", "eight", "0,8"):
        with pytest.raises(argparse.ArgumentTypeError, match="no numbers of ranks"):
            numbers(wrong)


def test_what_is_not_for_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    for given in (["--target", "v5e:2x2"], ["--html", "page.html"], ["--valueless"]):
        with pytest.raises(SystemExit):
            forecasting.main(["--ranks", "8", *given, "train.py"], "forecast")
        assert f"{given[0]} is not for --ranks" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        forecasting.main(["train.py"], "forecast")
    assert "give --target, or --ranks" in capsys.readouterr().err
    assert forecasting.main(["--ranks", "8", "--link", "string", __file__], "forecast") == 2
    assert "no link 'string'; known are gloo, " in capsys.readouterr().err


def test_work_that_is_divided_among_the_ranks() -> None:
    assert arguments_for(["--batch", "{512/ranks}", "--steps=9"], 8) == ["--batch", "64", "--steps=9"]
    with pytest.raises(CannotScale, match="512 cannot be divided among 3 ranks"):
        arguments_for(["{512/ranks}"], 3)


def test_a_link_from_what_two_sizes_take() -> None:
    found = fitted(20e-6 + SMALL / 1e9, 20e-6 + LARGE / 1e9)
    assert found.alpha == pytest.approx(10e-6) and found.bandwidth == pytest.approx(1e9)
    assert found.seconds("allreduce_", LARGE, 2) == pytest.approx(20e-6 + LARGE / 1e9)


@pytest.mark.slow
def test_a_program_on_more_ranks_than_there_are(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)

    def rows(*given: str) -> list[dict[str, float]]:
        out = subprocess.run(
            [sys.executable, "-m", "fused_eager", "forecast", "--json", "--link", "1000,1", *given],
            cwd=ROOT, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert out.returncode == 0, out.stderr[-3000:]
        found = json.loads(out.stdout)
        assert found["predicted"]
        return list(found["rows"])

    ddp, many = rows("--ranks", "4,64", str(script), "8", "ddp")
    # One bucket, of 2 x (64 x 64 + 64) numbers: with 2 x 3 and 2 x 63 messages of a millisecond.
    assert ddp["collectives"] == many["collectives"] == 1 and ddp["bytes"] == 33280
    assert ddp["sending"] == pytest.approx(6e-3, rel=0.02) and many["sending"] == pytest.approx(126e-3, rel=0.02)
    assert many["waiting"] > ddp["waiting"] and many["seconds"] > 0.1
    sharded = rows("--ranks", "4", str(script), "{32/ranks}", "fsdp")[0]
    assert sharded["collectives"] >= 2
