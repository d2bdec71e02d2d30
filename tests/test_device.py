"""The device: its tests, each suite in a process that has it, in every mode, cold and with the cache full."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
# The ops have a test of their own, which runs them in each mode.
SUITES = tuple(sorted({path.stem[len("test_") :] for path in (ROOT / "tests/device").glob("test_*.py")} - {"ops"}))
MODES = ("fused", "strict", "debug")


def quick(names: tuple[str, ...], *slow: str) -> list[Any]:
    """Parameters for all of them, some of which are for the full run."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in names]


PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--confcutdir=tests/device")


def run_suite(names: str, folder: Path, *arguments: str, **environment: str) -> None:
    """Run files of tests/device in a process of their own."""
    given = {"TESTS_ON_DEVICE": "1", "FUSED_EAGER_CACHE": "", "FUSED_EAGER_CACHE_DIR": str(folder), **environment}
    done = subprocess.run(
        [*PYTEST, *[f"tests/device/test_{name}.py" for name in names.split()], *(arguments or ("-m", "not slow"))],
        cwd=ROOT,
        env={**os.environ, "FUSED_EAGER_PROGRESS": "0", "OMP_NUM_THREADS": "1", **given},
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that the first run fills for the second."""
    return tmp_path_factory.mktemp("cache")


# Those for every change share a process: starting one takes as long as half of their tests.
EACH_TIME = "attention backend compiler flex following growing tensors training"


@pytest.mark.parametrize("names", quick((EACH_TIME, *SUITES), *SUITES))
def test_fused_on_four_devices(names: str, tmp_path: Path) -> None:
    run_suite(names, tmp_path, FUSED_EAGER_DEVICES="4")


@pytest.mark.parametrize("mode", quick(MODES, "fused", "debug"))
@pytest.mark.parametrize("name", quick(("donation", "training", "random"), "training", "random"))
def test_each_mode_cold_and_warm(name: str, mode: str, tmp_path: Path) -> None:
    if name == "random" and mode == "fused":
        return  # it goes through the modes itself
    run_suite(name, tmp_path, FUSED_EAGER_MODE=mode, FUSED_EAGER_FOLLOWER="python")
    run_suite(name, tmp_path, FUSED_EAGER_MODE=mode)


@pytest.mark.parametrize("mode", ["strict", pytest.param("fused", marks=pytest.mark.slow)])
def test_every_op(mode: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    whole = () if "not slow" in request.config.option.markexpr else ("-m", "slow or not slow")
    run_suite("ops", tmp_path, *whole, FUSED_EAGER_MODE=mode)


def test_importing_the_library_gives_no_device() -> None:
    source = "import fused_eager, torch; print(torch._C._get_privateuse1_backend_name(), hasattr(torch, 'tpu'))"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["privateuseone", "False"], done.stderr


def test_a_program_is_given_the_device_without_an_import(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import torch\nprint((torch.ones(2, device='tpu') + 1).tolist())\n")
    done = subprocess.run(
        [sys.executable, "-m", "fused_eager", "run", "--device", "tpu", "--mode", "strict", str(script)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "[2.0, 2.0]\n" and "tpu: 1 device, simulated by the CPU" in done.stderr


RANK = """
import os, torch
torch.tpu.set_device(int(os.environ["LOCAL_RANK"]))
print(torch.ones(2, device="tpu").device, torch.tpu.device_count())
torch.tpu.set_device(3)
"""


def test_a_rank_may_take_the_device_of_its_number(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(RANK)
    done = subprocess.run(
        [sys.executable, "-m", "fused_eager", "run", "--device", "tpu", str(script)],
        env={**os.environ, "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout == "tpu:2 3\n", done.stderr
    assert "there is no device 3: there are 3 (0 to 2)" in done.stderr and "FUSED_EAGER_DEVICES" in done.stderr


def test_as_many_devices_stand_in_as_jax_was_told() -> None:
    source = "import fused_eager.tpu, torch; print(torch.tpu.device_count())"
    for own in ({"JAX_NUM_CPU_DEVICES": "3"}, {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}):
        done = subprocess.run(
            [sys.executable, "-c", source], env={**os.environ, "LOCAL_WORLD_SIZE": "2", **own},
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.stdout == "3\n", done.stderr


LOADER = """
import os, warnings, torch
warnings.simplefilter("always")
loader = torch.utils.data.DataLoader(torch.arange(4.0), batch_size=2, num_workers=1)
print(sum((batch.to("tpu") * 2).sum().item() for batch in loader))
if os.fork() == 0:
    warnings.warn("seen in the child")
    os._exit(0)
os.wait()
"""


def test_a_program_with_loaders_and_a_report_says_nothing_of_forks(tmp_path: Path) -> None:
    script, log = tmp_path / "program.py", tmp_path / "run.jsonl"
    script.write_text(LOADER)
    done = subprocess.run(
        [sys.executable, "-m", "fused_eager", "run", "--device", "tpu", str(script)],
        env={**os.environ, "FUSED_EAGER_REPORT": str(log)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "12.0\n" and "seen in the child" in done.stderr
    # What JAX says. What Python itself says of threads since 3.12 it says in eager as well.
    assert "JAX is multithreaded" not in done.stderr, done.stderr
    kinds = [json.loads(line)["kind"] for line in log.read_text().splitlines()]
    assert kinds[0] == "start" and {"open", "plan", "flush", "compile", "end"} <= set(kinds)
