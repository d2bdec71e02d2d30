"""Fused optimizer steps against ATen's kernels, option by option; and what the optimizers of `torch.optim` call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_eager.fusion_rules.rule import functional_twin

from .edges import assert_agrees
from .harness import LoweringCheck

A = torch.ops.aten


def lists(*count: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(sum(count))
    return [torch.randn(3, 4, generator=g), torch.randn(5, generator=g)]


def state(*count: int) -> list[torch.Tensor]:
    return [t.abs() for t in lists(*count)]


def steps(value: float) -> list[torch.Tensor]:
    return [torch.tensor(value), torch.tensor(value)]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"maximize": True},
    {"weight_decay": 0.1},
    {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(0.0)},
    {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(1.0)},
]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o))
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("name", ["_fused_adam", "_fused_adamw"])
def test_adam(name: str, amsgrad: bool, options: dict[str, Any]) -> None:
    named = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": amsgrad,
             "maximize": False, **options}
    args = [lists(0), lists(1), lists(2), state(3), state(4) if amsgrad else [], steps(3.0)]
    op = getattr(A, name)
    assert_agrees(op.default, *args, **named, rtol=1e-6, atol=1e-8)
    assert_agrees(op.tensor_lr, *args, **{**named, "lr": torch.tensor(0.01)}, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o))
@pytest.mark.parametrize(("momentum", "nesterov", "first"), [(0.0, False, False), (0.9, False, True),
                                                             (0.9, False, False), (0.9, True, False)])
def test_sgd(momentum: float, nesterov: bool, first: bool, options: dict[str, Any]) -> None:
    named = {"lr": 0.01, "weight_decay": 0.0, "momentum": momentum, "dampening": 0.0 if nesterov else 0.1,
             "nesterov": nesterov, "maximize": False, "is_first_step": first, **options}
    args = [lists(0), lists(1), lists(2) if momentum else []]
    assert_agrees(A._fused_sgd.default, *args, **named, rtol=1e-6, atol=1e-8)
    assert_agrees(A._fused_sgd.tensor_lr, *args, **{**named, "lr": torch.tensor(0.01)}, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o))
def test_adagrad(options: dict[str, Any]) -> None:
    named = {"lr": 0.01, "lr_decay": 0.1, "weight_decay": 0.0, "eps": 1e-10, "maximize": False, **options}
    args = [lists(0), lists(1), state(2), steps(3.0)]
    assert_agrees(A._fused_adagrad.default, *args, **named, rtol=1e-6, atol=1e-8)
    assert_agrees(A._fused_adagrad.tensor_lr, *args, **{**named, "lr": torch.tensor(0.01)}, rtol=1e-6, atol=1e-8)


class OptimizerCheck(LoweringCheck):
    """In-place list ops return nothing: their functional twins are compared before they run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and not func._schema.returns:
            twin = functional_twin(func)
            if twin is not None:
                super().__torch_dispatch__(twin, types, args, kwargs)
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize(("name", "options"), [
    ("Adam", {"foreach": True, "weight_decay": 0.1, "amsgrad": True}), ("Adam", {"fused": True}), ("AdamW", {}),
    ("AdamW", {"foreach": True}), ("SGD", {"momentum": 0.9, "nesterov": True, "foreach": True}), ("RMSprop",
    {"momentum": 0.9, "centered": True}), ("NAdam", {"foreach": True}), ("Rprop", {}), ("Adagrad", {"fused": True}),
])
def test_optimizers_stay_within_two_units_in_the_last_place(name: str, options: dict[str, Any]) -> None:
    params = [torch.nn.Parameter(t) for t in lists(0)]
    optimizer = getattr(torch.optim, name)(params, lr=0.01, **options)
    mode = OptimizerCheck(rtol=5e-7, atol=1e-8)
    for k in range(2):
        for p, g in zip(params, lists(1, k), strict=True):
            p.grad = g
        with mode:
            optimizer.step()
    assert mode.checked and not mode.problems
