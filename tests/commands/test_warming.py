"""`warm`: a program's regions for chips that are not here, in the cache; what it cannot do, it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fused_eager.cache import Key, generate

from fused_eager.commands import forecasting, launch, meeting, warming
from fused_eager.compiling.caching import Keeper
from fused_eager.compiling.cross import Cost, Crossed, Refusal
from fused_eager.compiling.key_text import packed
from fused_eager.compiling.met import Met
from fused_eager.config import resolve
from fused_eager.targets import topology
from fused_eager.targets.target import Target

PROGRAM = """
import sys, torch
w = torch.ones(64, 64, device="tpu", requires_grad=True)
optimizer = torch.optim.SGD([w], lr=0.1)
for step in range(9):
    ((w @ w).relu().sum() / 64).backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, w.sum().item())
"""


@pytest.fixture
def a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache in a folder, and no look at whether the target's compiler is there."""
    monkeypatch.setattr(warming, "obstacle", lambda: "")
    monkeypatch.setenv("FUSED_EAGER_CACHE", "")
    monkeypatch.setenv("FUSED_EAGER_CACHE_DIR", str(tmp_path / "cache"))


def warm(program: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    script = folder / "program.py"
    script.write_text(program)
    command = [sys.executable, "-m", "fused_eager", "warm", "--target", "v5e:2x2", *options, str(script)]
    environ = {**os.environ, "FUSED_EAGER_CACHE": "", "FUSED_EAGER_CACHE_DIR": str(folder / "cache")}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=500)


@pytest.mark.skipif(bool(topology.obstacle()), reason=topology.obstacle() or "it is there")
def test_what_a_program_meets_is_compiled_once_whether_it_has_values_or_not(tmp_path: Path) -> None:
    first = warm(PROGRAM, tmp_path, "--json", "--jobs", "1")
    assert first.returncode == 0, first.stderr
    done = json.loads(first.stdout)
    assert done["regions"] == done["made"] >= 1 and not done["failed"] and done["bytes"] > 10_000
    assert "2 " not in [line[:2] for line in first.stderr.splitlines()], "it went on after its third step"
    second = warm(PROGRAM, tmp_path, "--json", "--jobs", "1", "--valueless")
    again = json.loads(second.stdout)
    assert again["hits"] == again["regions"] == done["regions"] and again["made"] == 0, second.stderr


