"""Recurrent cells: torch asks every accelerator for a fused LSTM and GRU cell, and for their derivatives.

They are written in ops that are recorded, so the device fuses them as it fuses everything else. `workspace` is what the
forward pass leaves for the backward pass, which nobody else reads.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def _with(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


def lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of an LSTM: gates `[batch, 4 * hidden]` -> hidden state, cell state, workspace."""
    gates = _with(input_gates, input_bias) + _with(hidden_gates, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The derivative of `lstm_cell`: of the gates, of the cell state, of a bias."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    t = cy.tanh()
    through = torch.zeros_like(cy) if grad_cy is None else grad_cy
    if grad_hy is not None:
        through = through + grad_hy * o * (1 - t * t)
    to_o = torch.zeros_like(o) if grad_hy is None else grad_hy * t * o * (1 - o)
    gates = torch.cat([through * g * i * (1 - i), through * cx * f * (1 - f), through * i * (1 - g * g), to_o], 1)
    return gates, through * f, gates.sum(0) if has_bias else None


def gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of a GRU: gates `[batch, 3 * hidden]` -> hidden state, workspace."""
    ir, iz, i_n = _with(input_gates, input_bias).chunk(3, 1)
    hr, hz, hn = _with(hidden_gates, hidden_bias).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (i_n + r * hn).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hn], 1)


def gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The derivative of `gru_cell`: of both kinds of gates, of the hidden state, of both biases."""
    r, z, n, hx, hn = workspace.chunk(5, 1)
    to_z = grad_hy * (hx - n) * z * (1 - z)
    to_n = grad_hy * (1 - z) * (1 - n * n)
    to_r = to_n * hn * r * (1 - r)
    of_input, of_hidden = torch.cat([to_r, to_z, to_n], 1), torch.cat([to_r, to_z, to_n * r], 1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, grad_hy * z, *biases


KERNELS = {
    "aten._thnn_fused_lstm_cell.default": lstm_cell,
    "aten._thnn_fused_lstm_cell_backward_impl.default": lstm_cell_backward,
    "aten._thnn_fused_gru_cell.default": gru_cell,
    "aten._thnn_fused_gru_cell_backward.default": gru_cell_backward,
}
