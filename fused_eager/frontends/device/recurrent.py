"""LSTM, GRU and RNN: a layer in one direction is one op, whose derivative is another (`fusion_rules.recurrent`).

torch takes them apart into a few ops for each time step where a device has no library for them. Where a derivative of
a derivative is wanted, or a tangent, that form is used, which has them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fused_eager.fusion_rules.recurrent import CELLS, by_steps

from . import transfers
from .doors import DOORS, is_on_device

Tensor = torch.Tensor
_OPS = torch.ops.fused_eager
OPS = (_OPS.recurrent.default, _OPS.recurrent_backward.default)


class _Layer(torch.autograd.Function):
    """`recurrent` and its derivative."""

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, hx: Tensor, cx: Any, w_hh: Tensor, b_hh: Any, w_hr: Any, sizes: Any, *how: Any
    ) -> Any:
        given = (gates, hx, cx, w_hh, b_hh, w_hr, sizes)
        out, hy, cy, pre, cells = _OPS.recurrent(*given, *how)
        ctx.save_for_backward(*given, out, pre, cells)
        ctx.how = how
        ctx.set_materialize_grads(False)
        if cx is None:
            ctx.mark_non_differentiable(cy)
        return out, hy, cy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved = ctx.saved_tensors
        given, left = saved[:6], saved[6:]
        wanted = [t for t, needs in zip(given, ctx.needs_input_grad, strict=False) if needs]
        if torch.is_grad_enabled():  # of this derivative another one may be asked
            every: Any = (*given, left[0], *ctx.how)
            made = by_steps(*every)[:3]
            pairs = [(m, d) for m, d in zip(made, grads, strict=True) if d is not None]
            of = iter(
                torch.autograd.grad([m for m, _ in pairs], wanted, [d for _, d in pairs], create_graph=True,
                                    allow_unused=True)
            )  # fmt: skip
        else:
            found = _OPS.recurrent_backward(*grads, *given, *left, *ctx.how)
            of = (d for d, needs in zip(found, ctx.needs_input_grad, strict=False) if needs)
        return tuple(next(of) if needs else None for needs in ctx.needs_input_grad)


@dataclass(frozen=True, slots=True)
class _Packed:
    """Sequences of several lengths, the longest first: where step after step each element of the data is."""

    sizes: Tensor  # of each step, on the device
    padded: Tensor  # the row of the data for each place of `[time, batch]`; some row where there is none
    packed: Tensor  # the place for each row of the data
    batch: int

    @classmethod
    def of(cls, batch_sizes: Tensor, device: torch.device) -> _Packed:
        at = DOORS[device.index or 0]
        time, batch = len(batch_sizes), int(batch_sizes[0])
        there = torch.arange(batch)[None] < batch_sizes[:, None]
        first = batch_sizes.cumsum(0) - batch_sizes
        rows = torch.where(there, first[:, None] + torch.arange(batch), 0)
        places = torch.arange(time * batch).view(time, batch)[there]
        put = functools.partial(transfers.to_device, at)
        return cls(put(batch_sizes.contiguous()), put(rows.flatten()), put(places), batch)

    def pad(self, data: Tensor) -> Tensor:
        return data.index_select(0, self.padded).view(len(self.sizes), self.batch, *data.shape[1:])

    def pack(self, out: Tensor) -> Tensor:
        return out.flatten(0, 1).index_select(0, self.packed)


def _plain(*given: Any) -> bool:
    """Whether the one op can stand for what torch would do: on the device, in one dtype, and no transform around it."""
    if torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0:
        return False
    first = given[0]
    return first.dtype.is_floating_point and all(
        is_on_device(t) and t.dtype is first.dtype and t.get_device() == first.get_device() for t in given
    )


def _layers(
    cell: str,
    data: Tensor,
    packed: _Packed | None,
    hx: Tensor,
    cx: Tensor | None,
    weights: Sequence[Sequence[Tensor | None]],
    directions: int,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """All layers: input `[time, batch, features]`, or packed `[rows, features]`, to output, hidden and cell states."""
    hidden, cells = [], []
    for k in range(0, len(weights), directions):
        made = []
        for d in range(directions):
            w_ih, w_hh, b_ih, b_hh, w_hr = weights[k + d]
            gates = F.linear(data, w_ih, b_ih)  # type: ignore[arg-type]
            gates = gates if packed is None else packed.pad(gates)
            state = hx[k + d], None if cx is None else cx[k + d]
            sizes = None if packed is None else packed.sizes
            out, h, c = _Layer.apply(gates, *state, w_hh, b_hh, w_hr, sizes, cell, bool(d))  # type: ignore[no-untyped-call]
            made.append(out if packed is None else packed.pack(out))
            hidden.append(h)
            cells.append(c)
        data = made[0] if directions == 1 else torch.cat(made, -1)
        if dropout and k + directions < len(weights):
            data = torch.dropout(data, dropout, True)
    return data, torch.stack(hidden), None if cx is None else torch.stack(cells)


def _weights(params: Sequence[Tensor], biased: bool, projected: bool) -> list[list[Tensor | None]]:
    """The weights of each layer and direction: `w_ih`, `w_hh`, `b_ih`, `b_hh`, `w_hr`."""
    each = 2 + 2 * biased + projected
    found: list[list[Tensor | None]] = []
    for k in range(0, len(params), each):
        of = list(params[k : k + each])
        w_hr = of.pop() if projected else None
        found.append([*of, *([] if biased else [None, None]), w_hr])
    return found


def _fits(
    cell: str, features: int, batch: int, hx: Tensor, cx: Tensor | None, weights: Any, layers: int, directions: int
) -> bool:
    """Whether all shapes are what they have to be. What they are not torch tells by its own form."""
    count = layers * directions
    if len(weights) != count or hx.ndim != 3 or hx.shape[:2] != (count, batch):
        return False
    size = hx.shape[2] if cx is None else cx.shape[2]
    if cx is not None and (cx.ndim != 3 or cx.shape[:2] != (count, batch)):
        return False
    rows = CELLS[cell].gates * size
    for k, (w_ih, w_hh, b_ih, b_hh, w_hr) in enumerate(weights):
        taken = features if k < directions else hx.shape[2] * directions
        shapes = ((w_ih, (rows, taken)), (w_hh, (rows, hx.shape[2])), (b_ih, (rows,)), (b_hh, (rows,)))
        if any(t is not None and t.shape != shape for t, shape in shapes):
            return False
        if (hx.shape[2] != size) if w_hr is None else (w_hr.shape != (hx.shape[2], size)):
            return False
    return True


def _kernel(cell: str, packs: bool) -> Callable[..., Any]:
    """The kernel of an op of torch's: `packs`, whether its input is packed."""
    op = getattr(getattr(torch.ops.aten, cell), "data" if packs else "input")
    two = cell == "lstm"

    def compute(
        data: Tensor,
        first: Any,
        second: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool = False,
    ) -> Any:
        given = (data, first, second, params, has_biases, num_layers, dropout, train, bidirectional)
        state = second if packs else first
        states = list(state) if two else [state]
        directions = 2 if bidirectional else 1
        biased = bool(has_biases)
        each = 2 + 2 * biased

        def as_torch_does() -> Any:
            return op.decompose(*(given if packs else (data, first, *given[3:], batch_first)))

        hx, cx = states[0], states[1] if len(states) == 2 else None
        projected = two and cx is not None and hx.shape[-1] != cx.shape[-1]
        if (
            len(states) != 1 + two
            or data.ndim != (2 if packs else 3)
            or not data.numel()
            or len(params) % (each + projected)
            or not _plain(data, *states, *params)
        ):
            return as_torch_does()
        weights = _weights(params, biased, projected)
        if packs and (second is None or not first.is_cpu or first.ndim != 1):
            return as_torch_does()
        batch = int(first[0]) if packs else data.shape[0 if batch_first else 1]
        if not _fits(cell, data.shape[-1], batch, hx, cx, weights, num_layers, directions):
            return as_torch_does()
        packed = _Packed.of(first, data.device) if packs else None
        if batch_first:
            data = data.transpose(0, 1)
        out, hy, cy = _layers(cell, data, packed, hx, cx, weights, directions, dropout if train else 0.0)
        if batch_first:
            out = out.transpose(0, 1)
        return (out, hy, cy) if two else (out, hy)

    if packs:
        return compute

    def of_input(data: Tensor, hx: Any, params: Sequence[Tensor], *rest: Any, **named: Any) -> Any:
        return compute(data, hx, None, params, *rest, **named)

    return of_input


# They stand at autograd's key as well: below it torch has taken the layer apart.
KERNELS: dict[str, Callable[..., Any]] = {
    f"{cell}.{'data' if packs else 'input'}": _kernel(cell, packs) for cell in CELLS for packs in (False, True)
}
