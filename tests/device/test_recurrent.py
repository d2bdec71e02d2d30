"""LSTM, GRU and RNN on the device: results and gradients as on the CPU, in a few ops whatever the number of steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fused_eager.frontends.device.doors import DOORS

from .compare import TPU, same

TIME, BATCH, FEATURES, HIDDEN = 6, 3, 4, 5
CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "lstm": ("LSTM", False, {}),
    "lstm, deep, both ways": ("LSTM", False, {"num_layers": 2, "bidirectional": True}),
    "lstm, packed, both ways": ("LSTM", True, {"bidirectional": True, "batch_first": True}),
    "lstm, projected": ("LSTM", False, {"proj_size": 3, "num_layers": 2}),
    "lstm, projected, packed": ("LSTM", True, {"proj_size": 3, "bidirectional": True}),
    "lstm, float64": ("LSTM", False, {"dtype": torch.float64, "bias": False}),
    "gru": ("GRU", False, {"batch_first": True}),
    "gru, packed, deep": ("GRU", True, {"num_layers": 2, "bidirectional": True}),
    "gru, no bias": ("GRU", False, {"bias": False}),
    "tanh": ("RNN", False, {"num_layers": 2}),
    "relu, packed": ("RNN", True, {"nonlinearity": "relu", "bidirectional": True}),
}


def trained(model: nn.Module, x: torch.Tensor, packed: bool) -> list[torch.Tensor]:
    """Everything that a layer makes of an input, and the gradients."""
    first = bool(model.batch_first)
    given = pack_padded_sequence(x, [TIME, TIME - 2, 1], first) if packed else x
    out, states = model(given)
    if packed:
        out = pad_packed_sequence(out, first)[0]
    states = states if isinstance(states, tuple) else (states,)
    (out.square().sum() + sum((s**3).sum() for s in states)).backward()
    return [out, *states, x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


def layer(name: str, **more: Any) -> tuple[nn.Module, torch.Tensor]:
    kind, _, given = CASES[name]
    torch.manual_seed(0)
    made = getattr(nn, kind)(FEATURES, HIDDEN, **given, **more)
    x = torch.randn(TIME, BATCH, FEATURES, dtype=given.get("dtype", torch.float32))
    return made, x.transpose(0, 1) if made.batch_first else x


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_the_cpus(name: str) -> None:
    model, x = layer(name)
    packed = CASES[name][1]
    want = trained(copy.deepcopy(model), x.clone().requires_grad_(), packed)
    same(want, trained(model.to(TPU), x.to(TPU).requires_grad_(), packed))


def test_a_step_more_is_no_op_more() -> None:
    model, _ = layer("lstm")
    model.to(TPU)
    torch.tpu.synchronize()
    counts = []
    for time in (3, 50):
        x = torch.zeros(time, BATCH, FEATURES, device=TPU)
        out, _ = model(x)
        out.sum().backward()
        counts.append(len(DOORS[0].stream.nodes))
        model.zero_grad()
        torch.tpu.synchronize()
    assert counts[0] == counts[1] < 20


def test_no_gradients_and_inference() -> None:
    model, x = layer("lstm, deep, both ways")
    want = model(x)[0]
    model.to(TPU)
    with torch.no_grad():
        same(want, model(x.to(TPU))[0])
    with torch.inference_mode():
        same(want, model(x.to(TPU))[0])


@pytest.mark.parametrize("name", ["lstm, float64", "gru"])
def test_derivatives_of_derivatives(name: str) -> None:
    model, x = layer(name)
    model, x = model.double(), x[:2, :2].double()

    def twice(m: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        given = [x.requires_grad_(), *m.parameters()]
        first = torch.autograd.grad(m(x)[0].square().sum(), given, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), given))  # type: ignore[arg-type]

    want = twice(copy.deepcopy(model), x.clone())
    same(want, twice(model.to(TPU), x.to(TPU)))


def test_tangents_and_gradients_as_functions() -> None:
    model, x = layer("lstm")

    def derived(m: nn.Module, x: torch.Tensor, t: torch.Tensor) -> Any:
        forward = torch.func.jvp(lambda x: m(x)[0], (x,), (t,))
        return [*forward, torch.func.grad(lambda x: m(x)[0].sum())(x)]

    model, x = model.double(), x[:2].double()
    want = derived(model, x, torch.ones_like(x))
    same(want, derived(model.to(TPU), x.to(TPU), torch.ones_like(x).to(TPU)))


def test_autocast_computes_in_the_lower_dtype() -> None:
    model, x = layer("gru")
    want, _ = model(x)
    model.to(TPU)
    with torch.autocast("tpu", dtype=torch.bfloat16):
        got, state = model(x.to(TPU))
    assert got.dtype is torch.bfloat16 and state.dtype is torch.bfloat16
    same(want, got.float(), tolerance=2e-2)
    got.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())


def test_mistakes_raise_as_on_the_cpu() -> None:
    # In float64: oneDNN, which has float32, takes them all.
    state = [torch.zeros(1, BATCH, HIDDEN)] * 2
    weights = [torch.zeros(4 * HIDDEN, FEATURES + 1), torch.zeros(4 * HIDDEN, HIDDEN)]
    for x in (torch.zeros(TIME, BATCH, FEATURES), torch.zeros(TIME, BATCH + 1, FEATURES + 1)):
        for device in ("cpu", "tpu"):
            with pytest.raises(RuntimeError):
                torch.lstm(
                    x.double().to(device),
                    [s.double().to(device) for s in state],
                    [w.double().to(device) for w in weights],
                    has_biases=False,
                    num_layers=1,
                    dropout=0.0,
                    train=False,
                    bidirectional=False,
                    batch_first=False,
                )
