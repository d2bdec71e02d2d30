"""Linear algebra whose results are determined by the input: factorisations with fixed signs, solves, inverses.

No row has a freedom that two LAPACK libraries use differently: eigenvectors and singular vectors (signs, bases of
equal values), general eigenvalues (order), least squares and Bunch-Kaufman stay with ATen. Under a dispatch mode
torch computes vectors even for `svdvals` and `eigvalsh`. Also left to ATen are the three ops that return the factors
of either A or its transpose, depending on A's strides (`_linalg_det`, `_linalg_slogdet`, `_linalg_solve_ex`).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
from jax import lax
from jax.lax import linalg

from .axes import upcast
from .elementwise import product
from .lowering import Context, NoLowering
from .precision import matmul_precision, rounded
from .rule import OpClass, rule
from .spec import JAX_DTYPE

# Batches up to this size get a check per matrix, so that the message can name it.
MOST_CHECKS = 16
SOURCE = "the result of lu_factor?"
NOT_FINITE = "The algorithm failed to converge because the input matrix contained non-finite values."
SINGULAR = (
    "The diagonal element {value} is zero, the inversion could not be completed because the input matrix is singular."
)
NOT_POSITIVE = (
    "The factorization could not be completed because the input is not positive-definite "
    "(the leading minor of order {value} is not positive-definite)."
)


def _adjoint(x: jax.Array) -> jax.Array:
    return jnp.conj(x.mT)


def _empty(cx: Context, number: int) -> jax.Array:
    spec = cx.out[number]
    return jnp.zeros(spec.shape, JAX_DTYPE[spec.dtype])


def _share_batch(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both with the same leading dimensions."""
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return tuple(jnp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b))  # type: ignore[return-value]


def _scale(largest: jax.Array) -> jax.Array:
    """2^-8 where a number is so large that its reciprocal, with which LAPACK divides, would be flushed; else 1."""
    limit = 2.0 ** (int(jnp.finfo(largest.dtype).maxexp) - 8)
    return jnp.where(largest > limit, np.asarray(2.0**-8, largest.dtype), np.asarray(1, largest.dtype))


def _magnitude(a: jax.Array) -> jax.Array:
    return jnp.maximum(jnp.abs(a.real), jnp.abs(a.imag)) if jnp.iscomplexobj(a) else jnp.abs(a)


def _triangular(
    a: jax.Array, b: jax.Array, *, upper: bool, left: bool = True, unit: bool = False, transpose: bool = False,
    conjugate: bool = False,
) -> jax.Array:  # fmt: skip
    """Solve `op(a) x = b`, or `x op(a) = b` for `left=False`; batches broadcast."""
    a, b = _share_batch(a, b)
    if 0 in b.shape:
        return b
    if not unit:
        # Equations, each with its own side of the diagonal, are multiplied by what changes no solution.
        scale = _scale(_magnitude(jnp.diagonal(a, axis1=-2, axis2=-1)))
        by_rows, by_columns = scale[..., :, None], scale[..., None, :]
        a = a * (by_rows if left != transpose else by_columns)
        b = b * (by_rows if left else by_columns)
    return linalg.triangular_solve(
        a, b, left_side=left, lower=not upper, transpose_a=transpose, conjugate_a=conjugate, unit_diagonal=unit
    )


def _check_each(cx: Context, bad: jax.Array, value: jax.Array, api: str, text: str) -> None:
    """eager's `torch.linalg.LinAlgError` for one matrix, or for the first of a batch that is bad."""
    if not bad.ndim:
        return cx.check(bad, "_LinAlgError", f"{api}: {text}", value)
    if bad.size > MOST_CHECKS:
        raise NoLowering("an error would have to name one of many matrices")
    for i, (b, v) in enumerate(zip(bad.reshape(-1), value.reshape(-1), strict=True)):
        cx.check(b, "_LinAlgError", f"{api}: (Batch element {i}): {text}", v)


def _is_finite(a: jax.Array) -> jax.Array:
    """Whether each matrix holds numbers alone."""
    return jnp.isfinite(a).all((-2, -1))


