"""Linear algebra against ATen: values, signs, `info` and the errors that only values reveal."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import torch
from fused_eager.fusion_rules.lowering import NoLowering
from jax.experimental import serialize_executable

from fused_eager import fused_eager

from .errors import assert_keeps_nan, assert_same, assert_same_error, lowered
from .harness import sweep

A = torch.ops.aten
OLD = ["cholesky"] * hasattr(A, "cholesky")  # torch 2.14 has taken it out
NAMES = [*OLD, "linalg.cholesky_ex", "cholesky_inverse", "cholesky_solve", "linalg.qr", "geqrf", "linalg.inv_ex",
         "linalg.householder_product", "linalg.lu", "linalg.lu_factor_ex", "lu_unpack", "linalg.lu_solve",
         "linalg.solve_triangular", "triangular_solve", "linalg.pinv",
         "matrix_exp", "linalg.cross"]  # fmt: skip


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", NAMES)
def test_sweep(name: str) -> None:
    mode = sweep([name], [torch.float64], limit=2, backward=False)
    assert mode.checked and not mode.problems


@pytest.mark.parametrize("shape", [(7, 4), (4, 7), (2, 5, 5), (60, 60), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
def test_qr_has_lapacks_signs(shape: tuple[int, ...], mode: str) -> None:
    assert_same(A.linalg_qr.default, torch.randn(shape, dtype=torch.float64), mode)


def spd(n: int = 4) -> torch.Tensor:
    x = torch.randn(n, n, dtype=torch.float64)
    return x @ x.T + torch.eye(n)


@pytest.mark.parametrize("upper", [False, True])
def test_cholesky_reads_one_triangle(upper: bool) -> None:
    x = spd()
    (x.tril_ if upper else x.triu_)(0)
    x = x.T.contiguous() if upper else x
    assert_same(A.linalg_cholesky_ex.default, torch.triu(x) if upper else torch.tril(x.T), upper=upper)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("bad", [0, 2, 3])
@pytest.mark.parametrize("value", [-1.0, 0.0, float("nan")])
def test_cholesky_says_where_it_failed(bad: int, value: float) -> None:
    x = torch.stack([spd(), spd()])
    # Positive up to there: the Schur complement of the leading block is `value`.
    x[1] = torch.eye(4)
    x[1, bad, bad] = value
    want = A.linalg_cholesky_ex(x)
    got = lowered(A.linalg_cholesky_ex.default, list(want), x)
    assert got[1].tolist() == want[1].tolist() == [0, bad + 1]
    torch.testing.assert_close(got[0][0], want[0][0])
    if OLD:
        assert_same_error(A.cholesky.default, x, x)
        assert_same_error(A.cholesky.default, x[1], x[1])


@pytest.mark.parametrize("number", [1.7 * torch.finfo(torch.float64).tiny, 1e-200, 1e300])
def test_cholesky_says_that_it_failed_whatever_the_size_of_the_numbers(number: float) -> None:
    """Products of entries underflow or overflow here where those of the factor's do not."""
    singular, indefinite = torch.ones(3, 3).double(), torch.tensor([[1.0, 2, 0], [2, 1, 0], [0, 0, 1]]).double()
    x = torch.stack([singular, indefinite, torch.eye(3).double()]) * number
    want = A.linalg_cholesky_ex(x)
    got = lowered(A.linalg_cholesky_ex.default, list(want), x)
    assert got[1][1:].tolist() == want[1][1:].tolist() == [2, 0]
    assert bool(got[1][0]) == bool(got[0][0].isnan().any())  # singular: up to rounding


