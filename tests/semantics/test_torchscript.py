"""TorchScript, FX and Dynamo inside a context: they know functions of torch by identity."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from fused_eager import fused_eager

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


def as_list(x: torch.Tensor) -> torch.Tensor:
    numbers: list[float] = (x + 1).tolist()
    return x * torch.tensor(numbers)


def printed(x: torch.Tensor) -> torch.Tensor:
    y = x * 3
    print(y)
    return y + 1


def as_text(x: torch.Tensor) -> str:
    return str(x * 2) + f"{x + 1}" + "%s" % x  # noqa: UP031 - each is another op of the interpreter


def asserted(x: torch.Tensor) -> torch.Tensor:
    assert bool(x.sum() > 0), f"not {x}"
    return x.sin()


class Reading(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return as_list(x * 2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", [as_list, printed, as_text, asserted])
def test_script_that_reads_in_the_interpreter(function: Any, mode: str, capfd: pytest.CaptureFixture[str]) -> None:
    def program() -> Any:
        scripted = torch.jit.script(function)
        return scripted(pending()), scripted(pending(3) + 1)

    check(program, mode)
    plain, *ours = capfd.readouterr().out.split("CPUFloatType{3} ]\n")
    assert all(printed == plain for printed in ours[:-1])


def too_wide(x: torch.Tensor) -> torch.Tensor:
    return x + torch.ones(3)


def of_no_kernel(x: torch.Tensor) -> torch.Tensor:
    return x.sparse_mask(x)


def in_a_list(x: torch.Tensor) -> list[torch.Tensor]:
    return torch._foreach_add([x], [x, x])


@torch.jit.ignore
def caught(x):  # TorchScript does not find what annotations name here
    with pytest.raises(RuntimeError):
        x @ torch.ones(7, 7)
    return x


def after_another(x: torch.Tensor) -> torch.Tensor:
    return caught(x) + torch.ones(3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", [too_wide, of_no_kernel, in_a_list, after_another])
def test_an_error_in_scripted_code_has_its_words(function: Any, mode: str) -> None:
    """The interpreter quotes exceptions of C++; one of Python, as what a mode raises, it quotes without its words."""
    scripted = torch.jit.script(function)
    x = torch.arange(4.0)
    with pytest.raises(RuntimeError) as plain:
        scripted(x)
    with fused_eager(mode=mode), pytest.raises(RuntimeError) as ours:
        scripted(x * 2)
    assert (ours.type, str(ours.value)) == (plain.type, str(plain.value))


@pytest.mark.filterwarnings("ignore")
def test_scripted_module_that_reads_in_the_interpreter(mode: str) -> None:
    check(lambda: [torch.jit.script(Reading())(pending()) for _ in range(2)], mode)


@pytest.mark.filterwarnings("ignore")
def test_graphs_with_constants_are_printed(mode: str) -> None:
    def program() -> Any:
        graph = torch.jit.trace(lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]), pending()).graph
        return [len(f"{graph}"), len(str(graph)), *sorted(len(str(node)) for node in graph.nodes())]

    check(program, mode)


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


@pytest.mark.filterwarnings("ignore")
def test_the_graph_of_a_trace_is_printed(mode: str) -> None:
    def program() -> Any:
        traced = torch.jit.trace(lambda x: (x * 2 + x.sin()).sum(0), pending())
        return str(traced.graph).count("aten::"), traced(pending())

    check(program, mode)


class Scripted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4) * 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu() + self.shift


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kept", ["script", "trace", "freeze", "optimize_for_inference", "function", "deepcopy"])
def test_save_and_load(kept: str, mode: str) -> None:
    def program() -> Any:
        scripted: Any = torch.jit.script(Scripted().eval())
        if kept == "trace":
            scripted = torch.jit.trace(Scripted().eval(), pending())
        elif kept == "function":
            scripted = torch.jit.script(with_tensor)
        elif kept == "deepcopy":
            scripted = copy.deepcopy(scripted)
        elif kept != "script":
            scripted = getattr(torch.jit, kept)(scripted)
        file = io.BytesIO()
        torch.jit.save(scripted, file)
        file.seek(0)
        with torch.no_grad():  # which autograd node a module's result has hangs on how often its class has been called
            return torch.jit.load(file)(pending()), scripted(pending())

    check(program, mode)


@pytest.mark.filterwarnings("ignore")
def test_save_for_mobile(mode: str) -> None:
    def program() -> Any:
        from torch.jit.mobile import _load_for_lite_interpreter

        scripted = torch.jit.script(Scripted().eval())
        file = io.BytesIO(scripted._save_to_buffer_for_lite_interpreter())
        return _load_for_lite_interpreter(file).forward(pending())

    check(program, mode)


@pytest.mark.filterwarnings("ignore")  # quantized tensors are on their way out
def test_a_method_of_a_class_in_cpp(mode: str) -> None:
    """It is called as scripted code is, and has no graph."""

    def program() -> Any:
        weight = torch.quantize_per_tensor(pending().reshape(2, 2), 0.1, 0, torch.qint8)
        return torch.ops.quantized.linear_prepack(weight, None).unpack()[0].dequantize()

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
