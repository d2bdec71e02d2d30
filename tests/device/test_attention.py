"""Attention on the device is one op and its derivative is one, with the values, gradients and errors of the CPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

Tensor = torch.Tensor


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def operands(device: str, shared: int = 4, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 12, 8), (2, shared, 10, 8), (2, shared, 10, 8)]
    return [torch.randn(s, generator=g).to(device, dtype).requires_grad_() for s in shapes]


SEEN = torch.rand(2, 1, 12, 10, generator=torch.Generator().manual_seed(1)) < 0.6
SEEN[0, 0, 3] = False  # one that sees nothing
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": ((), {}),
    "causal": ((), {"is_causal": True, "scale": 0.3}),
    "a mask": ((SEEN,), {}),
    "a mask that is added": ((torch.randn(12, 10, generator=torch.Generator().manual_seed(2)),), {}),
    "grouped heads": ((), {"is_causal": True, "enable_gqa": True}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_cpus(name: str, dtype: torch.dtype) -> None:
    masks, more = CASES[name]
    results = []
    for device in ("cpu", "tpu"):
        given = operands(device, 2 if "enable_gqa" in more else 4, dtype)
        mask = [m.to(device) if m.dtype is torch.bool else m.to(device, dtype) for m in masks]
        with Seen() as seen:
            out = F.scaled_dot_product_attention(*given, *mask, **more)
            out.sin().sum().backward()
        results.append([x.detach().cpu() for x in (out, *[t.grad for t in given])])  # type: ignore[union-attr]
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    assert [op for op in seen.ops if "bmm" in op] == []
    assert sum("flash_attention_for_cpu" in op for op in seen.ops) == 2


@pytest.mark.parametrize("why", ["dropout", "a mask that learns", "it is forbidden", "another width of values"])
def test_what_the_op_has_not_goes_torchs_way(why: str) -> None:
    q, k, v = operands("tpu")
    mask = None
    if why == "a mask that learns":
        mask = torch.zeros(12, 10, device="tpu", requires_grad=True)
    if why == "another width of values":
        v = torch.ones(2, 4, 10, 5, device="tpu")
    allowed = [SDPBackend.MATH] if why == "it is forbidden" else [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(allowed), Seen() as seen:
        out = F.scaled_dot_product_attention(q, k, v, mask, 0.5 if why == "dropout" else 0.0)
        out.sum().backward()
    assert not any("flash" in op for op in seen.ops) and q.grad is not None and bool(q.grad.isfinite().all())
    if mask is not None:
        assert mask.grad is not None and bool(mask.grad.abs().sum() > 0)


def test_derivatives_of_derivatives_and_tangents() -> None:
    def twice(device: str) -> list[Tensor]:
        given = operands(device, dtype=torch.float64)
        out = F.scaled_dot_product_attention(*given, is_causal=True)
        with torch.enable_grad():
            first = torch.autograd.grad(out.sin().sum(), given, create_graph=True)
        second = torch.autograd.grad(sum(t.square().sum() for t in first), given)
        return [x.detach().cpu() for x in (*first, *second)]

    with sdpa_kernel(SDPBackend.MATH):
        expected = twice("cpu")
    torch.testing.assert_close(twice("tpu"), expected)
    q, k, v = (x.detach() for x in operands("tpu", dtype=torch.float64))
    _, tangent = torch.func.jvp(lambda x: F.scaled_dot_product_attention(x, k, v), (q,), (q,))
    eps = 1e-6
    moved = F.scaled_dot_product_attention(q + eps * q, k, v) - F.scaled_dot_product_attention(q - eps * q, k, v)
    torch.testing.assert_close(tangent.cpu(), (moved / (2 * eps)).cpu(), rtol=1e-5, atol=1e-7)


def test_transforms_of_torch_func() -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v).sin().sum()

    found = []
    for device in ("cpu", "tpu"):
        given = [x.detach() for x in operands(device, dtype=torch.float64)]
        each = [x[:, None] for x in given]  # a batch of batches of one
        with sdpa_kernel(SDPBackend.MATH):
            found.append([x.cpu() for x in (*torch.func.grad(loss, (0, 1, 2))(*given), torch.func.vmap(loss)(*each))])
    torch.testing.assert_close(found[1], found[0])
    assert torch.func.grad(loss)(*given).shape == given[0].shape


def test_errors_are_eagers() -> None:
    q, k, v = operands("tpu")
    with pytest.raises(RuntimeError, match="is_causal"):
        F.scaled_dot_product_attention(q, k, v, torch.ones(12, 10, device="tpu"), is_causal=True)
    with pytest.raises(RuntimeError, match="same dtype"):
        F.scaled_dot_product_attention(q, k.double(), v)
