"""Recurrent layers as one op: all time steps of an LSTM, GRU or RNN in one direction.

torch takes a layer apart, a few ops for each step, where a device has no library for it: two hundred steps would be a
thousand ops, and a program that takes minutes to compile. The ops are our own (namespace `fused_eager`); what their
rows in the table lower to a loop, ATen computes step by step here, for whoever has no XLA.

A step computes `pre` from its input's part of the gates and from the hidden state's (`combine`, which is linear), and
from `pre` and the state before it the state after it (`step`). Both are written in operators and in the functions of
`Math`, so they serve torch and JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Math:
    """The functions that cells are made of, of torch or of JAX."""

    sigmoid: Callable[[Any], Any]
    tanh: Callable[[Any], Any]
    relu: Callable[[Any], Any]
    cat: Callable[[list[Any]], Any]  # along the last dimension


@dataclass(frozen=True, slots=True)
class Cell:
    """A kind of cell: how many gates it has, and how a step is computed.

    `combine(math, input's gates, hidden state's gates) -> pre` is linear in both, and
    `step(math, pre, h, c) -> (h, c)`; cells without a cell state pass `c` on.
    """

    gates: int
    kept: int  # of how many gates' size `pre` is
    combine: Callable[[Math, Any, Any], Any]
    step: Callable[[Math, Any, Any, Any], tuple[Any, Any]]


def _parts(x: Any, count: int) -> list[Any]:
    size = x.shape[-1] // count
    return [x[..., k * size : (k + 1) * size] for k in range(count)]


def _sum(math: Math, of_input: Any, of_hidden: Any) -> Any:
    return of_input + of_hidden


def _lstm(math: Math, pre: Any, h: Any, c: Any) -> tuple[Any, Any]:
    i, f, g, o = _parts(pre, 4)
    c = math.sigmoid(f) * c + math.sigmoid(i) * math.tanh(g)
    return math.sigmoid(o) * math.tanh(c), c


def _gru_gates(math: Math, of_input: Any, of_hidden: Any) -> Any:
    # The new state's gate needs both parts, for one of them is scaled before they are added.
    size = of_input.shape[-1] // 3
    both = of_input[..., : 2 * size] + of_hidden[..., : 2 * size]
    return math.cat([both, of_input[..., 2 * size :], of_hidden[..., 2 * size :]])


def _gru(math: Math, pre: Any, h: Any, c: Any) -> tuple[Any, Any]:
    r, z, of_input, of_hidden = _parts(pre, 4)
    new = math.tanh(of_input + math.sigmoid(r) * of_hidden)
    return (h - new) * math.sigmoid(z) + new, c


CELLS: dict[str, Cell] = {
    "lstm": Cell(4, 4, _sum, _lstm),
    "gru": Cell(3, 4, _gru_gates, _gru),
    "rnn_tanh": Cell(1, 1, _sum, lambda math, pre, h, c: (math.tanh(pre), c)),
    "rnn_relu": Cell(1, 1, _sum, lambda math, pre, h, c: (math.relu(pre), c)),
}

_TORCH = Math(torch.sigmoid, torch.tanh, torch.relu, lambda parts: torch.cat(parts, -1))


def by_steps(
    gates: Tensor,
    hx: Tensor,
    cx: Tensor | None,
    w_hh: Tensor,
    b_hh: Tensor | None,
    w_hr: Tensor | None,
    sizes: Tensor | None,
    cell: str,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A layer in torch's ops, differentiable as often as they are.

    Args:
        gates: the input's part of the gates of all steps `[time, batch, gates]`.
        hx, cx: the state before the first step `[batch, hidden]`; no `cx` where the cell has none.
        w_hh, b_hh: what makes the hidden state's part of the gates.
        w_hr: what the hidden state is projected by.
        sizes: of how many sequences each step is, `[time]`; the others' states stay. All of them if there is none.
        cell: which one of `CELLS`.
        reverse: from the last step to the first.

    Returns:
        The hidden state after each step, after all of them, and the cell state after all; and what the derivative
        needs: `pre` and the cell state of each step.
    """
    of, time = CELLS[cell], gates.shape[0]
    h, c = hx, gates.new_zeros(0) if cx is None else cx
    out: list[Tensor] = [h] * time
    kept: list[Tensor] = [gates[0]] * time if time else []
    cells = [c] * time
    for t in reversed(range(time)) if reverse else range(time):
        kept[t] = of.combine(_TORCH, gates[t], torch.nn.functional.linear(h, w_hh, b_hh))
        after, c_after = of.step(_TORCH, kept[t], h, c)
        if w_hr is not None:
            after = torch.nn.functional.linear(after, w_hr)
        if sizes is not None:
            here = (torch.arange(gates.shape[1], device=gates.device) < sizes[t])[:, None]
            after, c_after = torch.where(here, after, h), c_after if cx is None else torch.where(here, c_after, c)
        h, c = after, c_after
        out[t], cells[t] = h, c
    if not time:
        shapes = _shapes(gates, hx, cx, w_hh, b_hh, w_hr, sizes, cell, reverse)
        return shapes[0], h.clone(), c.clone(), shapes[3], shapes[4]
    return torch.stack(out), h.clone(), c.clone(), torch.stack(kept), torch.stack(cells)


