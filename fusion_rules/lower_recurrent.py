"""Recurrent layers: a loop over the time steps, and one back (`recurrent` has the cells and the ops).

The input's part of all gates is one product before the loop, and so are, after the way back, the derivatives of the
weights: only what depends on the step before is inside.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .lower_matmul import product
from .lowering import Context
from .recurrent import CELLS, Math
from .rule import OpClass, rule

_JAX = Math(jax.nn.sigmoid, jnp.tanh, jax.nn.relu, lambda parts: jnp.concatenate(parts, -1))
_BY_ROWS = (((1,), (1,)), ((), ()))  # x @ y.T


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    made = product(x, weight, _BY_ROWS)
    return (made if bias is None else made + bias).astype(x.dtype)


def _stepping(cell: str) -> Any:
    """A step as a function of `pre`, the state before it, the projection and the number of sequences that it is of."""

    def step(pre: Any, h: Any, c: Any, w_hr: Any, size: Any) -> tuple[Any, Any]:
        after, c_after = CELLS[cell].step(_JAX, pre, h, c)
        if w_hr is not None:
            after = _linear(after, w_hr)
        if size is not None:
            here = (jnp.arange(pre.shape[0]) < size)[:, None]
            after = jnp.where(here, after, h)
            c_after = jnp.where(here, c_after, c) if c.ndim == 2 else c_after
        return after.astype(h.dtype), c_after.astype(c.dtype)

    return step


@rule("fused_eager.recurrent.default", OpClass.SCAN)
def recurrent(
    cx_: Context,
    gates: Any,
    hx: Any,
    cx: Any,
    w_hh: Any,
    b_hh: Any,
    w_hr: Any,
    sizes: Any,
    cell: str,
    reverse: bool,
) -> Any:
    """All steps of a layer in one direction."""
    step = _stepping(cell)

    def body(state: Any, given: Any) -> Any:
        h, c = state
        of_input, size = given
        pre = CELLS[cell].combine(_JAX, of_input, _linear(h, w_hh, b_hh))
        h, c = step(pre, h, c, w_hr, size)
        return (h, c), (h, pre, c)

    begin = hx, jnp.zeros(0, gates.dtype) if cx is None else cx
    (hy, cy), (out, pre, cells) = lax.scan(body, begin, (gates, sizes), reverse=reverse)
    return out, hy, cy, pre, cells


@rule("fused_eager.recurrent_backward.default", OpClass.SCAN)
def recurrent_backward(
    cx_: Context,
    d_out: Any,
    d_hy: Any,
    d_cy: Any,
    gates: Any,
    hx: Any,
    cx: Any,
    w_hh: Any,
    b_hh: Any,
    w_hr: Any,
    sizes: Any,
    out: Any,
    pre: Any,
    cells: Any,
    cell: str,
    reverse: bool,
) -> Any:
    """Its derivative, from the last step that was made to the first."""
    begin = jnp.zeros(0, gates.dtype) if cx is None else cx
    step = _stepping(cell)

    def before(first: Any, after: Any) -> Any:
        """What each step found, of what each has left."""
        if not len(after):
            return after
        return jnp.concatenate([after[1:], first[None]] if reverse else [first[None], after[:-1]])

    def body(carry: Any, given: Any) -> Any:
        d_h, d_c, d_w = carry
        here, pre, h, c, size = given
        if here is not None:
            d_h = d_h + here
        _, pull = jax.vjp(lambda pre, h, c, w_hr: step(pre, h, c, w_hr, size), pre, h, c, w_hr)
        d_pre, d_h, d_c, d_here = pull((d_h, d_c))
        _, of_hidden = parts(d_pre)
        d_h = d_h + product(of_hidden, w_hh, (((1,), (0,)), ((), ()))).astype(d_h.dtype)
        return (d_h, d_c, None if d_w is None else d_w + d_here), d_pre

    example = jnp.zeros(gates.shape[1:], gates.dtype)
    _, parts = jax.vjp(lambda of_input, of_hidden: CELLS[cell].combine(_JAX, of_input, of_hidden), example, example)
    found = before(hx, out)
    start = (
        jnp.zeros_like(hx) if d_hy is None else d_hy,
        jnp.zeros_like(begin) if d_cy is None or cx is None else d_cy,
        None if w_hr is None else jnp.zeros_like(w_hr),
    )
    steps = d_out, pre, found, before(begin, cells), sizes
    (d_hx, d_cx, d_w_hr), d_pre = lax.scan(body, start, steps, reverse=not reverse)
    d_gates, of_hidden = jax.vmap(parts)(d_pre)
    flat = of_hidden.reshape(-1, of_hidden.shape[-1])
    d_w_hh = product(flat, found.reshape(-1, found.shape[-1]), (((0,), (0,)), ((), ())))
    d_b_hh = None if b_hh is None else jnp.sum(flat, 0, dtype=flat.dtype)
    nothing = jnp.zeros(0, gates.dtype)
    return tuple(nothing if d is None else d for d in (d_gates, d_hx, d_cx, d_w_hh, d_b_hh, d_w_hr))
