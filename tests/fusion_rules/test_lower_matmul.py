"""The matmul family against eager."""

from __future__ import annotations

from typing import Any

import jax
import pytest
import torch
from fused_eager.fusion_rules.lowering import lower
from fused_eager.fusion_rules.spec import spec_of

from .errors import assert_same, lowered
from .harness import sweep, to_jax

A = torch.ops.aten
NAMES = ["mm", "baddbmm", "addbmm", "addmv", "vdot", "addr", "nn.functional.linear", "nn.functional.bilinear", "einsum"]


@pytest.mark.parametrize("name", NAMES)
def test_sweep(name: str) -> None:
    mode = sweep([name], [torch.float64], limit=2)
    assert mode.checked and not mode.problems


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.complex64, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    a, b = (torch.randn(4, 5) * 9).to(dtype), (torch.randn(5, 3) * 9).to(dtype)
    assert_same(A.mm.default, a, b)
    assert_same(A.addmm.default, torch.ones(3).to(dtype), a, b)
    assert_same(A.bmm.default, a[None], b[None])
    assert_same(A.mv.default, a, b[:, 0])


def test_int_mm_accumulates_wide() -> None:
    a = torch.full((20, 64), 127, dtype=torch.int8)
    assert_same(A._int_mm.default, a, a.t().contiguous())


@pytest.mark.parametrize("op", [A.addmm.default, A.addbmm.default, A.addr.default, A.addmv.default], ids=str)
def test_beta_zero_ignores_what_it_multiplies(op: Any) -> None:
    operands = {
        "aten.addmm.default": (torch.randn(2, 3), torch.randn(3, 4)),
        "aten.addr.default": (torch.randn(2), torch.randn(4)),
        "aten.addbmm.default": (torch.randn(5, 2, 3), torch.randn(5, 3, 4)),
        "aten.addmv.default": (torch.randn(4, 3), torch.randn(3)),
    }[str(op)]  # fmt: skip
    assert_same(op, torch.full((4,) if "mv" in str(op) else (2, 4), float("nan")), *operands, beta=0, alpha=2)


def test_defaults_multiply_by_nothing() -> None:
    x, a, b = torch.randn(4), torch.randn(3, 5), torch.randn(5, 4)
    out = spec_of(A.addmm(x, a, b))
    program = str(jax.make_jaxpr(lambda *v: lower(A.addmm.default, list(v), {}, (out,))[0])(*map(to_jax, (x, a, b))))
    assert " mul " not in program and "dot_general" in program


def test_bfloat16_sums_in_float32() -> None:
    a, b = torch.full((1, 4096), 1.0).bfloat16(), torch.full((4096, 1), 1.0).bfloat16()
    got = lowered(A.mm.default, a @ b, a, b)
    assert got[0].item() == 4096  # a bfloat16 sum would stop at 256


@pytest.mark.parametrize(("beta", "alpha"), [(None, None), (True, False), (False, True), (2, 3)])
def test_addr_of_booleans(beta: Any, alpha: Any) -> None:
    x, v = torch.tensor([[True, False], [False, False]]), torch.tensor([True, False])
    kwargs = {} if beta is None else {"beta": beta, "alpha": alpha}
    assert_same(A.addr.default, x, v, v, **kwargs)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    assert_same(A.mm.default, torch.randn(m, k), torch.randn(k, n))
    assert_same(A.addmm.default, torch.randn(n), torch.randn(m, k), torch.randn(k, n))


def test_inference_mode_composites() -> None:
    x, w, b = torch.randn(2, 3, 5), torch.randn(4, 5), torch.randn(4)
    assert_same(A.linear.default, x, w, b)
    assert_same(A.linear.default, x[0, 0], w)
    for left, right in [((5,), (5,)), ((5,), (2, 5, 3)), ((2, 3, 5), (5,)), ((2, 1, 3, 5), (4, 5, 2))]:
        assert_same(A.matmul.default, torch.randn(left), torch.randn(right))
