"""Canonical regions: nothing that changes the code is missing, nothing else is in, and they turn into regions again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_eager.cache import Key, Unencodable
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_eager.compiling import executable
from fused_eager.compiling.canonical import to_computation, to_parts
from fused_eager.compiling.compile import build
from fused_eager.compiling.key import Computation
from fused_eager.devices.home import Home
from fused_eager.executing.arguments import as_array
from fused_eager.lowering import lower
from fused_eager.planning import forms
from fused_eager.planning.plan import Region
from fused_eager.tracing.stream import Ref
from tests.compiling.test_key import BASE, DIFFERENT, x
from tests.streams import END, HOME, lowered_by, node, recorded


def digest(program: Callable[[], Any], **how: Any) -> str:
    return Key(to_parts(recorded(program, **how))).digest


# Programs that between them use every kind of argument and value.
PROGRAMS: dict[str, Callable[[], Any]] = {
    "chain": BASE,
    "views": lambda: x(8, 8)[:, ::2].t() @ x(8, 3) + x(3),
    "write through a view": lambda: (lambda y: (y[1:, ::2].add_(x(7, 2)), y)[1])(x(8, 4) * 2),
    "moving slice": lambda: (lambda y: y[3] * 2.0 + y[5])(x(8, 4) * 3),
    "lists and dtypes": lambda: torch.cat([x(2, 3), x(4, 3)], 0).to(torch.float64).sum(dtype=torch.float32),
    "complex": lambda: torch.complex(x(), x()).conj() * 2j,
    "in place": lambda: x().relu_().mul_(2),
    "out=": lambda: torch.add(x(), x(), out=x()),
    "convolution": lambda: torch.nn.functional.conv2d(x(1, 2, 8, 8), x(3, 2, 3, 3), x(3), padding=1),
    "norm": lambda: torch.nn.functional.layer_norm(x(4, 8), (8,), x(8), x(8)),
    "index": lambda: x(9, 2)[torch.tensor([1, 2, 8])],
    "where and numbers": lambda: torch.where(x() > 0, x().pow(2.5), x().clamp(min=-1)),
    "full": lambda: torch.full((3, 2), 1.5) + torch.arange(2),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_equal_programs_on_other_tensors_have_equal_parts(name: str) -> None:
    assert digest(PROGRAMS[name]) == digest(PROGRAMS[name])


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_region_comes_back_from_its_parts(name: str) -> None:
    """And computes the same: what lowering looks at is all there."""
    computation = recorded(PROGRAMS[name])
    parts = to_parts(computation)
    stored = Key.from_json(json.loads(Key(parts).text)).parts
    again = to_computation(stored)
    assert Key(to_parts(again)) == Key(parts)
    first, second = build(computation, True), build(again, True)
    assert first.lowered.as_text() == second.lowered.as_text()
    assert first.executable.checks == second.executable.checks
    made = [fill(computation.homes[v], seed) for seed, v in enumerate(computation.region.inputs)]
    kinds = [type(s) for node in computation.chosen for s in node.scalars]
    made += [torch.full((kinds.count(float),), 2.0).double(), torch.ones(kinds.count(int), dtype=torch.int64)]
    outs = [e.executable.call(*[as_array(t.clone()) for t in made])[0] for e in (first, second)]
    for a, b in zip(*outs, strict=True):
        assert bytes(memoryview(a).cast("B") if a.ndim else a.tobytes()) == bytes(
            memoryview(b).cast("B") if b.ndim else b.tobytes()
        )


def fill(home: Home, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    dtype, shape = home
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_computation_has_other_parts(name: str) -> None:
    assert digest(DIFFERENT[name]) != digest(BASE)


def test_all_the_programs_differ() -> None:
    found = {digest(p) for p in [*PROGRAMS.values(), *DIFFERENT.values()]}
    assert len(found) == len(PROGRAMS) + len(DIFFERENT)


def test_numbers_are_not_in_the_parts_but_their_kinds_are() -> None:
    assert digest(lambda: x() * 2.0) == digest(lambda: x() * -0.0) == digest(lambda: x() * float("nan"))
    assert digest(lambda: x() * 2.0) != digest(lambda: x() * 2)


def test_numbers_that_are_part_of_the_computation_go_by_their_bits() -> None:
    assert digest(lambda: x().pow(2.0)) != digest(lambda: x().pow(2))
    found = {digest(lambda v=v: torch.nn.functional.layer_norm(x(4, 8), (8,), eps=v)) for v in (0.0, -0.0, 1e-5)}
    assert len(found) == 3


def test_what_an_op_overwrites_is_in_the_parts() -> None:
    """Lowering decides by it whether XLA may write in place."""
    for name in ("in place", "write through a view", "out="):
        computation = recorded(PROGRAMS[name])
        again = to_computation(to_parts(computation))
        before, after = ([(n.op, n.twin, n.targets) for n in some.chosen] for some in (computation, again))
        assert before == after and any(targets for _, _, targets in after)


def test_lowering_looks_at_nothing_of_a_node_that_is_not_in_the_parts() -> None:
    """Whoever makes it look at more has to add that to `to_parts` and to `to_computation`."""
    source = "".join(path.read_text() for path in Path(lower.__file__).parent.glob("*.py"))
    looked_at = set(re.findall(r"\bnode(?:s\[\w+\])?\.(\w+)", source))
    assert looked_at <= {"op", "twin", "args", "kwargs", "uses", "scalars", "results", "targets"}


def test_what_lives_and_what_is_given_away_is_in_the_parts() -> None:
    def two() -> tuple[torch.Tensor, torch.Tensor]:
        y = x() * 2
        return y, y.relu()

    assert digest(two) != digest(two, live=lambda out: out[1])
    assert digest(BASE, donate=True) != digest(BASE)


def test_value_numbers_do_not_matter() -> None:
    def parts(a: int, b: int, c: int) -> Any:
        nodes = [node(b, [a]), node(c, [b, a], torch.ops.aten.add.Tensor)]
        return to_parts(Computation(nodes, Region((0, 1), (a,), (c,), (), "xla", END), dict.fromkeys((a, b, c), HOME)))

    assert parts(0, 1, 2) == parts(17, 4, 9)


SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=2).map(lambda sizes: (*sizes, 2))
STEPS = st.lists(
    st.sampled_from(
        [
            lambda y: y * 2.0,
            lambda y: y.relu(),
            lambda y: y.sum(-1, keepdim=True) + y,
            lambda y: y.flip(0),
            lambda y: y.unsqueeze(0).squeeze(0) - y,
            lambda y: y.clone().add_(1.0),
        ]
    ),
    min_size=1,
    max_size=6,
)


def _run(shape: tuple[int, ...], steps: list[Any]) -> torch.Tensor:
    y = x(*shape)
    for step in steps:
        y = step(y)
    return y


@settings(max_examples=40, deadline=None)
@given(SHAPES, STEPS, st.one_of(st.none(), st.tuples(SHAPES, STEPS)))
def test_keys_tell_lowered_functions_apart(shape: Any, steps: Any, other: Any) -> None:
    """Both directions: the same program again has the same key, and one key never stands for two functions."""
    again = (shape, steps) if other is None else other
    first, second = recorded(lambda: _run(shape, steps)), recorded(lambda: _run(*again))
    texts = [build(r, True).lowered.as_text() for r in (first, second)]
    if Key(to_parts(first)) == Key(to_parts(second)):
        assert texts[0] == texts[1]
    else:
        assert other is not None


def test_another_process_with_another_hash_seed_makes_the_same_key(tmp_path: Path) -> None:
    code = "from tests.compiling.test_canonical import *\nfor p in PROGRAMS.values(): print(digest(p))"
    lines = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120,
            cwd=Path(__file__).parents[2], env={**__import__("os").environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert lines == {"".join(f"{digest(p)}\n" for p in PROGRAMS.values())}


class Strange:
    """An argument that nobody outside this process could understand."""


def test_what_has_no_canonical_form_is_refused_with_its_place() -> None:
    n = node(1, [0])
    n.args = [Ref(0), Strange()]
    with pytest.raises(Unencodable, match=r"region\.nodes\[0\]\.args: .*Strange has no canonical form"):
        to_parts(Computation([n], Region((0,), (0,), (1,), (), "xla", END), dict.fromkeys((0, 1), HOME)))


def test_rules_of_others_are_refused() -> None:
    """Their source is not in the digest that stands for our lowerings."""
    refused = pytest.raises(Unencodable, match=r"rule of aten\.relu\.default comes from tests")
    with lowered_by("aten.relu.default", lambda cx, a: a), refused:
        to_parts(Computation([node(1, [0])], Region((0,), (0,), (1,), (), "xla", END), dict.fromkeys((0, 1), HOME)))


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: p.pop("outputs"),
        lambda p: p["nodes"][0].update(op="aten.nothing.here"),
        lambda p: p["nodes"][0].update(op="torch.os.system"),
        lambda p: p["inputs"][0].update(dtype="load"),
        lambda p: p["nodes"][0].update(args=[{"evil": 1}]),
        lambda p: p.update(nodes=3),
    ],
)
def test_parts_that_are_no_region_are_refused(damage: Callable[[Any], Any]) -> None:
    parts = to_parts(recorded(BASE))
    damage(parts)
    with pytest.raises(ValueError):
        to_computation(parts)


def test_every_kind_of_leaf_can_be_read_back() -> None:
    assert {name for name, _ in forms._WRITE.values()} | set(forms._CONTAINERS.values()) == set(forms._READ)
    leaves = [None, True, 1, 1.0, "a", 1j, torch.float32, torch.strided, torch.channels_last, torch.device("cpu")]
    tree = [leaves, (1, [2.5]), torch.Size([1, 2]), Ref(3)]
    again = forms._to_leaf(forms._leaf(tree, ""))
    assert again == tree and [type(a) for a in again] == [type(t) for t in tree]
    assert executable.FORMAT == 1


def test_an_op_that_a_row_defines_is_known_in_a_process_that_has_asked_for_no_row() -> None:
    """As the first region that a process which compiles for a target is given."""
    program = """
from fused_eager.compiling.canonical import to_computation
spec = {"dtype": "float32", "size": [3], "home": {"dtype": "float32", "shape": [3]}}
drawn = {"op": "fused_eager.random_uniform.default", "reads": [], "args": [{"list": [3]}, 1, 2], "makes": [spec]}
region = to_computation({"inputs": [], "nodes": [drawn], "outputs": [0], "donated": []})
print(region.nodes[0].op)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "fused_eager.random_uniform.default", done.stderr
