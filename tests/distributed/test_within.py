"""Ranks that are threads of one process: programs for several processes run unmodified, and what goes wrong is told."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .test_suites import ROOT, SUITES, of_suites

# What torch saves in a thread of its own calls collectives there.
NOT_WITHIN = {"wider": {"saved_in_the_background_and_loaded"}, "further": {"saved_while_it_goes_on"}}
WITHIN = ["-m", "fused_eager", "run", "--device", "tpu", "--ranks-in-process"]


def environment(folder: Path, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FUSED_EAGER_") or k == "FUSED_EAGER_FOLLOWER"}
    (folder / "cache").mkdir(mode=0o700, exist_ok=True)
    own = {"FUSED_EAGER_CACHE_DIR": str(folder / "cache"), "FUSED_EAGER_PROGRESS": "0", "OMP_NUM_THREADS": "1"}
    return {**kept, **own, **more}


def expected(suite: str, folder: Path, world: int) -> None:
    """Have processes leave what each program comes to in plain torch."""
    command = [sys.executable, "-m", "tests.distributed.suites.within", str(folder), suite, "cpu"]
    processes = []
    for rank in range(world):
        env = environment(folder, RANK=f"{rank}", WORLD_SIZE=f"{world}")
        processes.append(subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE))
    try:
        for process in processes:
            _, said = process.communicate(timeout=200)
            assert process.returncode == 0, said.decode()[-3000:]
    finally:
        for process in processes:
            process.kill()


def check(suite: str, folder: Path, world: int, *by: str, **more: str) -> None:
    expected(suite, folder, world)
    command = [*WITHIN, f"{world}", "-m", "tests.distributed.suites.within", str(folder), suite, "tpu", *by]
    out = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT, env=environment(folder, **more), capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr[-4000:]
    for rank in range(world):
        said = json.loads((folder / f"{suite}.{rank}.json").read_text())
        wrong = {name: text for name, text in said.items() if text and name not in NOT_WITHIN.get(suite, ())}
        assert not wrong and len(said) == SUITES[suite], f"rank {rank}: {json.dumps(wrong, indent=1)}"


@of_suites("each")
def test_programs_for_processes_come_to_the_same(suite: str, tmp_path: Path) -> None:
    check(suite, tmp_path, 4)


@of_suites("each")
def test_collectives_inside_xla_come_to_the_same(suite: str, tmp_path: Path) -> None:
    check(suite, tmp_path, 4, "xla")


@pytest.mark.parametrize("mode", ["fused", "strict"])
def test_what_xla_has_not_between_devices_the_host_does(mode: str, tmp_path: Path) -> None:
    out = subprocess.run(
        [sys.executable, *WITHIN, "4", "-m", "tests.distributed.across"],
        cwd=ROOT, env=environment(tmp_path, FUSED_EAGER_MODE=mode), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr[-4000:]
    assert sorted(out.stdout.splitlines()) == [f"rank {rank} has all" for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["strict", "debug", "off"])
def test_in_each_mode(mode: str, tmp_path: Path) -> None:
    check("training", tmp_path, 2, FUSED_EAGER_MODE=mode)


def run(case: str, folder: Path) -> Any:
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    (folder / "port").write_text(str(port))
    command = [sys.executable, *WITHIN, "4", "-m", "tests.distributed.within", case, str(folder)]
    return subprocess.run(command, cwd=ROOT, env=environment(folder), capture_output=True, text=True, timeout=120)


def test_all_ways_to_wait_and_what_is_each_ranks_own(tmp_path: Path) -> None:
    out = run("fine", tmp_path)
    assert out.returncode == 0, out.stderr[-4000:]
    assert sorted(out.stdout.splitlines()) == [f"rank {rank} has {[16.0] * 4}" for rank in range(4)]


@pytest.mark.parametrize(
    ("case", "code", "words"),
    [
        ("throws", 1, ("rank 0: RankLost: rank 2 has raised ValueError: a bad batch", "within.py:", "in throws")),
        ("leaves", 3, ("rank 3: RankLost: rank 2 has raised SystemExit: 3",)),
        ("ends_early", 1, ("rank 2 has come to the end of its program", "waits in all_reduce")),
        ("differs", 1, ("differ in collective number 2", "broadcast((float32[4]), root 0)", "allreduce((float32")),
        ("differs_in_shape", 1, ("float32[4]", "CollectivesDiffer")),
        ("wait_in_a_circle", 1, ("the ranks wait for one another: rank 0 waits in recv at",)),
        ("cannot_be_reduced", 1, ("a reduction of bits is not for torch.float32",)),
        ("thread", 1, ("called in a thread that is no rank",)),
    ],
)
def test_what_goes_wrong_is_told(case: str, code: int, words: tuple[str, ...], tmp_path: Path) -> None:
    out = run(case, tmp_path)
    assert out.returncode == code, out.stderr[-4000:]
    assert all(word in out.stderr for word in words), out.stderr[-4000:]
    assert " has [" not in out.stdout


def test_a_process_may_spawn_again(tmp_path: Path) -> None:
    out = subprocess.run(
        [sys.executable, "-m", "tests.distributed.spawned"],
        cwd=ROOT, env=environment(tmp_path, FUSED_EAGER_DEVICES="3"), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert out.returncode == 0 and out.stdout.endswith("done\n"), out.stderr[-4000:]


def test_an_interrupt_ends_ranks_that_never_wait(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.distributed.spawned", "interrupt"]
    env = environment(tmp_path, FUSED_EAGER_DEVICES="2")
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"running\n"
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(30) in (-signal.SIGINT, 130)
        finally:
            process.kill()


def test_what_is_refused(tmp_path: Path) -> None:
    out = subprocess.run(
        [sys.executable, "-m", "fused_eager", "run", "--ranks-in-process", "2", "-c"],
        cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert out.returncode == 2 and "--device" in out.stderr
