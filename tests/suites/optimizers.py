"""Run every optimizer of torch.optim with all the options that torch's own suite knows, and compare it with eager.

Each trains a few parameters for some steps under a schedule, is saved and loaded, and gets another group of parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.common_optimizers import (
    OptimizerInfo,
    OptimizerInput,
    _get_optim_inputs_including_global_cliquey_kwargs,
    optim_db,
)
from torch.utils._pytree import tree_leaves

from tests.ops.outcomes import own

STEPS = 4
OPTIMIZERS: dict[str, OptimizerInfo] = {info.optim_cls.__name__: info for info in optim_db}


def options(name: str, dtype: torch.dtype) -> list[OptimizerInput]:
    """All options of an optimizer, its implementations (foreach, fused, differentiable) among them."""
    return _get_optim_inputs_including_global_cliquey_kwargs("cpu", dtype, OPTIMIZERS[name])


def run(name: str, given: OptimizerInput, dtype: torch.dtype, sparse: bool = False) -> Callable[[], list[Any]]:
    """A function that trains for some steps and returns losses, parameters and the optimizer's state.

    With `sparse`, gradients are sparse tensors. Where the options say `differentiable`, the steps are differentiated.
    """
    info, kwargs = OPTIMIZERS[name], own(given.kwargs)
    if kwargs.get("differentiable"):
        return _through_its_steps(info, kwargs, dtype)

    def program() -> list[Any]:
        torch.manual_seed(1)
        if sparse:
            module: torch.nn.Module = torch.nn.Embedding(7, 3, sparse=True)
            x = torch.tensor([[0, 2], [2, 5]])
        else:
            # Muon takes matrices alone.
            module = torch.nn.Sequential(*[torch.nn.Linear(4, 4, bias=name != "Muon") for _ in range(2)])
            x = torch.randn(5, 4, dtype=dtype)
        module.to(dtype)
        late = torch.nn.Parameter(torch.randn(4, 4, dtype=dtype))
        optimizer = info.optim_cls(module.parameters(), **kwargs)
        is_tensor = any(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups)
        schedule = None if is_tensor else torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        seen: list[Any] = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = module(x).pow(2).mean() + (0.0 if sparse else (late.tanh() @ late).sum())
            loss.backward()
            return loss

        def train() -> None:
            for _ in range(STEPS):
                if info.step_requires_closure:
                    loss = optimizer.step(closure)
                else:
                    loss = closure()
                    with torch.no_grad():
                        optimizer.step()
                seen.append(loss.detach().clone())
                if schedule is not None:
                    schedule.step()

        train()
        optimizer.load_state_dict(own(optimizer.state_dict()))
        if not sparse and name != "LBFGS":  # which takes one group alone
            optimizer.add_param_group({"params": [late]})
        train()
        seen += [*module.parameters(), late]
        if name == "LBFGS":
            return seen  # its state holds differences of gradients that are nearly equal: rounding, for the most part
        held = [x for x in tree_leaves(optimizer.state_dict()) if x is not None]
        numbers = [torch.tensor(x, dtype=torch.float64) if isinstance(x, float) else x for x in held]
        return [*seen, *[p.grad for p in module.parameters() if not sparse], *numbers]

    return program


def _through_its_steps(info: OptimizerInfo, kwargs: dict[str, Any], dtype: torch.dtype) -> Callable[[], list[Any]]:
    """The gradients, with respect to start and slope, of where some steps lead: such parameters are no leaves."""

    def program() -> list[Any]:
        torch.manual_seed(1)
        start, slope = (torch.randn(3, 2, dtype=dtype, requires_grad=True) for _ in range(2))
        parameter = start.clone()
        parameter.grad = slope
        optimizer = info.optim_cls([parameter], **kwargs)
        for _ in range(STEPS):
            optimizer.step()
        parameter.pow(2).sum().backward()
        return [parameter, start.grad, slope.grad]

    return program
