"""The matmul family against eager."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from fused_eager.fusion_rules import lower_matmul
from fused_eager.fusion_rules.lower import lower
from fused_eager.fusion_rules.lowering import Places
from fused_eager.fusion_rules.spec import spec_of
from fused_eager.fusion_rules.xla_cpu.matmul import MM_BY_ROWS

from fused_eager.xla import enable_x64

from .errors import assert_same, lowered
from .harness import sweep, to_jax, to_torch

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


@pytest.mark.parametrize("dims", [lower_matmul.MM, MM_BY_ROWS])
def test_a_bfloat16_operand_may_be_what_a_clamp_makes_of_a_transposed_matrix(dims: Any) -> None:
    """XLA:CPU would lay it out as no kernel of its own takes it."""
    x, y = (torch.randn(16, 6).bfloat16() for _ in range(2))

    def made(x: Any, y: Any) -> Any:
        return lower_matmul.product(jnp.clip(x.T, 0, 1), y if dims == lower_matmul.MM else jnp.clip(y.T, -9, 9), dims)

    found = torch.from_numpy(np.array(jax.jit(made)(to_jax(x), to_jax(y))))
    torch.testing.assert_close(found, x.t().clamp(0, 1).float() @ y.float(), rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [256, 1000, 1001, 1007])
def test_a_left_operand_by_columns_is_turned_block_by_block(columns: int, dtype: torch.dtype) -> None:
    """As in the gradient of a weight; the last block lies over the one before it where 16 does not divide them."""
    base, other = torch.randn(columns, 256, dtype=dtype), torch.randn(columns, 24, dtype=dtype)
    base[-1, 7], base[columns // 2, 9], other[3, 2] = float("nan"), float("inf"), float("-inf")
    bias = torch.randn(24, dtype=dtype)
    for op, before in ((A.mm.default, ()), (A.addmm.default, (bias,))):
        expected = op(*before, base.t(), other)
        out = (spec_of(expected),)

        def program(x: Any, *rest: Any, op: Any = op, out: Any = out) -> Any:
            left = x.T
            return lower(op, [*rest[:-1], left, rest[-1]], {}, out, places=Places(by_columns=[left]))[0][0]

        with enable_x64(True):
            arguments = [to_jax(t) for t in (base, *before, other)]
            assert "dynamic_slice" in str(jax.make_jaxpr(program)(*arguments))
            found = to_torch(jax.jit(program)(*arguments), expected)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_what_is_small_or_lies_by_rows_is_not_turned() -> None:
    def program(rows: int, columns: int, by_columns: bool) -> str:
        def product(x: Any, y: Any) -> Any:
            left = x.T
            out = (spec_of(torch.empty(rows, 8)),)
            return lower(A.mm.default, [left, y], {}, out, places=Places(by_columns=[left if by_columns else y]))[0][0]

        return str(jax.make_jaxpr(product)(to_jax(torch.ones(columns, rows)), to_jax(torch.ones(columns, 8))))

    def is_turned(rows: int, columns: int, by_columns: bool = True) -> bool:
        return "dynamic_slice" in program(rows, columns, by_columns)

    assert is_turned(256, 256)
    assert not is_turned(256, 256, by_columns=False)
    assert not is_turned(64, 64) and not is_turned(250, 300) and not is_turned(8192, 8)


def test_gradients_of_weights_are_eager_s() -> None:
    """Weights whose gradient's left operand is turned, one that is a part of a wider matrix among them."""
    from fused_eager import fused_eager

    grad, wide = torch.randn(300, 256), torch.randn(280, 512)
    inputs, others = torch.randn(300, 40), torch.randn(280, 40)

    def program() -> tuple[torch.Tensor, ...]:
        return (grad * 2).t() @ inputs, wide[:, 128:384].t() @ others, torch.addmm(grad[:1, :40], grad.t(), inputs)

    expected = program()
    with fused_eager(mode="fused"):
        found = program()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
