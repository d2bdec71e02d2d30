"""The matmul family: products of matrices and vectors, summed as ATen sums them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from .lowering import Context
from .platforms import variants
from .precision import accumulator, matmul_precision, rounded
from .rule import OpClass, rule
from .spec import JAX_DTYPE

# Which dimensions of the two operands are contracted, and which are batch dimensions.
MM = (((1,), (0,)), ((), ()))
BMM = (((2,), (1,)), ((0,), (0,)))
BATCHES_SUMMED = (((0, 2), (0, 1)), ((), ()))
MV = (((1,), (0,)), ((), ()))
DOT = (((0,), (0,)), ((), ()))


@variants
def left_operand(x: jax.Array) -> jax.Array:
    """The left operand of a product, as the compiler finds it."""
    return x


def product(x: jax.Array, y: jax.Array, dims: Any, dtype: Any = None, precision: Any = None) -> jax.Array:
    """A contraction in the accumulator's dtype: `lax.dot_general` dimension numbers, result not yet rounded. Without a
    precision it has that of the matmul family.

    Asking XLA for a float32 result of bfloat16 operands, instead of converting them, keeps its bfloat16 kernels:
    on CPU 5.5 ms against 12.7 ms at 1024.
    """
    acc = accumulator(x.dtype) if dtype is None else np.dtype(dtype)
    precision = matmul_precision() if precision is None else precision
    return lax.dot_general(left_operand(x), y, dims, precision=precision, preferred_element_type=acc)


@variants
def matrices(cx: Context, x: jax.Array, y: jax.Array, dtype: Any = None) -> jax.Array:
    """`x @ y` of matrices, not yet rounded, however they lie in memory."""
    return product(x, y, MM, dtype)


def _times(x: jax.Array, factor: Any, acc: np.dtype) -> jax.Array:
    return x if factor is None else x * jnp.asarray(factor, acc)


def _affine(cx: Context, x: jax.Array, prod: jax.Array, beta: Any, alpha: Any) -> jax.Array:
    """`beta * x + alpha * prod` in the accumulator's dtype; None stands for the default 1 and costs nothing. A row is
    added in the shape in which the result is read."""
    acc, shape = prod.dtype, prod.shape
    if cx.places.read_as is not None and x.ndim == 1 and cx.places.read_as[-1:] == shape[-1:]:
        prod = prod.reshape(cx.places.read_as)
    x = x.astype(acc)
    if beta is not None:
        # ATen does not read `x` where beta is 0: its nan and inf must not come through.
        b = jnp.asarray(beta, acc)
        x = jnp.where(b == 0, jnp.zeros((), acc), x * b)
    return (jnp.broadcast_to(x, prod.shape) + _times(prod, alpha, acc)).reshape(shape)


@rule(["mm.default", "_int_mm.default"], OpClass.CONTRACTION)
def mm(cx: Context, self: Any, mat2: Any) -> Any:
    return matrices(cx, self, mat2, np.int32 if cx.out[0].dtype == torch.int32 else None)


@rule("bmm.default", OpClass.CONTRACTION)
def bmm(cx: Context, self: Any, mat2: Any) -> Any:
    return product(self, mat2, BMM)


@rule("mv.default", OpClass.CONTRACTION)
def mv(cx: Context, self: Any, vec: Any) -> Any:
    return product(self, vec, MV)


@rule("dot.default", OpClass.CONTRACTION)
def dot(cx: Context, self: Any, tensor: Any) -> Any:
    return product(self, tensor, DOT)


@rule("vdot.default", OpClass.CONTRACTION)
def vdot(cx: Context, self: Any, other: Any) -> Any:
    return product(jnp.conj(self), other, DOT)


@rule("mm.dtype", OpClass.CONTRACTION, defines=True)
def mm_dtype(cx: Context, self: Any, mat2: Any, out_dtype: Any) -> Any:
    return matrices(cx, self, mat2, JAX_DTYPE[cx.out[0].dtype])


@rule("bmm.dtype", OpClass.CONTRACTION, defines=True)
def bmm_dtype(cx: Context, self: Any, mat2: Any, out_dtype: Any) -> Any:
    return product(self, mat2, BMM, JAX_DTYPE[cx.out[0].dtype])


@rule("addmm.default", OpClass.CONTRACTION)
def addmm(cx: Context, self: Any, mat1: Any, mat2: Any, *, beta: Any = None, alpha: Any = None) -> Any:
    return _affine(cx, self, matrices(cx, mat1, mat2), beta, alpha)


@rule("addmm.dtype", OpClass.CONTRACTION, defines=True)
def addmm_dtype(
    cx: Context, self: Any, mat1: Any, mat2: Any, out_dtype: Any, *, beta: Any = None, alpha: Any = None
) -> Any:
    return _affine(cx, self, matrices(cx, mat1, mat2, JAX_DTYPE[cx.out[0].dtype]), beta, alpha)


@rule("baddbmm.default", OpClass.CONTRACTION)
def baddbmm(cx: Context, self: Any, batch1: Any, batch2: Any, *, beta: Any = None, alpha: Any = None) -> Any:
    return _affine(cx, self, product(batch1, batch2, BMM), beta, alpha)


@rule("baddbmm.dtype", OpClass.CONTRACTION, defines=True)
def baddbmm_dtype(
    cx: Context, self: Any, batch1: Any, batch2: Any, out_dtype: Any, *, beta: Any = None, alpha: Any = None
) -> Any:
    return _affine(cx, self, product(batch1, batch2, BMM, JAX_DTYPE[cx.out[0].dtype]), beta, alpha)


@rule("addbmm.default", OpClass.CONTRACTION)
def addbmm(cx: Context, self: Any, batch1: Any, batch2: Any, *, beta: Any = None, alpha: Any = None) -> Any:
    dtype = cx.out[0].dtype
    if accumulator(dtype) == JAX_DTYPE[dtype] or not batch1.shape[0]:
        return _affine(cx, self, product(batch1, batch2, BATCHES_SUMMED), beta, alpha)
    # ATen adds one batch after the other into a result of a half type.
    first = rounded(_affine(cx, self, product(batch1[0], batch2[0], MM), beta, alpha), dtype)

    def add(total: Any, pair: Any) -> Any:
        return rounded(_affine(cx, total, product(pair[0], pair[1], MM), None, alpha), dtype), None

    return lax.scan(add, first, (batch1[1:], batch2[1:]))[0]


@rule("addmv.default", OpClass.CONTRACTION)
def addmv(cx: Context, self: Any, mat: Any, vec: Any, *, beta: Any = None, alpha: Any = None) -> Any:
    return _affine(cx, self, product(mat, vec, MV), beta, alpha)


@rule("addr.default", OpClass.POINTWISE)
def addr(cx: Context, self: Any, vec1: Any, vec2: Any, *, beta: Any = None, alpha: Any = None) -> Any:
    dtype = cx.out[0].dtype
    x, a, b = (v.astype(JAX_DTYPE[dtype]) for v in (self, vec1[:, None], vec2[None, :]))
    if dtype == torch.bool:
        # Booleans multiply by `and` and add by `or`; a false factor removes its term.
        keep_x = True if beta is None else jnp.asarray(beta) != 0
        keep_ab = True if alpha is None else jnp.asarray(alpha) != 0
        return (keep_x & x) | (keep_ab & (a & b))
    acc = accumulator(dtype)
    x, a, b = x.astype(acc), a.astype(acc), b.astype(acc)
    # ATen rounds after every one of these operations in a half type.
    outer = rounded(rounded(_times(a, alpha, acc), dtype) * b, dtype)
    if beta is not None:
        factor = rounded(jnp.asarray(beta, acc), dtype)
        x = jnp.where(factor == 0, jnp.zeros((), acc), rounded(x * factor, dtype))
    return x + outer


@rule("_addmm_activation.default", OpClass.CONTRACTION)
def addmm_activation(
    cx: Context, self: Any, mat1: Any, mat2: Any, *, beta: Any = None, alpha: Any = None, use_gelu: bool = False
) -> Any:
    dtype = JAX_DTYPE[cx.out[0].dtype]
    # ATen activates what it has rounded.
    y = _affine(cx, self, matrices(cx, mat1, mat2), beta, alpha).astype(dtype).astype(accumulator(dtype))
    if use_gelu:
        return jax.nn.gelu(y, approximate=False)
    return jnp.where(y > 0, y, jnp.where(jnp.isnan(y), y, jnp.zeros((), y.dtype)))


@rule("matmul.default", OpClass.CONTRACTION)
def matmul(cx: Context, self: Any, other: Any) -> Any:
    # Arrives whole only in inference mode, where nothing decomposes it first.
    return jnp.matmul(self, other, precision=matmul_precision(), preferred_element_type=accumulator(self.dtype))


@rule("linear.default", OpClass.CONTRACTION)
def linear(cx: Context, input: Any, weight: Any, bias: Any = None) -> Any:
    dims = (((input.ndim - 1,), (weight.ndim - 1,)), ((), ()))
    y = product(input, weight, dims)
    return y if bias is None else y + bias.astype(y.dtype)


@rule("_trilinear.default", OpClass.CONTRACTION)
def trilinear(
    cx: Context, i1: Any, i2: Any, i3: Any, expand1: Any, expand2: Any, expand3: Any, sumdim: Any, unroll_dim: int = 1
) -> Any:
    """`sum(i1 * i2 * i3, sumdim)` after each operand got its size-1 dimensions, as two contractions."""
    rank = i1.ndim + len(expand1)
    letters = "abcdefghijklmnopqrstuvwxyz"[:rank]
    expands = (expand1, expand2, expand3)
    first, second, third = ("".join(c for d, c in enumerate(letters) if d not in e) for e in expands)
    kept = "".join(c for d, c in enumerate(letters) if d not in sumdim)
    pair = "".join(c for c in letters if c in first + second and c in kept + third)
    how: dict[str, Any] = {"precision": matmul_precision(), "preferred_element_type": accumulator(i1.dtype)}
    # ATen contracts two operands, stores that, then contracts with the third.
    both = rounded(jnp.einsum(f"{first},{second}->{pair}", i1, i2, **how), cx.out[0].dtype)
    found = "".join(c for c in kept if c in pair + third)
    y = jnp.einsum(f"{pair},{third}->{found}", both, i3.astype(both.dtype), **how)
    return y.reshape(cx.out[0].shape)