def _spoiled(x: jax.Array, good: jax.Array) -> jax.Array:
    """Matrices (or vectors, by their number of batches) with NaN in all of those that are not good.

    LAPACK libraries search for pivots differently where there is a NaN: what one of them loses, the other one spreads.
    """
    good = good.reshape(good.shape + (1,) * (x.ndim - good.ndim))
    return jnp.where(good, x, np.asarray(np.nan, x.dtype))


def _bad_minor(a: jax.Array) -> jax.Array:
    """The order of the first leading minor that is not positive, 0 if there is none: column by column, as LAPACK."""
    n = a.shape[-1]
    real = jnp.arange(n)

    def column(k: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rest, info = state
        pivot = lax.dynamic_index_in_dim(lax.dynamic_index_in_dim(rest, k, -1, False), k, -1, False).real
        bad = ~(pivot > 0)
        info = jnp.where((info == 0) & bad, k.astype(jnp.int32) + 1, info)
        # The factor's own column: products of entries as they are would underflow, or overflow, where its do not.
        scale = jnp.sqrt(jnp.where(bad, 1, pivot)).astype(rest.dtype)
        col = lax.dynamic_index_in_dim(rest, k, -1, False) * (real > k) / scale[..., None]
        return rest - col[..., :, None] * jnp.conj(col)[..., None, :], info

    lower = jnp.tril(a)
    full = lower + _adjoint(jnp.tril(a, -1))
    return lax.fori_loop(0, n, column, (full, jnp.zeros(a.shape[:-2], jnp.int32)))[1]


def _cholesky(a: jax.Array, upper: bool) -> tuple[jax.Array, jax.Array]:
    """The factor, reading one triangle only, and LAPACK's `info`."""
    if 0 in a.shape:
        return a, jnp.zeros(a.shape[:-2], jnp.int32)
    a = _adjoint(a) if upper else a
    factor = linalg.cholesky(a, symmetrize_input=False)
    failed = ~jnp.isfinite(jnp.diagonal(factor, axis1=-2, axis2=-1)).all(-1)
    # XLA says that it failed, not where: looked for only then.
    info = lax.cond(failed.any(), _bad_minor, lambda x: jnp.zeros(x.shape[:-2], jnp.int32), a)
    finite = _is_finite(jnp.tril(a))
    # Where that rounds to another answer, it is the last one: no factor is NaN without a word.
    info = jnp.where(failed & finite & (info == 0), np.int32(a.shape[-1]), info)
    factor = jnp.tril(_spoiled(factor, finite & ~failed))
    return _adjoint(factor) if upper else factor, info


@rule("linalg_cholesky_ex.default", OpClass.LINALG)
def linalg_cholesky_ex(cx: Context, self: Any, *, upper: bool = False, check_errors: bool = False) -> Any:
    factor, info = _cholesky(self, upper)
    if check_errors:
        _check_each(cx, info != 0, info, "torch.linalg.cholesky_ex", NOT_POSITIVE)
    return factor, info


@rule("cholesky.default", OpClass.LINALG)
def cholesky(cx: Context, self: Any, upper: bool = False) -> Any:
    factor, info = _cholesky(self, upper)
    _check_each(cx, info != 0, info, "cholesky", NOT_POSITIVE)
    return factor


def _cholesky_solve(factor: jax.Array, b: jax.Array, upper: bool) -> jax.Array:
    """`x` of `factor factor^H x = b` (upper: `factor^H factor`)."""
    first = _triangular(factor, b, upper=upper, transpose=upper, conjugate=upper)
    return _triangular(factor, first, upper=upper, transpose=not upper, conjugate=not upper)


@rule("cholesky_solve.default", OpClass.LINALG)
def cholesky_solve(cx: Context, self: Any, input2: Any, upper: bool = False) -> Any:
    return _cholesky_solve(input2, self, upper)


@rule("cholesky_inverse.default", OpClass.LINALG)
def cholesky_inverse(cx: Context, self: Any, upper: bool = False) -> Any:
    if self.size:
        zero = jnp.diagonal(self, axis1=-2, axis2=-1) == 0
        _check_each(cx, zero.any(-1), jnp.argmax(zero, -1) + 1, "cholesky_inverse", SINGULAR)
    return _cholesky_solve(self, jnp.broadcast_to(jnp.eye(self.shape[-1], dtype=self.dtype), self.shape), upper)


@rule("linalg_solve_triangular.default", OpClass.LINALG)
def linalg_solve_triangular(
    cx: Context, self: Any, B: Any, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    return _triangular(self, B, upper=upper, left=left, unit=unitriangular)


@rule("triangular_solve.default", OpClass.LINALG)
def triangular_solve(
    cx: Context, self: Any, A: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Any:
    x = _triangular(A, self, upper=upper, transpose=transpose, unit=unitriangular)
    return x, jnp.broadcast_to(A, cx.out[1].shape)


@rule("linalg_qr.default", OpClass.LINALG)
def linalg_qr(cx: Context, A: Any, mode: str = "reduced") -> Any:
    m = A.shape[-2]
    if 0 in A.shape:
        eye = jnp.broadcast_to(jnp.eye(m, dtype=A.dtype), (*A.shape[:-2], m, m))
        return eye[..., : cx.out[0].shape[-1]] if mode != "r" else _empty(cx, 0), _empty(cx, 1)
    q, r = (_spoiled(x, _is_finite(A)) for x in linalg.qr(A, full_matrices=mode == "complete"))
    return (_empty(cx, 0) if mode == "r" else q), jnp.triu(r)


@rule("geqrf.default", OpClass.LINALG)
def geqrf(cx: Context, self: Any) -> Any:
    if 0 in self.shape:
        return self, _empty(cx, 1)
    reflectors, tau = jnp.linalg.qr(self, mode="raw")
    return _spoiled(reflectors.mT, _is_finite(self)), _spoiled(tau, _is_finite(self))


@rule("linalg_householder_product.default", OpClass.LINALG)
def linalg_householder_product(cx: Context, input: Any, tau: Any) -> Any:
    if 0 in input.shape:
        return input
    k = tau.shape[-1]
    if k == 0:
        m, n = input.shape[-2:]
        return jnp.broadcast_to(jnp.eye(m, n, dtype=input.dtype), input.shape)
    return linalg.householder_product(input, tau)


if hasattr(linalg, "ormqr"):  # jax has it since 0.10

    @rule("ormqr.default", OpClass.LINALG)
    def ormqr(
        cx: Context, self: Any, input2: Any, input3: Any, left: bool = True, transpose: bool = False
    ) -> Any:
        if 0 in self.shape or 0 in input2.shape or 0 in input3.shape:
            return input3
        good = _is_finite(self) & jnp.isfinite(input2).all(-1) & _is_finite(input3)
        return _spoiled(linalg.ormqr(self, input2, input3, left=left, transpose=transpose), good)


def _lu(a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Factors in one matrix, pivots from 1, LAPACK's `info`, and the permutation of rows."""
    *batch, m, n = a.shape
    k = min(m, n)
    if 0 in a.shape:
        rows = jnp.broadcast_to(jnp.arange(m, dtype=jnp.int32), (*batch, m))
        return a, jnp.zeros((*batch, k), jnp.int32), jnp.zeros(batch, jnp.int32), rows
    # What a column is multiplied by is in U alone.
    scale = _scale(_magnitude(a).max(-2, keepdims=True))
    lu, pivots, permutation = linalg.lu(a * scale)
    lu = jnp.where(jnp.triu(jnp.ones((m, n), bool)), lu / scale, lu)
    zero = jnp.diagonal(lu, axis1=-2, axis2=-1) == 0
    info = jnp.where(zero.any(-1), jnp.argmax(zero, -1).astype(jnp.int32) + 1, 0)
    return _spoiled(lu, _is_finite(a)), pivots + 1, info, permutation


def _unpack(lu: jax.Array) -> tuple[jax.Array, jax.Array]:
    m, n = lu.shape[-2:]
    k = min(m, n)
    # Not by adding: 0.0 would come of -0.0.
    return jnp.where(jnp.eye(m, k, dtype=bool), jnp.ones((), lu.dtype), jnp.tril(lu[..., :, :k], -1)), jnp.triu(
        lu[..., :k, :]
    )


def _permutation_matrix(permutation: jax.Array, dtype: Any) -> jax.Array:
    """P of `A = P L U`."""
    rows = jnp.arange(permutation.shape[-1], dtype=permutation.dtype)
    return (permutation[..., None, :] == rows[:, None]).astype(dtype)


def _lu_solve(lu: jax.Array, permutation: jax.Array, b: jax.Array, left: bool, adjoint: bool) -> jax.Array:
    """`x` of `A x = b` or `x A = b`, with A or its adjoint, from the factors of A."""
    if not left:
        return _adjoint(_lu_solve(lu, permutation, _adjoint(b), True, not adjoint))
    lu, b = _share_batch(lu, b)
    order = jnp.broadcast_to(permutation, (*b.shape[:-2], permutation.shape[-1]))
    if adjoint:
        first = _triangular(lu, b, upper=True, transpose=True, conjugate=True)
        x = _triangular(lu, first, upper=False, unit=True, transpose=True, conjugate=True)
        return jnp.take_along_axis(x, jnp.argsort(order, -1)[..., None], -2)
    first = _triangular(lu, jnp.take_along_axis(b, order[..., None], -2), upper=False, unit=True)
    return _triangular(lu, first, upper=True)


@rule("linalg_lu_factor_ex.default", OpClass.LINALG)
def linalg_lu_factor_ex(cx: Context, A: Any, *, pivot: bool = True, check_errors: bool = False) -> Any:
    if not pivot or check_errors:
        raise NoLowering("LU without pivoting, or with errors that name their matrix")
    return _lu(A)[:3]


@rule("linalg_lu.default", OpClass.LINALG)
def linalg_lu(cx: Context, A: Any, *, pivot: bool = True) -> Any:
    if not pivot:
        raise NoLowering("LU without pivoting")
    lu, _, _, permutation = _lu(A)
    return _permutation_matrix(permutation, A.dtype), *_unpack(lu)


@rule("lu_unpack.default", OpClass.LINALG)
def lu_unpack(cx: Context, LU_data: Any, LU_pivots: Any, unpack_data: bool = True, unpack_pivots: bool = True) -> Any:
    p, lower, upper = _empty(cx, 0), _empty(cx, 1), _empty(cx, 2)
    if unpack_pivots and p.size:
        message = "pivots passed to lu_unpack must be between 1 and LU.size(-2) inclusive.Did you properly pass"
        cx.check_index(LU_pivots, 1, LU_data.shape[-2] + 1, "RuntimeError", f"{message} {SOURCE}")
        p = _permutation_matrix(_order(LU_pivots, LU_data.shape[-2]), LU_data.dtype)
    if unpack_data:
        lower, upper = _unpack(LU_data)
    return p, lower, upper


def _order(pivots: jax.Array, m: int) -> jax.Array:
    """The permutation that a list of row swaps (from 1) makes of `m` rows."""
    if 0 in pivots.shape:
        return jnp.broadcast_to(jnp.arange(m, dtype=jnp.int32), (*pivots.shape[:-1], m))
    return linalg.lu_pivots_to_permutation(pivots - 1, m)


@rule("linalg_lu_solve.default", OpClass.LINALG)
def linalg_lu_solve(cx: Context, LU: Any, pivots: Any, B: Any, *, left: bool = True, adjoint: bool = False) -> Any:
    if 0 in B.shape:
        return _empty(cx, 0)
    message, most = f"Pivots given to lu_solve must all be {{bound}}. Did you properly pass {SOURCE}", LU.shape[-2]
    cx.check((pivots < 1).any(), "RuntimeError", message.format(bound="greater or equal to 1"))
    cx.check((pivots > most).any(), "RuntimeError", message.format(bound="smaller or equal to LU.size(-2)"))
    return _lu_solve(LU, _order(pivots, LU.shape[-1]), B, left, adjoint)


@rule("linalg_inv_ex.default", OpClass.LINALG)
def linalg_inv_ex(cx: Context, A: Any, *, check_errors: bool = False) -> Any:
    if check_errors:
        raise NoLowering("an inverse with errors that name their matrix")
    lu, _, info, permutation = _lu(A)
    eye = jnp.broadcast_to(jnp.eye(A.shape[-1], dtype=A.dtype), A.shape)
    return (A if 0 in A.shape else _lu_solve(lu, permutation, eye, True, False)), info


def _finite(cx: Context, a: jax.Array, api: str) -> tuple[jax.Array, jax.Array]:
    """The matrices, zeros in place of those that are refused, as XLA's `svd` of an infinity never ends; and which are
    not."""
    good = _is_finite(a)
    _check_each(cx, ~good, jnp.zeros(good.shape, jnp.int64), api, NOT_FINITE)
    return jnp.where(good[..., None, None], a, np.asarray(0, a.dtype)), good


@rule("linalg_pinv.atol_rtol_tensor", OpClass.LINALG)
def linalg_pinv(cx: Context, self: Any, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Any:
    if 0 in self.shape:
        return _empty(cx, 0)
    default = jnp.finfo(self.dtype).eps * max(self.shape[-2:])
    if rtol is None:
        rtol = default if atol is None else jnp.where(atol > 0, 0.0, default)
    atol, good = 0.0 if atol is None else atol, None
    if hermitian:
        if jnp.issubdtype(self.dtype, jnp.complexfloating):
            raise NoLowering("LAPACK libraries differ in what they make of a diagonal that is not real")
        lower = jnp.tril(self)
        vectors, values = linalg.eigh(lower + _adjoint(jnp.tril(self, -1)), symmetrize_input=False)
        u, vh, size = vectors, _adjoint(vectors), jnp.abs(values)
    else:
        finite, good = _finite(cx, self, "linalg.svd")
        u, values, vh = linalg.svd(finite, full_matrices=False)
        size = values
    bound = jnp.maximum(jnp.asarray(rtol, size.dtype) * size.max(-1), jnp.asarray(atol, size.dtype))
    kept = size > bound[..., None]
    inverse = jnp.where(kept, 1 / jnp.where(kept, values, 1), 0).astype(self.dtype)
    found = jnp.matmul(_adjoint(vh) * inverse[..., None, :], _adjoint(u), precision=matmul_precision())
    return found if good is None else _spoiled(found, good)


@rule("linalg_matrix_exp.default", OpClass.LINALG)
def linalg_matrix_exp(cx: Context, self: Any) -> Any:
    if 0 in self.shape:
        return self
    if math.prod(self.shape[-2:]) == 1:
        return jnp.exp(self)
    # Each squaring doubles the relative error, and ATen's polynomial begins with a smaller one: wider, rounded once.
    wide = {"float32": jnp.float64, "complex64": jnp.complex128}.get(self.dtype.name, self.dtype)
    return jax.scipy.linalg.expm(self.astype(wide), max_squarings=64).astype(self.dtype)


@rule("linalg_cross.default", OpClass.SHAPE)
def linalg_cross(cx: Context, self: Any, other: Any, *, dim: int = -1) -> Any:
    dtype = cx.out[0].dtype
    x, y = (upcast(v) for v in jnp.broadcast_arrays(self, other))
    (a, b, c), (d, e, f) = ([lax.index_in_dim(v, i, dim, False) for i in range(3)] for v in (x, y))

    def times(u: Any, v: Any) -> Any:
        return rounded(product(u, v), dtype)  # ATen rounds each product to a half type

    parts = [times(b, f) - times(c, e), times(c, d) - times(a, f), times(a, e) - times(b, d)]
    return jnp.stack(parts, dim).astype(JAX_DTYPE[dtype])
