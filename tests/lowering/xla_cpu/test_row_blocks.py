"""Row blocks: what depends on its own row alone is found, and computed block by block to the same values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fused_eager.fusion_rules.cores import threads
from fused_eager.fusion_rules.elementwise import elementwise
from jax import lax

from fused_eager import fused_eager, sync
from fused_eager.lowering.straight_line import Numbering, flatten, without_repeats
from fused_eager.lowering.xla_cpu import row_blocks
from fused_eager.lowering.xla_cpu.row_blocks import Blocked, candidates, cut, gains, in_blocks, spread
from fused_eager.xla import enable_x64
from tests.streams import all_rows_in_blocks, events

Arrays = tuple[np.ndarray, ...]
X = np.random.default_rng(0).standard_normal((6, 8, 5), np.float32)
ROW, PLACE, BATCH = X[0, 0], X[0], X[:, :1]


FOURS = "48 rows, 4 at a time"


@pytest.fixture(autouse=True)
def all_sizes() -> Iterator[None]:
    with all_rows_in_blocks():
        yield


def in_parts(function: Callable[..., Any], *arrays: np.ndarray, spare: tuple[int, ...] = ()) -> tuple[list[Any], str]:
    """What a function returns when it is computed in blocks, and into which."""
    with enable_x64(True):
        made, told = in_blocks(jax.make_jaxpr(function)(*arrays), spare)
        copies = [jnp.array(a) for a in arrays]
        return [np.asarray(a) for a in jax.jit(made, donate_argnums=spare)(*copies)], told


def agree(function: Callable[..., Any], *arrays: np.ndarray, spare: tuple[int, ...] = ()) -> str:
    """In blocks a function gives what it gives as it is. Returns into which."""
    with enable_x64(True):
        wanted = jax.tree.leaves(jax.jit(function)(*arrays))
    got, told = in_parts(function, *arrays, spare=spare)
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, np.asarray(b), rtol=2e-6, atol=2e-6)
    return told


def normal(x: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)


@elementwise
def passes(x: Any) -> Any:
    return lax.cond((x > 100).any(), lambda x: x, jnp.tanh, x)


# ---- what is found -----------------------------------------------------------------------------------------------


IN_BLOCKS: dict[str, tuple[Callable[..., Any], Arrays]] = {
    "a normalization": (normal, (X,)),
    "softmax": (lambda x: jax.nn.softmax(x, -1), (X,)),
    "and what is computed from it": (lambda x: jnp.tanh(normal(x) * 2) + x, (X,)),
    "a weight for each column": (lambda x, w: normal(x) * w + w, (X, ROW)),
    "a value for each place": (lambda x, p: normal(x + p), (X, PLACE)),
    "a value for each place, spread by hand": (
        lambda x, p: normal(x + lax.broadcast_in_dim(p, x.shape, (1, 2))), (X, PLACE),
    ),
    "a value for each batch": (lambda x, b: normal(x * b), (X, BATCH)),
    "one that is not a row's": (lambda x, s: normal(x) * s, (X, np.float32(3))),
    "several results": (lambda x: (normal(x), x.max(-1), x.argmax(-1), normal(x).sum(-1)), (X,)),
    "sums over all rows": (
        lambda x: (normal(x), normal(x).sum((0, 1)), normal(x).max(), normal(x).min((0, 1, 2))), (X,),
    ),
    "a mask": (lambda x, m: jnp.where(m, normal(x), -jnp.inf), (X, X > 0)),
    "scans and sorts along rows": (lambda x: (jnp.cumsum(normal(x), -1), jnp.sort(normal(x), -1)), (X,)),
    "rows turned around, cut and filled": (
        lambda x: jnp.pad(lax.rev(normal(x), (2,))[:, :, 1:4], ((0, 0), (0, 0), (1, 2))), (X,),
    ),
    "rows side by side": (lambda x: lax.concatenate([normal(x), x], 2), (X,)),
    "columns by number": (lambda x: normal(x) * lax.broadcasted_iota(np.float32, x.shape, 2), (X,)),
    "flat between two ops": (lambda x: jnp.exp(normal(x).reshape(-1).reshape(x.shape)).reshape(-1), (X,)),
    "rows counted by one axis": (lambda x: normal(jnp.exp(normal(x).reshape(48, 5))), (X,)),
    "rows of two axes": (lambda x: x - x.mean((1, 2), keepdims=True), (np.tile(X, (4, 1, 1)),)),
    "integers": (lambda x: x - x.max(-1, keepdims=True), (np.arange(240).reshape(6, 8, 5),)),
    "booleans": (lambda x: x & x.all(-1, keepdims=True), (X > -1,)),
    "one more axis before": (lambda x: lax.broadcast_in_dim(normal(x), (1, *x.shape), (1, 2, 3)) * 2, (X,)),
    "doubles": (normal, (X.astype(np.float64),)),
    "a function of each number that takes several passes": (lambda x: passes(x) * 2, (X,)),
    "such a function of a vector": (lambda x: passes(x) * 2, (X.reshape(-1),)),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_what_depends_on_its_own_row_alone(name: str) -> None:
    function, arrays = IN_BLOCKS[name]
    assert agree(function, *arrays)


def test_blocks_fill_the_cache_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    for rows, block in ((9, 8), (30, 24), (1000, 48)):
        monkeypatch.setattr(row_blocks, "BLOCK", rows * 20)
        monkeypatch.setattr(row_blocks, "FEWEST", 1)
        assert agree(normal, X.reshape(48, 5)) == f"48 rows, {block} at a time"


def test_with_more_than_one_thread_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    large = [jax.ShapeDtypeStruct(X.shape, X.dtype)]
    assert row_blocks.may_gain(large, False)
    for named, one in (("1", True), ("2", False)):
        monkeypatch.setenv("NPROC", named)
        monkeypatch.setattr(row_blocks, "threads", threads)
        assert row_blocks.may_gain(large, False) is one


NOT_IN_BLOCKS: dict[str, tuple[Callable[..., Any], Arrays]] = {
    "one loop as it is": (lambda x: jnp.tanh(x) * 2 + x, (X,)),
    "a reduction that nothing is done with": (lambda x: x.sum(-1), (X,)),
    "a statistic over all rows": (lambda x: (x - x.mean()) / x.std(), (X,)),
    "a statistic over all rows of what is by rows": (lambda x: normal(x) - normal(x).mean(), (X,)),
    "half types": (lambda x: normal(x), (X.astype(jnp.bfloat16),)),
    "another axis": (lambda x: x - x.mean(0, keepdims=True), (X,)),
    "nothing by rows": (lambda x: jnp.exp(x), (np.float32(1),)),
}


@pytest.mark.parametrize("name", NOT_IN_BLOCKS)
def test_what_is_left_as_it_is(name: str) -> None:
    function, arrays = NOT_IN_BLOCKS[name]
    assert agree(function, *arrays) == ""


def test_what_mixes_rows_comes_after_the_loop() -> None:
    w = np.random.default_rng(1).standard_normal((5, 3), np.float32)
    assert agree(lambda x, w: normal(x) @ w, X, w) == FOURS
    assert agree(lambda x: normal(x)[::-1], X) == FOURS
    assert agree(lambda x: normal(x).transpose(1, 0, 2), X) == FOURS


def test_small_values_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_blocks, "LARGE", X.nbytes + 1)
    assert agree(normal, X) == ""
    assert not row_blocks.may_gain([jax.ShapeDtypeStruct(X.shape, X.dtype)], False)
    monkeypatch.setattr(row_blocks, "LARGE", X.nbytes)
    assert row_blocks.may_gain([jax.ShapeDtypeStruct(X.shape, X.dtype)], False)


def test_a_number_of_rows_with_no_good_divisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one row each would not be worth the turns."""
    monkeypatch.setattr(row_blocks, "SMALLEST", 40)
    assert agree(normal, X.reshape(48, 5)[:47]) == ""