@pytest.mark.skipif(bool(topology.obstacle()), reason=topology.obstacle() or "it is there")
def test_a_log_of_another_run_warms_as_the_program_does(tmp_path: Path) -> None:
    script, log = tmp_path / "program.py", tmp_path / "run.jsonl"
    script.write_text("import fused_eager; fused_eager.register()\n" + PROGRAM)
    here = {"FUSED_EAGER_CACHE": "", "FUSED_EAGER_CACHE_DIR": str(tmp_path / "of that run")}
    environ = {**os.environ, **here, "FUSED_EAGER_REPORT": str(log), "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run([sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr
    first = warm_from(tmp_path, log)
    assert first.returncode == 0, first.stderr
    done = json.loads(first.stdout)
    assert done["regions"] == done["made"] >= 1 and not done["failed"]
    again = json.loads(warm_from(tmp_path, log).stdout)
    assert again["hits"] == again["regions"] == done["regions"] and again["made"] == 0
    # And they are what the program itself meets.
    met = json.loads(warm(PROGRAM, tmp_path, "--json", "--jobs", "1").stdout)
    assert met["hits"] == met["regions"] >= 1 and met["made"] == 0


def warm_from(folder: Path, log: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fused_eager", "warm", "--target", "v5e:2x2", "--jobs", "1", "--json"]
    environ = {**os.environ, "FUSED_EAGER_CACHE": "", "FUSED_EAGER_CACHE_DIR": str(folder / "cache")}
    return subprocess.run(
        [*command, "--from-log", str(log)], env=environ, capture_output=True, text=True, timeout=500
    )


@pytest.mark.slow
@pytest.mark.skipif(bool(topology.obstacle()), reason=topology.obstacle() or "it is there")
def test_a_forecast_of_each_mode(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "fused_eager", "forecast", "--target", "v5e:2x2", "--json", str(script)]
    environ = {**os.environ, "FUSED_EAGER_CACHE": "", "FUSED_EAGER_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    modes = {mode["name"]: mode for mode in told["modes"]}
    assert list(modes) == ["strict", "fused", "whole"] and not told["failed"]
    assert modes["strict"]["launches"] > modes["fused"]["launches"] >= modes["whole"]["launches"] >= 1
    assert modes["fused"]["memory"] >= 4 * 64 * 64 and modes["fused"]["flops"] >= 3 * 2 * 64**3
    assert any(line.endswith("program.py:6") for line in told["lines"])


def test_without_its_compiler_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warming, "obstacle", lambda: "libtpu is not installed (pip install 'fused-eager[tpu]')")
    assert warming.main(["--target", "v5e:2x2", "x.py"], "warm") == 2
    assert "pip install 'fused-eager[tpu]'" in capsys.readouterr().err


@pytest.mark.parametrize("command", [warming.main, forecasting.main])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--jobs", "0", "x.py"], "argument --jobs: '0' is not a whole number from 1 on"),
        (["--steps", "-1", "x.py"], "argument --steps: '-1' is not a whole number from 0 on"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(
    command: Callable[[list[str], str], int], arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command(["--target", "v5e:2x2", *arguments], "it")
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (warming.main, ["--target", "v5e:2x2"]),
        (forecasting.main, ["--target", "v5e:2x2"]),
        (forecasting.main, ["--target", "v5e:2x2", "--mesh", "data=2,model=2", "--split", "8=data"]),
        (forecasting.main, ["--ranks", "2", "--link", "dcn"]),
    ],
)
@pytest.mark.usefixtures("a_cache")
def test_a_program_that_is_not_there_is_named(
    command: Callable[[list[str], str], int], arguments: list[str], tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert command([*arguments, str(tmp_path / "none.py")], "it") == 2
    assert capfd.readouterr().err == f"it: there is no file {str(tmp_path / 'none.py')!r}\n"
    page = str(tmp_path / "no folder" / "page.html")
    assert forecasting.main(["--target", "v5e:2x2", "--html", page, __file__], "it") == 2
    assert capfd.readouterr().err == f"it: --html {page}: there is no folder that can be written to\n"


def test_a_module_that_is_not_there_is_named_without_our_frames(capsys: pytest.CaptureFixture[str]) -> None:
    assert meeting.run_steps(launch.prepare(None, "no_such_module", [])) == 1
    assert capsys.readouterr().err == "No module named no_such_module\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target", "v9:2"], "no chip 'v9' (in 'v9:2'). Known: v4, v5e"),
        (["--target", "gpu:2"], "'gpu:2' is no target: XLA's compiler for GPUs comes with JAX's plugin"),
        (["--target", "v5e"], "'v5e' is no target: write a chip (v4, v5e"),
        (["--target", "v5e:2x2", "--modes", "fast"], "--modes is 'fast'; allowed: fused, strict, debug"),
        (["--target", "v5e:2x2"], "the cache is off"),  # as the tests have it
    ],
)
def test_what_is_asked_wrongly_is_said(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warming, "obstacle", lambda: "")
    assert warming.main([*arguments, "x.py"], "warm") == 2
    assert words in capsys.readouterr().err


@pytest.mark.usefixtures("a_cache")
def test_logs_without_regions_for_a_target_are_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "run.jsonl"
    start = {"kind": "start", "t": 0, "v": 1, "job": "a", "pid": 1}

    def told(*rows: dict[str, object]) -> str:
        log.write_text("".join(json.dumps(row) + "\n" for row in (start, *rows)))
        assert warming.main(["--target", "v5e:2x2", "--from-log", str(log)], "warm") == 2
        return capsys.readouterr().err

    assert "it tells of none: the cache was off in that run" in told()
    region = {"kind": "region", "t": 1, "region": "1 op", "key": "0", "parts": packed(Key({"region": 1}))}
    assert "it has 1 regions of CPU tensors, which no TPU computes" in told(region)
    assert warming.main(["--target", "v5e:2x2", "--from-log", str(tmp_path / "none")], "warm") == 2
    assert "No such file" in capsys.readouterr().err
    for both in (["--target", "v5e:2x2"], ["--target", "v5e:2x2", "--from-log", str(log), "--", "x.py"]):
        with pytest.raises(SystemExit):
            warming.main(both, "warm")
        assert "give SCRIPT or --from-log FILE" in capsys.readouterr().err


