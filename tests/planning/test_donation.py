"""Donation: an input's memory goes to an output that nothing reads it after, and XLA has nothing left to copy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fused_eager import fused_eager, xla
from fused_eager.compiling import compile as compiling
from fused_eager.compiling.executable import Made
from fused_eager.executing import load
from fused_eager.planning.donation import pairs
from fused_eager.planning.plan import Region
from fused_eager.tracing.stream import Node
from tests.streams import HOME, all_rows_in_blocks, aten, flush_now, node

ADD, RELU = aten.add.Tensor, aten.relu.default


def paired(nodes: list[Node], outputs: list[int], free: list[int], inputs: tuple[int, ...] = (0, 1)) -> dict[int, int]:
    homes = {**dict.fromkeys(inputs, HOME), **{r.vid: r.home for n in nodes for r in n.results}}
    return pairs(nodes, range(len(nodes)), inputs, outputs, free, homes)


def test_what_is_written_in_place_stays_in_its_place() -> None:
    # Two parameters and one step: each has another output before its own.
    crossed = [node(2, [0, 1], ADD, base=1), node(3, [0, 2], ADD, base=0)]
    assert paired(crossed, [2, 3], [0, 1]) == {0: 3, 1: 2}
    again = [node(2, [0], base=0), node(3, [2, 1], ADD, base=2)]
    assert paired(again, [3], [0, 1]) == {0: 3}, "written over twice"


def test_nothing_is_given_to_an_output_that_it_is_read_after() -> None:
    early = [node(2, [1]), node(3, [2, 0, 1], ADD)]
    assert paired(early, [2, 3], [1]) == {1: 3}
    assert paired([node(2, [1]), node(3, [0, 1], ADD)], [2], [0, 1]) == {}, "beside each other"


def test_xla_reads_the_operand_of_an_op_of_one_operand_again() -> None:
    scaled = [node(2, [0]), node(3, [2, 1], ADD)]
    assert paired(scaled, [2, 3], [0]) == {0: 3}
    assert paired(scaled, [2], [0]) == {}
    summed = [node(2, [0, 1], ADD), node(3, [2, 1], ADD)]
    assert paired(summed, [2, 3], [0]) == {0: 2}


@pytest.mark.parametrize("op", [aten.mm.default, aten.flip.default, aten.sort.default, aten.cumsum.default])
def test_what_reads_elements_in_another_order_does_not_write_over_them(op: Any) -> None:
    assert paired([node(2, [0], op)], [2], [0]) == {}
    assert paired([node(2, [0], op), node(3, [2])], [3], [0]) == {0: 3}, "it is read by then"


# ---- what XLA makes of it -------------------------------------------------------------------------------------------


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The optimised code of the regions that are compiled from now on, the last one of equal ones."""
    texts: list[str] = []
    build = compiling.build

    def made(nodes: Any, region: Region, *rest: Any) -> Made:
        result = build(nodes, region, *rest)
        texts.append(xla.compiled(result.lowered).as_text())
        return result

    monkeypatch.setattr(compiling, "build", made)
    load.forget()
    yield texts
    load.forget()


def steady(step: Callable[[], object], code: list[str]) -> str:
    """The code of the last region that had to be compiled while a step was repeated."""
    with fused_eager(compile="wait", native="never", cache="off"):
        for _ in range(4):
            step()
            flush_now()
    return code[-1]


def copied(text: str, size: int) -> list[str]:
    """The copies of `size` numbers in a region."""
    return re.findall(rf"= f32\[{size}\]\S* copy\(.*", text)


OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD for": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=False),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("blocks", [False, True], ids=["", "blocks"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_copies_no_parameter_and_no_moment(name: str, blocks: bool, code: list[str]) -> None:
    size = 3001
    parameters = [torch.randn(size, requires_grad=True) for _ in range(4)]
    for p in parameters:
        p.grad = torch.randn(size)
    optimizer = OPTIMIZERS[name](parameters)
    if blocks:
        with all_rows_in_blocks():
            text = steady(optimizer.step, code)
    else:
        text = steady(optimizer.step, code)
    # Moments and parameters that are written are written where they were.
    assert text.count("may-alias") >= 2 * len(parameters)
    assert copied(text, size) == []


def test_a_gradient_that_is_scaled_and_used_is_not_copied(code: list[str]) -> None:
    size = 3001
    x, grad = torch.randn(size), torch.randn(size)
    state = {"x": x.clone(), "grad": grad.clone()}

    def step() -> None:
        state["grad"] = state["grad"] * 0.5
        state["x"].add_(state["grad"] + state["x"], alpha=-0.1)

    text = steady(step, code)
    assert copied(text, size) == []
    expected = x.numpy()
    for _ in range(4):
        grad = grad * 0.5
        expected = expected - 0.1 * (grad.numpy() + expected)
    np.testing.assert_allclose(state["x"].numpy(), expected, rtol=1e-5, atol=1e-6)
