"""Flex attention in a graph: its ops are those of the stream, with eager's values, gradients and errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._higher_order_ops.flex_attention import flex_attention as operator
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from fused_eager import export, fused_eager
from fused_eager.frontends.compiler.backend import compile_graph

Tensor = torch.Tensor
HEADS, LENGTH, WIDTH = 4, 48, 8
_seeded = torch.Generator().manual_seed(0)
SLOPES = torch.randn(HEADS, generator=_seeded)
DOCUMENTS = torch.arange(LENGTH) // 17
TABLE = torch.randn(2 * LENGTH, generator=_seeded)


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


# What changes a score, what says which are seen, and what else is asked for.
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "plain": (None, None, {}),
    "a slope by head": (lambda s, b, h, i, j: s + SLOPES[h] * (j - i), causal, {}),
    "documents": (None, lambda b, h, i, j: (DOCUMENTS[i] == DOCUMENTS[j]) & (i >= j), {}),
    "distances": (lambda s, b, h, i, j: 20 * torch.tanh((s + TABLE[i - j + LENGTH]) / 20), None, {}),
    "a window, grouped heads": (None, lambda b, h, i, j: (i >= j) & (i - j < 9), {"enable_gqa": True}),
    "a row that sees nothing": (None, lambda b, h, i, j: i > j, {"return_aux": AuxRequest(lse=True)}),
}


def operands(heads: int = HEADS, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    q = torch.randn(2, HEADS, length, WIDTH, generator=g)
    return q, *(torch.randn(2, heads, length, WIDTH, generator=g) for _ in range(2))  # type: ignore[return-value]


@pytest.mark.thinned(3)
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("mode", ["fused", "strict"])
@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_eager_does_and_nothing_is_left_to_torch(name: str, mode: str) -> None:
    score, seen, more = CASES[name]
    mask = None if seen is None else create_block_mask(seen, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q * 1.5, k, v, score_mod=score, block_mask=mask, **more)

    given = operands(2 if "enable_gqa" in more else HEADS)
    options = {"mode": mode, "islands": "refuse"}
    found = torch.compile(attend, backend=compile_graph, fullgraph=True, options=options)(*given)
    torch.testing.assert_close(found, attend(*given), rtol=1e-4, atol=1e-5)


def test_gradients_are_eagers_those_of_what_a_score_reads_too() -> None:
    """Through the operator itself: torch's function takes no tensors of the CPU's that need gradients."""
    mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16).as_tuple()

    def attend(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        about = {"BACKEND": "TRITON"}
        return operator(q, k, v, lambda s, b, h, i, j: s + slopes[h] * (j - i), mask, 0.3, about)[0].sin()

    def outcome(function: Callable[..., Tensor]) -> list[Tensor]:
        given = [x.clone().requires_grad_() for x in (*operands(), SLOPES)]
        out = function(*given)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), given)]

    reference = outcome(torch.compile(attend, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()
    options = {"islands": "refuse"}
    found = outcome(torch.compile(attend, backend=compile_graph, fullgraph=True, options=options))
    torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-5)


def test_an_index_that_is_out_of_range_in_a_score_is_an_error() -> None:
    few = torch.randn(10)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + few[i])

    with pytest.raises(IndexError, match=r"index 10 is out of bounds.*test_flex"):
        torch.compile(attend, backend=compile_graph)(*operands())


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_lengths_may_vary() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * 1.1 + i - j)

    compiled = torch.compile(attend, backend=compile_graph, dynamic=True)
    for length in (16, 20, 24, 25):
        given = operands(length=length)
        torch.testing.assert_close(compiled(*given), attend(*given), rtol=1e-4, atol=1e-5)


class Attending(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + (j - i) * 0.1)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_it_is_exported(tmp_path: Path) -> None:
    given = operands()
    program = export(Attending(), given, tmp_path / "flex", platforms=("cpu",))
    torch.testing.assert_close(program(*given), Attending()(*given), rtol=1e-4, atol=1e-5)


@pytest.mark.thinned(3)
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("mode", ["fused", "strict", "debug"])
def test_a_context_takes_the_call_as_it_is(mode: str) -> None:
    mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
    given = operands()
    expected = flex_attention(*given, block_mask=mask)
    with fused_eager(mode=mode, native="never"):
        found = flex_attention(*given, block_mask=mask)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
