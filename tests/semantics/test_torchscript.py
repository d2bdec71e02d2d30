"""TorchScript, FX and Dynamo inside a context: they know functions of torch by identity."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .programs import check, in_process


def pending(n: int = 4) -> torch.Tensor:
    """0, 2, 4, ... computed in the mode."""
    return torch.arange(float(n)) * 2


def with_tensor(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor(2.0)


def with_as_tensor(x: torch.Tensor) -> torch.Tensor:
    return x + torch.as_tensor(2.0)


def with_item(x: torch.Tensor) -> torch.Tensor:
    return x * float(x[1].item()) + torch.tensor([1.0, 2.0, 3.0, 4.0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", [with_tensor, with_as_tensor, with_item])
def test_script(function: Any, mode: str) -> None:
    check(lambda: torch.jit.script(function)(pending()), mode)


@pytest.mark.filterwarnings("ignore")
def test_script_a_module_and_freeze_it(mode: str) -> None:
    def program() -> Any:
        linear = torch.nn.Linear(4, 2).eval()
        scripted = torch.jit.script(linear)
        return scripted(pending()), torch.jit.freeze(scripted)(pending())

    check(program, mode)


@pytest.mark.filterwarnings("ignore")
def test_trace(mode: str) -> None:
    def program() -> Any:
        linear = torch.nn.Linear(4, 2)
        return (
            torch.jit.trace(lambda x: x * 2 + torch.tensor(1.0), pending())(pending()),
            torch.jit.trace(linear, pending())(pending()),
            torch.jit.trace_module(linear, {"forward": pending()})(pending()),
        )

    check(program, mode)


def test_fx(mode: str) -> None:
    check(lambda: torch.fx.symbolic_trace(with_tensor)(pending()), mode)


def test_a_module_of_torchs_that_scripts_when_it_is_imported() -> None:
    in_process(
        """
        from fused_eager import fused_eager
        with fused_eager():
            import torch.distributed.optim as optim
            assert optim.ZeroRedundancyOptimizer.__name__ == "ZeroRedundancyOptimizer"
        """,
        seconds=240,
    )
