"""Random programs against eager, and the tools that find and shrink what differs."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator

import pytest
import torch
from fused_eager.fusion_rules import RULES

from tests.streams import (
    all_results_large,
    all_rows_in_blocks,
    all_steps_in_stages,
    events,
    given_up_anywhere,
    lowered_by,
    restless,
)

from . import functions
from .__main__ import one
from .differ import Invalid, check, compare, in_double, repaired, run, shrink
from .generate import Program, generate
from .kinds import KINDS

# A failure says its seed, and the command that runs it again.
FRESH = random.SystemRandom().randrange(10**9)


@pytest.fixture(params=["", "scratch", "blocks", "stages"])
def options(request: pytest.FixtureRequest) -> Iterator[str]:
    """How to run the command that repeats a failure: as users do, or with what is for large values done for all."""
    made = {
        "": contextlib.nullcontext,
        "scratch": all_results_large,
        "blocks": all_rows_in_blocks,
        "stages": all_steps_in_stages,
    }
    with made[request.param]():
        yield f"--programs 1{' --' * bool(request.param)}{request.param}"


@pytest.mark.thinned(4)
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_fresh_programs_agree_with_eager(part: int, options: str) -> None:
    for seed in range(FRESH + 10 * part, FRESH + 10 * part + 10):
        program, found = one(seed, "fused")
        assert not found, f"python -m tests.fuzz --seed {seed} {options}\n{found}\n{program and program.source()}"


def test_programs_whose_streams_are_given_up_anywhere_agree_with_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_EAGER_NATIVE", "measured")
    for seed in range(FRESH, FRESH + 20):
        with given_up_anywhere(seed):
            program, found = one(seed, "auto")
        again = f"python -m tests.fuzz --programs 1 --seed {seed} --modes auto --give-up"
        assert not found, f"{again}\n{found}\n{program and program.source()}"


def test_programs_that_torch_runs_from_any_turn_on_agree_with_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_EAGER_NATIVE", "measured")
    done: list[str] = []
    for seed in range(8):
        with restless(seed) as did:
            program, found = one(seed, "auto")
        done += did
        again = f"python -m tests.fuzz --programs 1 --seed {seed} --modes auto --restless"
        assert not found, f"{again}\n{found}\n{program and program.source()}"
    assert {"aside", "back"} <= set(done)


@pytest.mark.parametrize("mode", ["fused", pytest.param("strict", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_programs_with_further_statements_agree_with_eager(kind: str, mode: str) -> None:
    # The seeds are fixed: what fresh ones find, `python -m tests.fuzz --kinds all` is asked for.
    program, found = one(sorted(KINDS).index(kind), mode, (kind,))
    again = f"python -m tests.fuzz --programs 1 --seed {sorted(KINDS).index(kind)} --modes {mode} --kinds {kind}"
    assert not found, f"{again}\n{found}\n{program and program.source()}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_fresh_programs_with_further_statements_agree_with_eager(kind: str) -> None:
    for seed in range(FRESH, FRESH + 20):
        program, found = one(seed, "fused", (kind,))
        again = f"python -m tests.fuzz --programs 1 --seed {seed} --kinds {kind}"
        assert not found, f"{again}\n{found}\n{program and program.source()}"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["debug", "strict", "fused"])
@pytest.mark.parametrize("part", range(20))
def test_many_programs_agree_with_eager(part: int, mode: str) -> None:
    for seed in range(FRESH + 10_000 + 50 * part, FRESH + 10_000 + 50 * part + 50):
        program, found = one(seed, mode)
        assert not found, f"python -m tests.fuzz --seed {seed} --programs 1\n{found}\n{program and program.source()}"


@pytest.mark.parametrize("many", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_functions_called_with_other_aliasing(many: int) -> None:
    for seed in range(FRESH, FRESH + many):
        found = functions.check(functions.make(seed))
        assert not found, f"python -m tests.fuzz.functions --seed {seed} --functions 1\n{found}"


def test_functions_are_followed() -> None:
    source = "def f(a, b, e, s, out):\n    a = a * s + b\n    return [a.sin()]\n"
    trial = functions.Trial(source, ((2, 2, True, 0.5),) * 4)
    with events("compile") as seen:
        assert not functions.check(trial)
    assert len(seen) == 1


def _program(*lines: str, body: tuple[str, ...] = (), rounds: int = 2) -> Program:
    return Program(lines, body, (), rounds, "torch.float64", 0)


def test_a_seed_gives_one_program() -> None:
    assert generate(11) == generate(11)
    assert len({generate(seed).source() for seed in range(5)}) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_one_program_of_a_kind(kind: str) -> None:
    assert generate(3, (kind,)) == generate(3, (kind,))
    assert generate(3, (kind,)) != generate(3)


def test_programs_are_as_varied_as_they_should_be() -> None:
    text = "".join(generate(seed).source() for seed in range(60))
    for part in ("for i in range", "_(", "requires_grad", "seen.append", "out=", "torch.no_grad", "del ", "[::2]"):
        assert part in text, part


def test_a_mistake_of_the_runtime_is_found() -> None:
    row = RULES["aten.sin.default"]
    with lowered_by(row.op, lambda cx, x: row.lower(cx, x) + 1e-3):
        program = _program("t0 = torch.randn((3, 7), dtype=D)", "t1 = t0.sin() * 1.7", "t2 = t0 + 1", "t3 = t1 + 1")
        found = check(program, "fused")
        assert "instead of" in found
        small = shrink(program, lambda p: bool(check(p, "fused")))
        assert small.before == ("t0 = torch.randn((3, 7), dtype=D)", "t1 = t0.sin() * 1.7")
        assert 'fused_eager(mode="fused")' in small.script("fused")


def test_a_script_runs() -> None:
    script = _program("t0 = torch.ones((2,), dtype=D)", body=("t0 += i",)).script("fused")
    exec(compile(script, "script", "exec"), {"__name__": "script"})


def test_a_script_with_helpers_runs() -> None:
    """It holds their source, and shrinking leaves the statements that it needs."""
    program = _program(
        "t0 = torch.ones((2,), dtype=D)", "t1 = t0 * 3", "kept['two'] = TwoTensor(t0 * 2, t0 + 1)",
        "t2 = scripted('x * torch.tensor(2.0) + s')(kept['two'].a, 0.5)",
    )
    assert not check(program, "fused")
    small = shrink(program, lambda p: "t2" in run(p, None).variables)
    assert small.statements() == 3
    exec(compile(small.script("fused"), "script", "exec"), {"__name__": "script"})


def test_statements_that_eager_refuses_are_left_out() -> None:
    program = _program("t0 = torch.ones((2, 3))", "t1 = t0[5]", body=("t0 = t0[0]", "t2 = t0 + i"), rounds=4)
    fixed = repaired(program)
    assert fixed is not None
    assert fixed.before == ("t0 = torch.ones((2, 3))",)
    assert fixed.body == ("t2 = t0 + i",)
    with pytest.raises(Invalid):
        check(program, "fused")


def test_rounding_is_told_from_mistakes() -> None:
    program = _program("t0 = torch.randn((4, 4), dtype=torch.float32).float().to(torch.bfloat16)")
    assert "float32" not in in_double(program).source() and "bfloat16" not in in_double(program).source()


def test_results_are_compared_in_all_that_a_user_sees() -> None:
    base = "t0 = torch.ones((2, 3), dtype=D)"
    for line in ("t0 = t0.t()", "kept['two'] = TwoTensor(t0, t0)", "kept['coo'] = t0.to_sparse()",
                 "t0 = t0 + 1e-3", "t0 = t0.float()", "t0.add_(0)", "seen.append(1)", "t1 = t0[0]",
                 "t0 = t0.clone().requires_grad_()", "raise ValueError"):
        assert compare(run(_program(base), None), run(_program(base, line), None)), line
    assert os.environ.get("FUSED_EAGER_VALIDATE") == "1" and torch.get_num_threads() == 1
