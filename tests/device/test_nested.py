"""Nested tensors on the device: what torch has for them on the CPU, and the encoder layers that make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from fused_eager.log.events import LOG

from .compare import TPU, same

pytestmark = pytest.mark.filterwarnings("ignore:.*nested.*")
Tensor = torch.Tensor


def ragged(device: Any, layout: torch.layout = torch.strided, grad: bool = False) -> Tensor:
    parts = [torch.arange(4.0).reshape(2, 2), torch.ones(3, 2)]
    return torch.nested.nested_tensor(parts, device=device, layout=layout, requires_grad=grad)


def plain(value: Any) -> Any:
    """Nested tensors as the lists of plain ones that they are."""
    if isinstance(value, Tensor):
        return list(value.detach().unbind()) if value.is_nested else value.detach()
    return [plain(v) for v in value]


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize(
    "program",
    [
        lambda n, d: n * 2 + n,
        lambda n, d: [n.relu(), n.sin(), n.neg(), functional.silu(n), functional.gelu(n)],
        lambda n, d: n.to_padded_tensor(-1.0),
        lambda n, d: n.to(torch.float64),
        lambda n, d: n.clone(),
        lambda n, d: functional.linear(n, torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.5, 1.5]], device=d)),
        lambda n, d: functional.layer_norm(n, (2,), torch.tensor([1.0, 2.0], device=d), torch.ones(2, device=d)),
        lambda n, d: torch.softmax(n, -1),
        lambda n, d: torch.zeros_like(n),
    ],
)
def test_nested_tensors_compute_as_on_the_cpu(program: Callable[..., Any], layout: torch.layout) -> None:
    want, got = (plain(program(ragged(d, layout), d)) for d in ("cpu", TPU))
    same(want, got)


@pytest.mark.parametrize(
    "program",
    [
        lambda n, d: [n == 1, n > 0.5, n / 2.5, n - n],
        lambda n, d: [n.mul_(3), n.fill_(2), n.zero_()],
        lambda n, d: n.copy_(n * 2),
        lambda n, d: torch.bmm(n, n.transpose(1, 2)),
        lambda n, d: [n.sum(-1, keepdim=True), n[0], n.chunk(2, -1)[1], torch.cat([n, n])],
        lambda n, d: n.masked_fill(n > 1, 0.0),
        lambda n, d: torch._transform_bias_rescale_qkv(
            torch.nested.nested_tensor([torch.ones(2, 12), torch.ones(3, 12)], device=d), torch.ones(12, device=d), 2
        ),
    ],
)
def test_what_strided_ones_can_besides(program: Callable[..., Any]) -> None:
    want, got = (plain(program(ragged(d), d)) for d in ("cpu", TPU))
    same(want, got)


def test_they_go_there_and_back() -> None:
    n = ragged("cpu")
    there = n.to(TPU)
    assert there.is_nested and there.device == TPU and "device='tpu:0'" in repr(there)
    same(plain(n), plain(there))
    back = there.cpu()
    assert [t.tolist() for t in back.unbind()] == [t.tolist() for t in n.unbind()]


def test_gradients_go_through_them() -> None:
    def grads(d: Any) -> list[Tensor]:
        torch.manual_seed(0)
        layer, norm = nn.Linear(2, 3).to(d), nn.LayerNorm(3).to(d)
        a, b = torch.ones(2, 2, device=d, requires_grad=True), torch.ones(3, 2, device=d, requires_grad=True)
        n = torch.nested.as_nested_tensor([a * 2, b])
        y = norm(layer(n * n))
        total = torch.nested.to_padded_tensor(y * y, 0.0).sum() + y.sum(-1, keepdim=True).to_padded_tensor(0.0).sum()
        total.backward()
        return [t.grad for t in (a, b, *layer.parameters(), *norm.parameters())]  # type: ignore[misc]

    same(grads("cpu"), grads(TPU))


def test_an_op_that_torch_has_not_for_them_is_refused_as_on_the_cpu() -> None:
    for d in ("cpu", TPU):
        with pytest.raises(NotImplementedError, match=r"aten::cumsum.*NestedTensor"):
            ragged(d).cumsum(-1)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_an_encoder_leaves_zeros_where_there_is_padding(norm_first: bool, mask: bool) -> None:
    def encoded(d: Any) -> Tensor:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval().to(d)
        padding = torch.tensor([[False, False, False, True], [False, False, True, True]], device=d)
        with torch.inference_mode():
            return model(torch.randn(2, 4, 8).to(d), src_key_padding_mask=padding if mask else None)  # type: ignore[no-any-return]

    want, got = encoded("cpu"), encoded(TPU)
    same(want, got)
    assert bool((got[0, 3] == 0).all()) == (mask and not norm_first)


def test_what_runs_on_the_host_is_told() -> None:
    ragged(TPU).sum(-1, keepdim=True)
    assert any(e.data["op"] == "aten.sum.dim_IntList" for e in LOG.of("island"))
