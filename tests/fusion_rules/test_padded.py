"""Padded values: a function traced at three sizes is, for every size of the bucket, what it is at that size, whatever
lies behind what is valid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_eager.fusion_rules.padded import Refused
from fused_eager.fusion_rules.padded_rows import ROWS
from jax import lax

from fused_eager.lowering.padding import padded
from fused_eager.lowering.straight_line import flatten
from fused_eager.xla import enable_x64

HIGH, LOW, MIDDLE = 16, 13, 14
Function = Callable[..., Any]
CASES: dict[str, tuple[Function, list[tuple[Any, ...]]]] = {}


def case(*shapes: tuple[Any, ...]) -> Callable[[Function], Function]:
    """Enter a function of arrays with these shapes, where "n" is the size."""

    def enter(function: Function) -> Function:
        CASES[function.__name__] = function, list(shapes)
        return function

    return enter


def rows(x: Any) -> int:
    return x.shape[0]


@case(("n", 3))
def sums(x: Any) -> Any:
    return x.sum(0), x.max(0), x.min(), x.prod(1), (x > 0).any(0), (x > -9).all(), x.argmax(0), x.argmin(0)


@case(("n", 3))
def mean_and_variance(x: Any) -> Any:
    mean = x.sum(0) / rows(x)
    return mean, ((x - mean) ** 2).sum(0) / (rows(x) - 1), x * rows(x), x.sum() * (1 / (3 * rows(x)))


@case(("n", 4), (4, "n"), ("n",))
def products(x: Any, y: Any, z: Any) -> Any:
    return x @ y, y @ x, y @ z, jnp.einsum("ij,ji->j", x, y), x.T @ x


@case((2, "n", 4))
def attention(x: Any) -> Any:
    scores = jnp.einsum("bik,bjk->bij", x, x)
    causal = jnp.arange(x.shape[1])[:, None] >= jnp.arange(x.shape[1])
    return jnp.einsum("bij,bjk->bik", jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)), x), jax.nn.softmax(scores)


@case((2, "n", 4), (4, 4))
def merged_and_taken_apart(x: Any, w: Any) -> Any:
    flat = x.reshape(-1, 4) @ w
    return flat.reshape(x.shape), flat, flat.sum(0), flat.T @ x.reshape(-1, 4), x.reshape(2, -1)


@case((2, "n", 3))
def given_as_one_axis(x: Any) -> Any:
    flat = x.reshape(-1, 3) * 2
    apart = lax.optimization_barrier(flat).reshape(x.shape)
    return apart.sum(1), flat[None] + x.reshape(1, -1, 3)


@case(("n", 3), (2, 3))
def put_together(x: Any, y: Any) -> Any:
    return jnp.concatenate([y, x]), jnp.concatenate([x, y, x]), jnp.stack([x, x], 1), jnp.concatenate([x, x], 1)


@case(("n", 3))
def parts(x: Any) -> Any:
    return x[2:], x[:-1], x[1:-2], x[-1], x[:4], x[:, 1:], x[::-1], jnp.split(x, 3, 1), jnp.pad(x, ((1, 2), (0, 1)))


@case(("n", 3))
def made_of_nothing(x: Any) -> Any:
    ones = jnp.ones(rows(x))
    return ones.sum(), jnp.arange(rows(x)) * 2, jnp.zeros((3, rows(x))).reshape(-1), ones @ x, jnp.full(x.shape, 2.0)


@case(("n", 3))
def running(x: Any) -> Any:
    return lax.cumsum(x), lax.cumsum(x, reverse=True), lax.cummax(x), lax.cumlogsumexp(x), lax.cumprod(x, 1)


@case((9, 3), ("n",), ("n", 3))
def picked_and_added(table: Any, where: Any, new: Any) -> Any:
    at = jnp.clip(where * 3, 0, 8).astype(int)
    return table[at], table.at[at].add(new), jnp.take_along_axis(new, at[:, None] % 3, 1), new[jnp.array([0, 2, 2])]


@case((40, 3), ("n",), ("n", 3))
def written_at_places(table: Any, where: Any, new: Any) -> Any:
    at = table.at[jnp.arange(rows(new)) * 2 + (where > 0)]
    return at.set(new, mode="drop"), at.multiply(new, mode="drop"), at.min(new, mode="drop"), at.max(new, mode="drop")


@case(("n", 3), (2, 3))
def written_into_what_varies(x: Any, new: Any) -> Any:
    at = x.at[jnp.array([1, 13]) + (new[:, 0] > 100)]  # one of them is beyond the smallest
    columns = jnp.zeros((9, rows(x))).at[jnp.array([0, 4, 2])]
    return at.set(new, mode="drop"), at.add(new, mode="drop"), columns.set(x.T, mode="drop"), columns.add(x.T)


@case((2, "n"))
def written_in_another_layout(x: Any) -> Any:
    flat = lax.optimization_barrier(x.reshape(-1))
    at = jnp.zeros(99).at[jnp.arange(2 * x.shape[1]) * 3 % 97]
    return at.set(flat, mode="drop"), at.add(flat, mode="drop")


@case(("n", 3), (4, 3))
def filled_up(x: Any, y: Any) -> Any:
    n, none, two = rows(x), (0, 0, 0), x.dtype.type(2)
    ends = [lax.pad(x, two, ((begin, end, 0), none)) for begin, end in ((0, 32 - n), (1, 20 - n), (0, 10 - n), (0, -2))]
    return ends, lax.pad(y, two, ((0, n, 0), (1, 0, 0)))


@case(("n", 3))
def ordered(x: Any) -> Any:
    return jnp.sort(x, 1), lax.top_k(x, 2), x[:, ::-1], x.transpose(1, 0), x[:, None].squeeze(1)


@case(("n", 3))
def chosen(x: Any) -> Any:
    return lax.cond(x.sum() > 0, lambda v: v.sum(0) / rows(v), lambda v: v.max(0) * rows(v), x)


@case(("n", 2, 6, 6), (3, 2, 3, 3))
def convolutions(x: Any, w: Any) -> Any:
    out, back = jax.vjp(lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME"), x, w)
    pooled = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    return out, back(out), pooled


@case((2, "n"))
def of_rows_that_are_valid_in_part(x: Any) -> Any:
    flat = lax.optimization_barrier(x.reshape(-1))
    return flat.argmax(), lax.cumsum(flat), flat[1:], flat[-2:], lax.dynamic_slice_in_dim(flat, flat.argmin(), 1), flat


@case(("n", 3))
def gradients_of_parts(x: Any) -> Any:
    return jax.grad(lambda x: (x[1:] * x[:-1]).sum() + (x[2:, 1:] ** 2).sum())(x)


@case(("n", 3), (1, 3))
def moving_parts(x: Any, y: Any) -> Any:
    at = (y[0, 0] * 100).astype(int)  # beyond the end, or before the beginning
    return lax.dynamic_slice_in_dim(x, at, 2), lax.dynamic_update_slice_in_dim(x, y, at, 0)


@case(("n", 3))
def varying_parts_of_what_varies(x: Any) -> Any:
    n, more = rows(x), jnp.concatenate([x, x * 2, x[:2]])
    taken = [lax.dynamic_slice_in_dim(more, begin, n) for begin in (0, n, n + 2, 3)]
    written = [lax.dynamic_update_slice_in_dim(more, x, begin, 0) for begin in (n, n + 2, 3)]
    return taken, written, lax.dynamic_slice_in_dim(more, n - 1, 2 * n - 9), lax.dynamic_slice_in_dim(x, 4, n - 4)


def _shape(shape: tuple[Any, ...], size: int) -> tuple[int, ...]:
    return tuple([size if n == "n" else n for n in shape])


def _traced(function: Function, shapes: Any, size: int) -> Any:
    def flat(*arrays: Any) -> list[Any]:
        return jax.tree_util.tree_leaves(function(*arrays[:-2]))

    given = [jax.ShapeDtypeStruct(_shape(s, size), "float32") for s in shapes]
    return jax.make_jaxpr(flat)(*given, *[jax.ShapeDtypeStruct((0,), d) for d in ("float64", "int64")])


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", CASES)
def test_a_function_is_at_each_size_what_it_is_at_that_size(name: str) -> None:
    function, shapes = CASES[name]
    rng = np.random.default_rng(3)
    with enable_x64(True):
        traces = [_traced(function, shapes, size) for size in (HIGH, LOW, MIDDLE)]
        whole = padded(traces[0], traces[1], traces[2], (HIGH, LOW, MIDDLE), len(traces[0].jaxpr.outvars))
        compiled = jax.jit(whole)
        for size in (LOW, HIGH - 1):
            arrays = [rng.standard_normal(_shape(s, size), "float32") for s in shapes]
            given = []
            for shape, x in zip(shapes, arrays, strict=True):
                given.append(np.full(_shape(shape, HIGH), np.nan, "float32"))
                given[-1][tuple([slice(n) for n in x.shape])] = x
            found = compiled(*given, np.zeros(0), np.array([size]))
            wanted = jax.tree_util.tree_leaves(jax.jit(function)(*arrays))
            for a, b in zip(found, wanted, strict=True):
                np.testing.assert_allclose(a[tuple([slice(n) for n in b.shape])], b, rtol=2e-5, atol=2e-5)


REFUSED: dict[str, tuple[Function, str]] = {
    "a sort": (lambda x: jnp.sort(x, 0), "a sort along it"),
    "every second": (lambda x: x[::2], "every so many"),
    "a square": (lambda x: x / rows(x) ** 2, "not linear"),
    "a square of ones": (lambda x: jnp.ones(rows(x) ** 2).sum(), "not linear"),
    "a loop": (lambda x: lax.fori_loop(0, 3, lambda i, v: v * 2, x), "nothing is known of scan"),
    "a branch": (lambda x: x * 2 if rows(x) > 13 else x + 1, "other steps|another way"),
    "a constant": (lambda x: x * np.arange(rows(x), dtype="float32")[:, None] ** 2, "constant depends"),
    "a window": (lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 1), (1, 1), "VALID"), "a window goes along it"),
    "a beginning": (lambda x: lax.pad(x, x.dtype.type(0), ((32 - rows(x), 0, 0), (0, 0, 0))), "where it begins"),
    "a last place": (lambda x: x.at[jnp.array([20])].set(1.0, mode="clip"), "moved to its end"),
    "places that count": (lambda x: jnp.zeros((9, 3)).at[jnp.arange(rows(x))].set(x, mode="clip"), "that is dropped"),
    "what is last by rows": (lambda x: x.T.reshape(-1)[::-1], "valid in part are turned"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_padding_would_reach_is_refused_with_its_reason(name: str) -> None:
    function, words = REFUSED[name]
    with enable_x64(True), pytest.raises(Refused, match=words):
        traces = [_traced(function, [("n", 3)], size) for size in (HIGH, LOW, MIDDLE)]
        padded(traces[0], traces[1], traces[2], (HIGH, LOW, MIDDLE), len(traces[0].jaxpr.outvars))


def test_each_row_of_the_table_is_met_by_a_case() -> None:
    from fused_eager.fusion_rules.rowwise import ELEMENTWISE

    with enable_x64(True):
        traces = [_traced(function, shapes, HIGH) for function, shapes in CASES.values()]
    met = {step.eqn.primitive.name for trace in traces for step in flatten(trace).steps}
    assert set(ROWS) - ELEMENTWISE - met - {"reduce_window_sum", "reduce_window_min", "cummin", "reduce_or"} <= set()