# ---- memory ------------------------------------------------------------------------------------------------------


def test_results_go_to_spare_memory() -> None:
    def in_place(x: Any, other: Any) -> Any:
        return normal(x), normal(x) * 2

    assert agree(in_place, X, np.zeros(240, np.float32), spare=(0, 1)) == FOURS
    assert agree(lambda x: (normal(x), x.sum()), X, spare=(0,)) == FOURS


def test_memory_that_something_else_reads_is_not_written() -> None:
    assert agree(lambda x: (normal(x), x.reshape(-1)[::-1]), X, spare=(0,)) == FOURS


def test_what_is_stored_is_what_it_was() -> None:
    x = jnp.array([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 3.0], jnp.float32)
    stored = np.asarray(jax.jit(row_blocks._stored)(x))
    assert stored.view(np.int32).tolist() == np.asarray(x).view(np.int32).tolist()


# ---- how ---------------------------------------------------------------------------------------------------------


def test_the_steps_around_the_loop() -> None:
    def function(x: Any, w: Any) -> Any:
        scale = jnp.exp(w)
        return (normal(x) * scale).sum((0, 1)) + 1

    program = flatten(jax.make_jaxpr(function)(X, ROW))
    rows = next(candidates(program))
    assert rows.sizes == (6, 8)
    found = cut(program, rows)
    assert "exp" in [s.eqn.primitive.name for s in found.before]
    assert [s.eqn.primitive.name for s in found.partial] == ["reduce_sum"]
    assert [s.eqn.primitive.name for s in found.after] == ["add"]
    assert gains(program, found) and not found.exported
    assert {program.avals[v].shape for v in spread(program, found)} == {(6, 8, 1)}