@pytest.mark.parametrize("shape", [(3, 3), (2, 5, 3), (3, 5), (2, 0, 3, 3)], ids=str)
def test_lu(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    assert_same(A.linalg_lu_factor_ex.default, x)
    assert_same(A.linalg_lu.default, x)
    lu, pivots, _ = A.linalg_lu_factor_ex(x)
    assert_same(A.lu_unpack.default, lu, pivots)
    assert_same(A.lu_unpack.default, lu, pivots, True, False)


def test_singular_matrices_are_reported_in_info() -> None:
    x = torch.stack([torch.diag(torch.tensor(d)) for d in ([1.0, 2.0, 3.0], [1.0, 0.0, 0.0], [1.0, 2.0, 0.0])])
    assert lowered(A.linalg_inv_ex.default, list(A.linalg_inv_ex(x)), x)[1].tolist() == [0, 2, 3]
    assert_same(A.linalg_lu_factor_ex.default, x)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("adjoint", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_lu_solve(left: bool, adjoint: bool, dtype: torch.dtype) -> None:
    lu, pivots = torch.linalg.lu_factor(torch.randn(3, 4, 4, dtype=dtype))
    assert_same(A.linalg_lu_solve.default, lu, pivots, torch.randn(3, 4, 4, dtype=dtype), left=left, adjoint=adjoint)


def test_values_that_are_not_finite_raise() -> None:
    x = torch.randn(3, 3)
    x[1, 1] = torch.inf
    try:
        A.linalg_pinv.atol_rtol_tensor(x)
    except RuntimeError:
        assert_same_error(A.linalg_pinv.atol_rtol_tensor, x, x)
    else:
        pytest.skip("this build of LAPACK does not refuse them (what is done then: the next test)")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_numbers_whose_reciprocals_are_subnormal(dtype: torch.dtype) -> None:
    """LAPACK divides by multiplying with a reciprocal, which XLA would flush to zero."""
    m = torch.finfo(dtype).max / 2
    upper = torch.tensor([[m, m / 2, 1.0], [0.0, m, m / 4], [0.0, 0.0, 2.0]], dtype=dtype)
    right = torch.tensor([[m], [m / 2], [3.0]], dtype=dtype)
    solve = A.linalg_solve_triangular.default
    for a, is_upper in ((upper, True), (upper.mT.contiguous(), False)):
        assert_same(solve, a, right, upper=is_upper)
        assert_same(solve, a, right.mT.contiguous(), upper=is_upper, left=False)
    assert_same(A.linalg_lu_factor_ex.default, torch.tensor([[m, m / 2], [m / 2, m], [1.0, m]], dtype=dtype))
    small = torch.finfo(dtype).tiny * 2
    assert_same(A.linalg_lu_factor_ex.default, torch.tensor([[m, small], [0.0, small]], dtype=dtype))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_the_inverse_of_an_infinity_is_refused_and_not_waited_for(value: float) -> None:
    """XLA's `svd` of it never ends."""
    x = torch.stack([torch.eye(5), torch.full((5, 5), 1.0).index_put((torch.tensor(0),) * 2, torch.tensor(value))])
    for options in ({"mode": "fused"}, {"mode": "strict"}):
        with (
            fused_eager(compile="wait", **options),
            pytest.raises(torch.linalg.LinAlgError, match=r"Batch element 1.*non-finite"),
        ):
            torch.linalg.pinv(x).sum().item()
    with fused_eager(compile="wait", check_bounds=False):
        found = torch.linalg.pinv(x)
        assert torch.equal(found[0], torch.eye(5)) and found[1].isnan().all()


def test_vectors_stay_with_aten() -> None:
    x = torch.randn(3, 3)
    for op in (A._linalg_svd.default, A._linalg_eigh.default):
        with pytest.raises(NoLowering):
            lowered(op, list(op(x)), x)


def test_a_finished_executable_finds_lapack_in_another_process(tmp_path: Path) -> None:
    compiled = jax.jit(jax.lax.linalg.lu).lower(jax.ShapeDtypeStruct((3, 3), "float32")).compile()
    file = tmp_path / "executable"
    file.write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))
    program = f"""
import pickle, numpy as np
from jax.experimental import serialize_executable
from fused_eager.fusion_rules.lapack import prepare
prepare()
loaded = serialize_executable.deserialize_and_load(*pickle.loads(open({str(file)!r}, "rb").read()))
print(loaded(np.eye(3, dtype=np.float32) * 2)[0].trace())
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}  # which it was made for
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "6.0"


@pytest.mark.thinned(3)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 7, 24])
def test_no_nan_is_lost(value: float, place: int) -> None:
    for rows, columns in ((5, 5), (3, 5), (5, 3)):
        a = torch.randn(2, rows, columns)
        a[0].view(-1)[place % a[0].numel()] = value
        assert_keeps_nan(A.linalg_lu_factor_ex.default, a)
        assert_keeps_nan(A.linalg_lu.default, a)
        assert_keeps_nan(A.linalg_qr.default, a)
        assert_keeps_nan(A.geqrf.default, a)
    a = torch.randn(2, 5, 5)
    a[0].view(-1)[place] = value
    assert_keeps_nan(A.linalg_inv_ex.default, a)


@pytest.mark.parametrize("upper", [False, True])
def test_no_nan_is_lost_by_a_factor_of_infinities(upper: bool) -> None:
    assert_keeps_nan(A.linalg_cholesky_ex.default, torch.full((5, 5), float("inf")), upper=upper)
    # The other triangle is not looked at.
    a = torch.eye(3) + torch.triu(torch.full((3, 3), float("nan")), 1)
    assert_same(A.linalg_cholesky_ex.default, a.mT if upper else a, upper=upper)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.int32])
def test_cross_rounds_each_product(dtype: torch.dtype) -> None:
    x, y = (torch.randn(2, 5, 3) * 20).to(dtype).unbind(0)
    want = torch.linalg.cross(x, y)
    got = lowered(A.linalg_cross.default, want, x, y)
    assert isinstance(got, list)
    torch.testing.assert_close(got[0], want)
    if dtype == torch.float16:
        large = torch.full((1, 3), 65504.0, dtype=dtype)
        got = lowered(A.linalg_cross.default, large, large, large)
        assert isinstance(got, list) and got[0].isnan().all()  # inf - inf
