"""What both followers share is said once, and random programs go the same way through either."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import fused_eager as fe
from fused_eager import follower
from fused_eager.executing import load
from fused_eager.follower import build, spec
from fused_eager.frontends.context import connection
from fused_eager.log.events import Event
from fused_eager.tracing import numbers
from tests.fuzz.differ import compiled, repaired
from tests.fuzz.generate import RUNS, Program, generate, namespace
from tests.streams import events

SEEDS = random.SystemRandom().randrange(10**9)


def test_what_is_handed_over_is_what_is_named() -> None:
    handed = connection.shared()
    assert set(handed) == spec.classes() | set(spec.OBJECTS) | set(spec.NUMBERS)
    for _, (of, slots) in spec.SLOTS.items():
        for slot in slots:
            assert type(getattr(handed[of], slot)).__name__ == "member_descriptor", (of, slot)
    assert all(isinstance(handed[of], type) for of in spec.classes())
    assert all(type(handed[name]) is int for name in spec.NUMBERS)
    assert len(connection.settings_of(fe.config.resolve({}))) == len(spec.SETTINGS)


def test_the_header_says_all_of_it_and_numbers_to_the_last_bit() -> None:
    text = spec.header()
    for names in (spec.SLOTS, spec.TYPES, spec.OBJECTS, spec.NUMBERS, spec.SETTINGS):
        assert all(f" {name}" in text for name in names)
    assert [float.fromhex(bound.hex()) for bound in numbers.BOUNDS] == list(numbers.BOUNDS)
    assert all(bound.hex() in text for bound in numbers.BOUNDS)
    assert all(f"{t.name} = {t.value}" in text for t in spec.Treatment)


def went(program: Program, who: str) -> tuple[list[Any], list[Any], int]:
    """What a program leaves in each of its runs, how its streams were planned and flushed, and how many ops C++ has
    followed."""
    load.forget()
    code, found = compiled(program), []
    options = {"progress": False, "cache": "off", "compile": "wait", "native": "never"}
    before = follower.ways()
    with events("plan", "flush") as seen:
        for number in RUNS:
            env = namespace(number)
            try:
                with fe.fused_eager(mode="fused", follower=who, **options):
                    exec(code, env)
                found.append(_left(env))
            except Exception as error:
                found.append((type(error).__name__, str(error)))
    return found, [_way(e) for e in seen], follower.ways()[2] - before[2]


def _left(env: dict[str, Any]) -> list[Any]:
    tensors = {k: v for k, v in env.items() if type(v) is torch.Tensor and v.layout is torch.strided}
    return [
        (name, t.dtype, t.shape, t.stride(), t._version, t.detach().contiguous().flatten().view(torch.uint8).tolist())
        for name, t in tensors.items()
        if not (t.is_nested or t.is_neg() or t.is_conj())
    ]


def _way(event: Event) -> Any:
    if event.kind == "flush":
        return "flush", event.data["reason"], event.data["ops"]
    return "plan", [(r["how"], r["ops"], r["inputs"], r["outputs"], r["donated"]) for r in event.data["regions"]]


@pytest.mark.skipif(bool(build.obstacle()), reason=build.obstacle() or "it can be built")
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_random_programs_go_the_same_way_through_both(part: int) -> None:
    followed = 0
    for seed in range(SEEDS + 1000 * part, SEEDS + 1000 * part + (40 if part else 8)):
        program = repaired(generate(seed))
        if program is None:
            continue
        (want, planned, by_python), (got, ours, by_cpp) = went(program, "python"), went(program, "compiled")
        about = f"seed {seed}\n{program.source()}"
        assert planned == ours, about
        assert want == got, about
        assert by_python == 0
        followed += by_cpp
    assert followed
