"""The comparison with a GPU's own PyTorch runs without one, believes no wrong result, and says what failed."""

from __future__ import annotations

import json
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import gpu
from benchmarks.measure import Timing

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_both_sides_run_in_processes_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gpu.json"
    given = ["mlp", "--beside", "cpu", "--tiny", "--rounds", "1", "--block", "0.01", "--systems", "eager,fused"]
    assert gpu.main([*given, "--json", str(file)]) == 0
    assert "mlp_adam_foreach" in capsys.readouterr().out
    (row,) = json.loads(file.read_text())["rows"]
    assert row["timings"]["fused"]["ratio"] > 0 and row["timings"]["fused"]["difference"] < 1e-3


def test_a_workload_has_the_cpus_numbers_wherever_it_is_set_up() -> None:
    def made(place: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        with place:
            layer = nn.Linear(3, 2)
            tensors = [layer.weight, layer.bias, torch.randn(4), torch.randint(9, (2,))]
        return [t.detach() for t in tensors]

    for ours, plain in zip(made(gpu._placed("cpu")()), made(nullcontext()), strict=True):
        assert torch.equal(ours, plain)


def test_other_results_and_failures_have_no_ratio(tmp_path: Path) -> None:
    workload, timing = gpu.GPU_ROWS[0], Timing(seconds=2.0)
    for name, value in (("eager", 1.0), ("fused", 1.0), ("strict", 1.5)):
        torch.save([torch.full((2,), value)], tmp_path / f"{workload.name}.{name}.pt")
    plain = Timing(seconds=4.0)
    assert gpu.related(workload, "fused", timing, plain, tmp_path).ratio == 0.5
    assert gpu.related(workload, "strict", timing, plain, tmp_path).failure == "wrong results: off by 0.5"
    assert gpu.related(workload, "fused", timing, Timing(failure="no memory"), tmp_path) is timing


def test_what_is_not_known_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--systems", "eager,magic"])
    assert "no system is called 'magic'; known: eager, inductor, fused, strict" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="nothing"):
        gpu.main(["nothing"])


def test_the_script_for_a_machine_with_a_gpu_is_one() -> None:
    subprocess.run(["sh", "-n", str(ROOT / "benchmarks/gpu.sh")], check=True)
