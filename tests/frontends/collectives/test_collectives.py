"""Collectives of a device's tensors, on real ranks: reductions, dtypes, groups, and what a lost rank does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def ranks(suite: str, folder: Path, world: int = 2, **environment: str) -> list[dict[str, Any] | None]:
    """What each rank says; None of one that was killed."""
    processes = []
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FUSED_EAGER_")}
    given = {"FUSED_EAGER_CACHE_DIR": str(folder / "cache"), "FUSED_EAGER_PROGRESS": "0", "FUSED_EAGER_DEVICES": "1"}
    given |= {"OMP_NUM_THREADS": "1", "WORLD_SIZE": f"{world}"}
    for rank in range(world):
        command = [sys.executable, "-m", "tests.frontends.collectives.ranks"]
        processes.append(
            subprocess.Popen(
                [*command, str(folder / "store"), suite],
                cwd=ROOT,
                env={**kept, "RANK": f"{rank}", **given, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said: list[dict[str, Any] | None] = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=400)
            if process.returncode == -9:
                said.append(None)
                continue
            assert process.returncode == 0, out[-2000:] + err[-5000:]
            said.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    (folder / "store").unlink(missing_ok=True)
    return said


def wrong(said: list[dict[str, Any] | None]) -> list[str]:
    return [f"rank {r}: {name}: {text}" for r, of in enumerate(said) for name, text in (of or {}).items() if text]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_reduction_and_dtype_is_what_it_is_computed_to_be(world: int, tmp_path: Path) -> None:
    said = ranks("table", tmp_path, world)
    assert wrong(said) == []
    assert all(len(of or {}) == 6 for of in said)


LATER = [pytest.param(*row, marks=pytest.mark.slow) for row in ((4, "fused"), (2, "strict"), (4, "debug"))]


@pytest.mark.parametrize(("world", "mode"), [(2, "fused"), *LATER])
def test_a_group_that_knows_its_device_is_split_and_takes_several_together(
    world: int, mode: str, tmp_path: Path
) -> None:
    """Making a mesh of it raised that gloo's options cannot be copied."""
    said = ranks("groups", tmp_path, world, FUSED_EAGER_MODE=mode)
    assert wrong(said) == []
    assert all(len(of or {}) == 4 for of in said)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_the_examples_learn_on_the_device_what_they_learn_on_the_cpu(name: str, tmp_path: Path) -> None:
    """With the CPU's random numbers, so that dropout drops the same."""
    learned = []
    for device in ("cpu", "tpu"):
        file = tmp_path / f"{device}.json"
        own = {"FUSED_EAGER_RNG": "torch_cpu", "FUSED_EAGER_DEVICES": "1", "FUSED_EAGER_PROGRESS": "0"}
        subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
                *(() if device == "cpu" else ("-m", "fused_eager", "run", "--device", "tpu")),
                *(f"examples/train_gpt_{name}.py", "--device", device, "--losses", str(file), "--sample", "0"),
                *("--steps", "6", "--layers", "2", "--dim", "32", "--seq", "16", "--batch", "4"),
            ],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "FUSED_EAGER_CACHE_DIR": str(tmp_path / "cache"), **own},
            check=True,
            timeout=400,
        )
        learned.append(json.loads(file.read_text()))
    assert learned[0][-1] < learned[0][0]
    assert learned[1] == pytest.approx(learned[0], rel=1e-3)


@pytest.mark.slow
def test_a_group_without_a_named_backend_serves_the_device(tmp_path: Path) -> None:
    said = ranks("default", tmp_path)
    assert wrong(said) == [] and len(said) == 2


def test_what_goes_wrong_is_raised_on_every_rank_that_is_left(tmp_path: Path) -> None:
    said = ranks("faults", tmp_path)
    assert said[0] is not None
    assert wrong(said[:1]) == [] and said[-1] is None
    assert wrong(said) == [] and len(said[0]) == 5