def test_a_straight_line_has_no_calls_and_no_dead_steps() -> None:
    def function(x: Any) -> Any:
        jnp.sin(x)
        return jax.nn.relu(jnp.where(x > 0, x, 0.0).reshape(-1).reshape(x.shape))

    names = [s.eqn.primitive.name for s in flatten(jax.make_jaxpr(function)(X)).steps]
    assert not {"jit", "pjit", "custom_jvp_call", "sin", "reshape"} & set(names) and "max" in names


def test_what_is_computed_twice_is_computed_once() -> None:
    def twice(x: Any, y: Any) -> tuple[Any, Any]:
        return jnp.exp(x + 1) * y, (jnp.exp(x + 1) - y) * 2 + (x + 2)

    with enable_x64(True):
        program = flatten(jax.make_jaxpr(twice)(X, X))
    once = without_repeats(program)
    names = [[s.eqn.primitive.name for s in p.steps] for p in (program, once)]
    assert names[0].count("exp") == 2 and names[1].count("exp") == 1
    assert [n.count("add") for n in names] == [4, 3], "of other numbers they are not the same"
    assert Numbering().of(program, {}) == Numbering().of(program, {})
    numbering = Numbering()
    assert numbering.of(program, {}) == numbering.of(once, {})


def test_a_choice_by_platform_is_made() -> None:
    def function(x: Any) -> Any:
        return lax.platform_dependent(x, cpu=jnp.exp, cuda=jnp.tan, default=jnp.tanh) + lax.platform_dependent(
            x, cuda=jnp.tan, default=jnp.sqrt
        )

    names = [s.eqn.primitive.name for s in flatten(jax.make_jaxpr(function)(X)).steps]
    assert sorted(names) == ["add", "exp", "sqrt"]


def numbers(*functions: Callable[..., Any]) -> list[list[int]]:
    """The numbers of the results of functions of a float32 vector and a scalar."""
    numbering, given = Numbering(), (X[0, 0], np.float32(2))
    return [numbering.of(flatten(jax.make_jaxpr(f)(*given)), {}) for f in functions]


def test_what_is_computed_alike_has_one_number() -> None:
    def plain(x: Any, s: Any) -> Any:
        return x * s + 1, x

    def other_order(x: Any, s: Any) -> Any:
        y, _ = x, jnp.exp(x)
        held = lax.optimization_barrier(lax.bitcast_convert_type(x * s, np.int32))
        return lax.bitcast_convert_type(held, np.float32) + 1, y

    first, second = numbers(plain, other_order)
    assert first == second and len(set(first)) == 2


@pytest.mark.parametrize(
    "other",
    [
        lambda x, s: s * x + 1,
        lambda x, s: x * s + 2,
        lambda x, s: x * s + np.float32(1.0000001),
        lambda x, s: x * s - 1,
        lambda x, s: x * x + 1,
        lambda x, s: lax.bitcast_convert_type(lax.bitcast_convert_type(x * s, np.int32) + 1, np.float32),
    ],
)
def test_what_is_not_has_another(other: Callable[..., Any]) -> None:
    first, second = numbers(lambda x, s: x * s + 1, other)
    assert first != second


def test_a_blocked_function_is_one_loop() -> None:
    made, _ = in_blocks(jax.make_jaxpr(normal)(X), ())
    assert isinstance(made, Blocked)
    text = jax.jit(made).lower(X).as_text()
    assert text.count("stablehlo.while") == 1


# ---- through the runtime -----------------------------------------------------------------------------------------


def programs() -> dict[str, Callable[[], Any]]:
    torch.manual_seed(0)
    x, g, w = torch.randn(6, 8, 5), torch.randn(6, 8, 5), torch.randn(5)
    labels = torch.randint(5, (48,))

    def backward(f: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        out = f(leaf)
        (grad,) = torch.autograd.grad(out, leaf, g if out.shape == g.shape else None)
        return [out.detach(), grad]

    def in_place() -> torch.Tensor:
        y = x * 2
        y.copy_(F.softmax(y, -1))
        return y.mul_(3)

    return {
        "layer norm, gelu, residual": lambda: x + F.gelu(F.layer_norm(x, (5,), w)),
        "layer norm": lambda: F.layer_norm(x.view(-1, 5), (5,)).view(6, 8, 5) * 2,
        "normalize": lambda: F.normalize(x, dim=-1),
        "standard deviation": lambda: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True),
        "in place": in_place,
        "gradient of layer norm": lambda: backward(lambda t: F.layer_norm(t, (5,), w)),
        "gradient of softmax": lambda: backward(lambda t: F.softmax(t, -1)),
        "cross entropy": lambda: backward(lambda t: F.cross_entropy(t.view(48, 5), labels)),
    }


@pytest.mark.parametrize("name", programs())
def test_programs_agree_with_eager(name: str) -> None:
    program = programs()[name]
    wanted = program()
    with events("compile") as seen, fused_eager():
        got = program()
        sync()
    torch.testing.assert_close(got, wanted)
    told = {e.data["blocks"] for e in seen}
    assert any(told) or name == "cross entropy", "gathering by label mixes rows"
