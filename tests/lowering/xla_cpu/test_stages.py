"""Stages: a chain of elementwise steps that a core would wait for becomes several loops, to the same values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from fused_eager.fusion_rules.elementwise import elementwise
from fused_eager.fusion_rules.rowwise import ELEMENTWISE, Rows
from fused_eager.fusion_rules.xla_cpu import latencies
from jax import lax

from fused_eager import fused_eager, sync
from fused_eager.lowering.straight_line import Program, flatten
from fused_eager.lowering.xla_cpu import row_blocks, stages
from fused_eager.lowering.xla_cpu.row_blocks import Blocked, in_blocks
from fused_eager.lowering.xla_cpu.stages import Stages, planned, stored
from fused_eager.xla import enable_x64
from tests.lowering.xla_cpu.test_row_blocks import agree
from tests.streams import all_rows_in_blocks, events

X = np.random.default_rng(0).standard_normal(48, np.float32)
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def all_sizes() -> Iterator[None]:
    with all_rows_in_blocks():
        yield


def exponentials(count: int) -> Function:
    def chain(x: Any) -> Any:
        for _ in range(count):
            x = jnp.exp(-x)
        return x

    return chain


def program(function: Function, *arrays: np.ndarray) -> Program:
    with enable_x64(True):
        return flatten(jax.make_jaxpr(function)(*arrays))


def names(function: Function, *arrays: np.ndarray) -> list[str]:
    """The primitives whose results are stored, in order."""
    found = program(function, *arrays)
    kept = stored(found, found.steps, [v for v in found.outputs if type(v) is int])
    return [step.eqn.primitive.name for step in found.steps if kept.intersection(step.outputs)]


def plan(function: Function, *arrays: np.ndarray) -> Stages:
    found = program(function, *arrays)
    return planned(found, found.steps, [v for v in found.outputs if type(v) is int], Rows((48,), 12))


def loops(function: Function, *arrays: np.ndarray) -> list[int]:
    """How many exponentials there are in each loop that has any, as XLA compiles it."""
    with enable_x64(True):
        made, _ = in_blocks(jax.make_jaxpr(function)(*arrays), ())
        text = jax.jit(made).lower(*arrays).compile().as_text()
    counts = [len(re.findall(r" exponential\(", part)) for part in text.split("\n\n")]
    return [n for n in counts if n]


def test_one_exponential_in_a_loop_is_enough() -> None:
    assert loops(exponentials(1), X) == [1] and loops(exponentials(5), X) == [1] * 5


def test_what_is_stored_is_what_the_next_long_step_takes() -> None:
    assert names(exponentials(3), X) == ["neg", "neg"]
    assert names(lambda x: jnp.log(jnp.exp(x) * x + 1.5), X) == ["add"]
    assert names(lambda x: jnp.log(jnp.exp(x)) + jnp.log(jnp.tanh(x) + 2), X) == ["exp", "add"]


def test_many_cheap_steps_are_a_long_chain_too() -> None:
    def chain(x: Any) -> Any:
        for _ in range(100):
            x = x * 0.999 + 0.001
        return x

    assert len(names(chain, X)) == 200 * latencies.CHEAP // stages.AT_ONCE
    assert agree(chain, X)


def test_what_xla_calls_number_by_number_has_a_loop_of_its_own_beside_other_work() -> None:
    """The others would not be vectorised in one loop with it."""

    def some(x: Any) -> Any:
        return jnp.exp(-jnp.tanh(lax.pow(x * 2, np.float32(1.5))))

    def most(x: Any) -> Any:
        for _ in range(4):
            x = x + 0.01 * lax.sin(x)
        return x

    assert names(some, abs(X)) == ["mul", "pow", "neg"] and agree(some, abs(X))
    assert names(most, X) == [] and agree(most, X) == ""


def test_what_several_loops_need_is_stored() -> None:
    def leapfrog(x: Any) -> Any:
        for _ in range(3):
            slow = jnp.exp(-x)
            x = jnp.tanh(x * slow) + slow
        return x

    found = program(leapfrog, X)
    slow = [v for step in found.steps if step.eqn.primitive.name == "exp" for v in step.outputs]
    assert set(slow[1:]) <= stored(found, found.steps, [v for v in found.outputs if type(v) is int])
    assert loops(leapfrog, X) == [1] * 3 and agree(leapfrog, X)


def test_nothing_is_cut_where_what_several_loops_need_cannot_be_stored() -> None:
    def function(x: Any) -> Any:
        half = jnp.exp(x.astype("bfloat16")) * 2
        y = jnp.exp(jnp.tanh(x)) + half.astype("float32")
        return jnp.log(y + 2) * half.astype("float32")

    assert names(function, X) == []


SHORT: dict[str, Function] = {
    "one function": lambda x: jnp.exp(x) * 2 + x,
    "two beside each other": lambda x: jnp.exp(x) + jnp.tanh(x),
    "a few more steps at the end": lambda x: (jnp.exp(x * 2 + 1) * 2 + x) * x * x + x * x,
    "of what rows were reduced to": lambda x: jnp.log(jnp.exp(x.reshape(6, 8)).sum(1)),
    "with one between that is written anyway": lambda x: jnp.exp(elementwise(lambda y: y * 2)(jnp.exp(x))),
}


@pytest.mark.parametrize("name", SHORT)
def test_what_is_not_waited_for_is_left_as_it_is(name: str) -> None:
    assert names(SHORT[name], X) == []


def test_halves_are_not_stored() -> None:
    assert names(exponentials(4), X.astype(jnp.bfloat16)) == []


def test_memory_is_taken_again_once_it_has_been_read() -> None:
    made = plan(exponentials(6), X)
    assert len(made.of) == 5 and len(made.slots) == 2 and made.slots[0] == ((), np.float32)
    assert list(made.of.values()) == [0, 1, 0, 1, 0]


def test_memory_is_not_taken_of_what_something_else_reads() -> None:
    """What leaves the loop, or is read further on, may be computed at any time: XLA would copy it first."""

    def leaves(x: Any) -> Any:
        first = -jnp.exp(x)
        return exponentials(3)(jnp.exp(first)), first * 2

    def reads_again(x: Any) -> Any:
        first = -jnp.exp(x)
        return jnp.exp(exponentials(2)(jnp.exp(first)) + first)

    for function in (leaves, reads_again):
        made = plan(function, X)
        first, *others = made.of.values()
        assert others and first not in others[:-1], "by what is not behind its last reader"
        assert agree(function, X)


def test_dtypes_have_memory_of_their_own() -> None:
    def mixed(x: Any) -> Any:
        wide = jnp.exp(jnp.exp(x)).astype("float64")
        return jnp.log(jnp.exp(wide) + 2)

    with enable_x64(True):
        assert {np.dtype(dtype).name for _, dtype in plan(mixed, X).slots} == {"float32", "float64"}
    assert agree(mixed, X)


def test_it_is_one_loop_over_blocks_in_which_there_are_several() -> None:
    made, told = in_blocks(jax.make_jaxpr(exponentials(3))(X), ())
    assert isinstance(made, Blocked) and made.cut.stages and told == "48 rows, 24 at a time"
    assert jax.jit(made).lower(X).as_text().count("stablehlo.while") == 1


def test_small_chains_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_blocks, "STAGED", X.nbytes + 1)
    assert agree(exponentials(4), X) == ""
    given = [jax.ShapeDtypeStruct(X.shape, X.dtype)]
    monkeypatch.setattr(row_blocks, "LARGE", X.nbytes + 1)
    assert not row_blocks.may_gain(given, True)
    monkeypatch.setattr(row_blocks, "STAGED", X.nbytes)
    assert row_blocks.may_gain(given, True) and not row_blocks.may_gain(given, False)


def test_what_is_stored_is_what_it_was() -> None:
    values, function = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40] * 8, np.float32), exponentials(4)
    made, told = in_blocks(jax.make_jaxpr(function)(values), ())
    assert told
    np.testing.assert_array_equal(np.asarray(jax.jit(made)(values)[0]), np.asarray(jax.jit(function)(values)))


def test_every_latency_is_of_a_primitive_that_is_elementwise() -> None:
    assert set(latencies._OF) <= ELEMENTWISE
    assert {"broadcast_in_dim", "reshape", "squeeze"} == latencies.FREE - ELEMENTWISE
    assert all(hasattr(lax, f"{name}_p") for name in ELEMENTWISE & set(latencies._OF))


def test_complex_numbers_are_waited_for_longer() -> None:
    def of(function: Function, dtype: str) -> int:
        return latencies.latency(jax.make_jaxpr(function)(X.astype(dtype)).eqns[0])

    for function in (jnp.abs, lambda x: x * x, lax.exp):
        assert 0 < of(function, "float32") < of(function, "complex64")
    assert of(lambda x: x.reshape(6, 8), "complex64") == of(lambda x: x.reshape(6, 8), "float32") == 0


# ---- through the runtime -----------------------------------------------------------------------------------------


def mixed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = torch.sigmoid(torch.tanh(a + b)) * a - b
    c = torch.sqrt(torch.exp(-(c * c)) + 1.0) * torch.where(a > 0, c, b)
    return torch.log(torch.sin(c).abs().clamp(0.1, 2.0)) / (b * b + 1.0)


@pytest.mark.parametrize("shape", [(96,), (6, 16), (3, 4, 8)])
def test_programs_agree_with_eager(shape: tuple[int, ...]) -> None:
    a, b = torch.randn(shape), torch.randn(shape)
    wanted = mixed(a, b)
    with events("compile") as seen, fused_eager():
        got = mixed(a, b)
        sync()
    torch.testing.assert_close(got, wanted)
    assert any(e.data["blocks"] for e in seen)


def test_a_chain_in_place_agrees_with_eager() -> None:
    """Its memory is donated: a block is read, then written."""
    wanted, x = torch.linspace(-1, 1, 96), torch.linspace(-1, 1, 96)

    def step(t: torch.Tensor) -> None:
        t.exp_().neg_().exp_().add_(t).log_().tanh_()

    step(wanted)
    with fused_eager():
        x = x * 1
        for _ in range(3):
            y = x * 1
            step(y)
        sync()
    torch.testing.assert_close(y, wanted)
