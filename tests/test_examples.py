"""The examples train, and train to the same losses in every mode."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

from examples import demo, train_gpt, train_lstm, train_resnet

ROOT = Path(__file__).resolve().parent.parent
STEPS = 12
TINY_GPT = ["--layers=1", "--dim=32", "--seq=16", "--batch=4"]
EXAMPLES: dict[str, tuple[ModuleType, list[str]]] = {
    "gpt": (train_gpt, [*TINY_GPT, "--lr=1e-2", "--eval-every=5", "--sample=4"]),
    "resnet": (train_resnet, ["--width=4", "--blocks=1", "--batch=32"]),
    "lstm": (train_lstm, ["--layers=2", "--dim=32", "--seq=12", "--batch=4", "--lr=1e-2", "--sample=4"]),
}
each = pytest.mark.parametrize("name", EXAMPLES)


def losses(name: str, *more: str) -> list[float]:
    module, arguments = EXAMPLES[name]
    return module.main([*arguments, f"--steps={STEPS}", "--quiet", *more])


@lru_cache
def plain_losses(name: str) -> tuple[float, ...]:
    return tuple(losses(name))


@each
def test_losses_are_finite_and_fall(name: str) -> None:
    values = plain_losses(name)
    assert len(values) == STEPS
    assert all(map(math.isfinite, values))
    assert sum(values[-3:]) < sum(values[:3])


@each
def test_equal_seeds_give_equal_losses_and_others_do_not(name: str) -> None:
    assert tuple(losses(name)) == plain_losses(name)
    assert tuple(losses(name, "--seed=1")) != plain_losses(name)


@each
def test_reading_every_loss_changes_no_loss(name: str) -> None:
    assert tuple(losses(name, "--log-every=1")) == plain_losses(name)


# The demo runs strict, too, and steady loops fused. (An LSTM, as a module of torch's, is trained among those.)
IN_FULL = [pytest.param(mode, marks=pytest.mark.slow) for mode in ("debug", "strict", "fused")]


@pytest.mark.parametrize("mode", ["off", *IN_FULL])
@each
def test_every_mode_trains_to_the_losses_of_plain_pytorch(name: str, mode: str) -> None:
    from fused_eager import fused_eager

    with fused_eager(mode=mode):
        values = losses(name)
    assert values == pytest.approx(plain_losses(name), rel=1e-3)


# Read at every step, the second step is the first of the steady loop. Without, the programs still read the loss of the
# second, so the third is the first that nobody reads, and the fourth follows upon one.
@pytest.mark.thinned(4)
@pytest.mark.parametrize(("log_every", "settled"), [(1, 2), (100, 4)], ids=["read", "unread"])
@pytest.mark.parametrize("name", ["gpt", *[pytest.param(name, marks=pytest.mark.slow) for name in ("resnet", "lstm")]])
def test_steady_loops_compile_nothing(name: str, log_every: int, settled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from fused_eager import fused_eager, report

    module, arguments = EXAMPLES[name]
    arguments = [*arguments, "--quiet", f"--log-every={log_every}", "--steps=9"] + ["--eval-every=0"] * (name == "gpt")
    plain = module.main(arguments)
    train_step, compilations = module.train_step, []

    def counted(*args: object) -> object:
        compilations.append(report().compilations)  # of all steps before this one
        return train_step(*args)

    monkeypatch.setattr(module, "train_step", counted)
    with fused_eager(mode="fused"):
        assert module.main(arguments) == pytest.approx(plain, rel=1e-3)
    assert len(compilations) == 9
    assert compilations[settled:] == [compilations[settled]] * (9 - settled)


@each
def test_losses_file_holds_what_main_returns(name: str, tmp_path: Path) -> None:
    file = tmp_path / "losses.json"
    assert losses(name, f"--losses={file}") == json.loads(file.read_text())


@each
def test_progress_is_printed_unless_quiet(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, arguments = EXAMPLES[name]
    module.main([*arguments, "--steps=4", "--quiet"])
    assert capsys.readouterr().out == ""
    module.main([*arguments, "--steps=4", "--log-every=3"])
    out = capsys.readouterr().out
    steps = re.findall(r"^step +(\d+)  loss \d+\.\d{4}  lr \d\.\d\de-\d\d(.*)$", out, re.MULTILINE)
    assert [int(step) for step, _ in steps] == [2, 3, 4]
    assert [rate.endswith("steps/s") for _, rate in steps] == [False, True, True]


@each
@pytest.mark.parametrize("argument", ["--steps=0", "--batch=0", "--log-every=0"])
def test_sizes_below_one_are_refused(name: str, argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        losses(name, argument)
    assert f"{argument.partition('=')[0]} must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("file", sorted(ROOT.glob("examples/train_*.py")), ids=lambda file: file.name)
def test_training_programs_know_nothing_of_the_library(file: Path) -> None:
    assert re.findall(r"fused.?eager(?!\[examples\])|jax|xla", file.read_text(), re.IGNORECASE) == []


def test_schedule_warms_up_and_comes_down() -> None:
    optimizer = train_gpt.make_optimizer(train_gpt.GPT(8, 1, 8, 4), lr=1.0)
    schedule, rates = train_gpt.make_schedule(optimizer, steps=100), []
    for _ in range(100):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=1e-2)


def test_weight_decay_spares_vectors() -> None:
    model = train_gpt.GPT(8, 1, 8, 4)
    groups = train_gpt.make_optimizer(model, lr=1.0).param_groups
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    for group in groups:
        assert all((p.dim() >= 2) == (group["weight_decay"] > 0) for p in group["params"])


def test_resnet_without_scikit_learn_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(SystemExit, match="needs scikit-learn: pip install"):
        losses("resnet")


def test_lstm_windows_follow_each_other_and_start_over() -> None:
    segments = train_lstm.lanes(torch.arange(23), 2)  # two lanes of 11: three windows of 3 and their targets
    parts = [train_lstm.window(segments, number, 3) for number in range(4)]
    assert [inputs[1].tolist() for inputs, _, _ in parts] == [[11, 12, 13], [14, 15, 16], [17, 18, 19], [11, 12, 13]]
    assert all((targets == inputs + 1).all() for inputs, targets, _ in parts)
    assert [fresh for _, _, fresh in parts] == [True, False, False, True]
    with pytest.raises(ValueError, match="too short"):
        train_lstm.window(segments, 0, 11)


def demo_run(mode: str, values: list[float]) -> demo.Run:
    return demo.Run(mode, values, 2.0, 1.0, "text")


def test_demo_finds_the_largest_difference() -> None:
    plain = demo_run("off", [2.0, 4.0, 8.0])
    assert demo.difference(demo_run("fused", [2.0, 4.0, 8.0]), plain)[0] == 0.0
    assert demo.difference(demo_run("fused", [2.0, 5.0, 9.0]), plain) == (0.25, 2)
    assert demo.difference(demo_run("fused", [2.0, 4.0, math.nan]), plain) == (math.inf, 3)


@pytest.mark.parametrize(("last", "agree"), [(1.0, True), (1.0009, True), (1.0011, False), (math.nan, False)])
def test_demo_tells_equal_losses_from_different_ones(last: float, agree: bool) -> None:
    assert demo.compare([demo_run("off", [2.0, 1.0]), demo_run("fused", [2.0, last])]) is agree


def test_demo_refuses_unknown_modes() -> None:
    with pytest.raises(SystemExit):
        demo.parse(["--modes=fast"])
    assert demo.parse(["--modes=fused,off", "--steps=3"]) == (["off", "fused"], ["--steps=3"])


def test_demo_runs_all_modes_and_ends_well() -> None:
    command = [sys.executable, "examples/demo.py", *TINY_GPT, "--steps=4", "--eval-every=0", "--sample=2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for mode in ("off", "strict", "fused", "tpu"):
        assert re.search(rf"^{mode} +\d+\.\d\d +\d+\.\d\dx +\d+\.\d s   (none|\d\.\de-\d\d)", done.stdout, re.MULTILINE)
    assert "== report: tpu ==" in done.stdout