@pytest.mark.usefixtures("a_cache")
def test_a_program_that_fails_fails_with_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text("raise ValueError('of its own')")
    assert warming.main(["--target", "v5e:2x2", str(tmp_path / "program.py")], "warm") == 1
    told = capfd.readouterr().err
    assert "ValueError: of its own" in told and "exit code 1" in told and "meeting.py" not in told


@pytest.mark.usefixtures("a_cache")
def test_a_program_without_tensors_on_the_device_is_told_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text("import torch; print(torch.ones(3).sum())")
    assert warming.main(["--target", "v5e:2x2", str(tmp_path / "program.py")], "warm") == 1
    assert "warm: the program computes nothing on the device 'tpu'" in capfd.readouterr().err


def test_what_cannot_be_compiled_is_told_and_what_no_process_could_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [Key({"region": number}) for number in range(3)]
    found = [Met(key, f"region {number}") for number, key in enumerate(keys)] + [Met(None, "odd", why="no form")]
    crossed = Crossed({"executable": b"code", "about": b"{}"}, 1.5, 0.5, Cost(1e-3, 2, 3.0, 4.0, 5, 6, 7, 8))
    outcomes = [crossed, Refusal("no lowering", {"about": b"{}"}), Refusal("XLA: no")]
    monkeypatch.setattr(warming, "crossed", lambda missing, *a: [(k, outcomes[keys.index(k)]) for k in missing])
    keeper = Keeper(resolve({"cache": "", "cache_dir": str(tmp_path)}))
    done = warming.warmed(found, Target.parse("v5e:1"), keeper, 1)
    assert (done.regions, done.hits, done.made, done.compiling) == (4, 0, 1, 1.5)
    assert done.failed == {"region 1": "no lowering", "region 2": "XLA: no", "odd": "it has no key: no form"}
    again = warming.warmed(found, Target.parse("v5e:1"), keeper, 1)
    assert (again.hits, again.made) == (2, 0) and "region 2: XLA: no" in str(again)
    costs: dict[Key, Cost] = {}
    assert warming.warmed(found, Target.parse("v5e:1"), keeper, 1, costs).hits == 2
    assert costs == {keys[0]: crossed.cost}


def test_what_this_host_alone_has_goes_to_the_shared_store_and_what_no_store_takes_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = Met(Key({"region": 1}), "region 1")
    crossed = Crossed({"executable": b"code"}, 1.5, 0.5, Cost(1e-3, 2, 3.0, 4.0, 5, 6, 7, 8))
    monkeypatch.setattr(warming, "crossed", lambda missing, *a: [(key, crossed) for key in missing])
    keys = tmp_path / "keys"
    keys.write_text(generate("hmac-sha256")["writer"])

    def warmed(**options: object) -> warming.Warmed:
        keeper = Keeper(resolve({"cache_dir": str(tmp_path / "own"), **options}))
        return warming.warmed([met], Target.parse("v5e:1"), keeper, 1)

    shared = {"cache": str(tmp_path / "shared"), "cache_keys": str(keys)}
    assert warmed(cache="").made == 1
    assert warmed(**shared).made == 1, "the one in the folder is not signed"
    done = warmed(**shared)
    assert (done.hits, done.made) == (1, 0) and f"cache: {tmp_path / 'own'}, {tmp_path / 'shared'}" in str(done)
    elsewhere = warmed(**shared, cache_dir=str(tmp_path / "another host's"))
    assert (elsewhere.hits, elsewhere.made) == (1, 0)
    # The folder has it signed, and the second store has not.
    assert warmed(cache=str(tmp_path / "second"), cache_keys=str(keys)).hits == 1
    assert list((tmp_path / "second" / "ac").iterdir())
    assert "option 'cache_keys' has no key that signs" in str(warmed(cache=str(tmp_path / "third")))
    (tmp_path / "file").write_text("")
    refused = warmed(cache="", cache_dir=str(tmp_path / "file"))
    assert "1 entries were not kept" in refused.failed[f"the cache {tmp_path / 'file'}"]