def _shapes(
    gates: Tensor,
    hx: Tensor,
    cx: Tensor | None,
    w_hh: Tensor,
    b_hh: Tensor | None,
    w_hr: Tensor | None,
    sizes: Tensor | None,
    cell: str,
    reverse: bool,
) -> tuple[Tensor, ...]:
    time, of = gates.shape[0], CELLS[cell]
    size = gates.shape[2] // of.gates
    state = gates.new_empty((0,) if cx is None else cx.shape)
    return (
        gates.new_empty((time, *hx.shape)),
        gates.new_empty(hx.shape),
        state,
        gates.new_empty((time, gates.shape[1], of.kept * size)),
        gates.new_empty((time, *state.shape)),
    )


def _derived(
    d_out: Tensor | None,
    d_hy: Tensor | None,
    d_cy: Tensor | None,
    gates: Tensor,
    hx: Tensor,
    cx: Tensor | None,
    w_hh: Tensor,
    b_hh: Tensor | None,
    w_hr: Tensor | None,
    sizes: Tensor | None,
    out: Tensor,
    pre: Tensor,
    cells: Tensor,
    cell: str,
    reverse: bool,
) -> tuple[Tensor, ...]:
    given = (hx, cx, w_hh, b_hh, w_hr)
    with torch.enable_grad():
        again = [None if t is None else t.detach().requires_grad_() for t in (gates, *given)]
        every: Any = (*again, sizes, cell, reverse)
        made = by_steps(*every)[:3]
        pairs = [(m, d) for m, d in zip(made, (d_out, d_hy, d_cy), strict=True) if d is not None and m.requires_grad]
        wanted = [t for t in again if t is not None]
        found = iter(
            torch.autograd.grad([m for m, _ in pairs], wanted, [d for _, d in pairs], allow_unused=True)
            if pairs
            else [None] * len(wanted)
        )
    result = []
    for t in again:
        g = None if t is None else next(found)
        result.append(gates.new_zeros(0) if t is None else torch.zeros_like(t) if g is None else g.contiguous())
    return tuple(result)


def _derived_shapes(
    d_out: Any, d_hy: Any, d_cy: Any, gates: Tensor, hx: Tensor, cx: Any, w_hh: Tensor, b_hh: Any, w_hr: Any, *rest: Any
) -> tuple[Tensor, ...]:
    return tuple(gates.new_empty((0,) if t is None else t.shape) for t in (gates, hx, cx, w_hh, b_hh, w_hr))


_GIVEN = "Tensor gates, Tensor hx, Tensor? cx, Tensor w_hh, Tensor? b_hh, Tensor? w_hr, Tensor? sizes"
_HOW = "str cell, bool reverse"
_LIBRARY = torch.library.Library("fused_eager", "FRAGMENT")
_OPS = (
    (f"recurrent({_GIVEN}, {_HOW}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", by_steps, _shapes),
    (
        f"recurrent_backward(Tensor? d_out, Tensor? d_hy, Tensor? d_cy, {_GIVEN}, Tensor out, Tensor pre, "
        f"Tensor cells, {_HOW}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        _derived,
        _derived_shapes,
    ),
)
for _schema, _kernel, _shape in _OPS:
    _name = _LIBRARY.define(_schema).removeprefix("fused_eager::")
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _shape, "Meta")
