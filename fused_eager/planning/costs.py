"""Costs: how long XLA takes to compile an op, by its kind.

Measured once, in processor time: a region of each op of torch's corpus alone, the least of several forms, less what a
region takes that does nearly nothing. The figures are of one machine, and rounded; what counts is how they compare.
What is not in the table is one loop over its elements, or as small, and takes a hundredth of a second.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch._ops import OpOverload

USUAL = 0.01  # seconds


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds that each of these ops takes, whatever the overload, and whether or not it is in place."""

    seconds: float
    why: str
    ops: str


COSTS: tuple[Cost, ...] = (
    Cost(0.45, "a series or a scatter for each of many terms", "special_zeta grid_sampler_2d_backward"),
    Cost(
        0.2,
        "a scan of pairs, or a recurrence written out",
        "cummax cummin polygamma linalg_cholesky_ex linalg_lu linalg_lu_factor_ex linalg_lu_solve "
        "special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w "
        "special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v "
        "special_shifted_chebyshev_polynomial_w",
    ),
    Cost(
        0.1,
        "scatters, and functions with many branches",
        "scatter_reduce index_add index_reduce masked_scatter_backward nll_loss_forward nll_loss_backward "
        "nll_loss2d_forward nll_loss2d_backward adaptive_max_pool2d linalg_qr linalg_pinv convolution_backward "
        "special_legendre_polynomial_p special_laguerre_polynomial_l special_hermite_polynomial_h "
        "special_hermite_polynomial_he special_bessel_y0 special_bessel_y1 special_modified_bessel_k0 "
        "special_modified_bessel_k1 special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 "
        "_upsample_bilinear2d_aa upsample_bicubic2d upsample_bicubic2d_backward",
    ),
    Cost(
        0.07,
        "sorts, scans, windows, indices",
        "sort topk kthvalue median nanmedian logcumsumexp scatter scatter_add put take index_fill convolution "
        "grid_sampler_2d max_pool2d_with_indices max_pool2d_with_indices_backward adaptive_max_pool2d_backward "
        "upsample_bilinear2d upsample_bilinear2d_backward upsample_trilinear3d upsample_trilinear3d_backward "
        "_upsample_bilinear2d_aa_backward native_layer_norm native_layer_norm_backward native_group_norm "
        "multi_margin_loss multi_margin_loss_backward linalg_householder_product binary_cross_entropy "
        "special_bessel_j0 special_bessel_j1 special_modified_bessel_i0 special_ndtri special_log_ndtr",
    ),
    Cost(
        0.04,
        "reductions that are read again, short scans, and gathers",
        "_softmax _safe_softmax _log_softmax index_select cumsum cumprod native_batch_norm _native_batch_norm_legit "
        "native_batch_norm_backward std_mean var_mean std var adaptive_max_pool3d ormqr linalg_solve_triangular "
        "digamma lgamma mvlgamma special_erfcx special_i0e special_i1e i0 atanh acosh asin sinh log_sigmoid_forward "
        "addbmm _upsample_nearest_exact1d _upsample_nearest_exact1d_backward upsample_nearest1d_backward",
    ),
)
_SECONDS = {name: row.seconds for row in COSTS for name in row.ops.split()}


@functools.cache
def seconds_of(op: OpOverload) -> float:
    """How long an op takes to compile, roughly."""
    name = op._schema.name.partition("::")[2]
    return _SECONDS.get(name, _SECONDS.get(name.removesuffix("_"), USUAL))
