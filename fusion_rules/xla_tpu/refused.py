"""What XLA's compiler for TPUs refuses, or ends its process over: there such calls are left to the host.

Found by compiling every row (`make test-tpu`), which writes docs/tpu_ops.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .. import lower_factory
from ..lowering import NoLowering, leaves
from ..rule import RULES, Lowering, rule

_NO_WIDE_FFT = "XLA has no Fourier transform of float64 on TPUs"
_PRODUCTS = (
    "mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "vdot", "matmul", "linear", "_addmm_activation",
    "_foreach_mm", "convolution", "conv_tbc", "_trilinear", "affine_grid_generator",
)  # fmt: skip
_NO_WIDE_COMPLEX = "XLA has no complex128 on TPUs, in which a power of complex numbers is computed"
_NO_INT64_PRODUCT = "XLA has no product of 64-bit integers on TPUs"
_NO_WIDE_LU = "XLA has no LU decomposition of float64 on TPUs"


def _always(*args: Any) -> bool:
    return True


def _first(args: tuple[Any, ...]) -> str:
    return next((str(a.dtype) for a in leaves(list(args)) if hasattr(a, "dtype")), "")


def _is_wide(*args: Any) -> bool:
    """Whether a call's first array is of 64-bit numbers."""
    return _first(args) in ("float64", "complex128")


def _is_int64(*args: Any) -> bool:
    """Whether it is of 64-bit integers."""
    return _first(args) in ("int64", "uint64")


def _has_complex(*args: Any) -> bool:
    """Whether any is of complex numbers."""
    return any(str(getattr(a, "dtype", "")).startswith("complex") for a in leaves(list(args)))


_OF: Mapping[Callable[..., bool], str] = {
    _always: "",
    _is_wide: " where its numbers have 64 bits",
    _is_int64: " where they are 64-bit integers",
    _has_complex: " where numbers are complex",
}
# By row: which calls, and why.
REFUSED: Mapping[str, tuple[Callable[..., bool], str]] = {
    "linalg_pinv.atol_rtol_tensor": (_always, "XLA's compiler for TPUs ends its process over singular values"),
    "linalg_matrix_exp.default": (_always, _NO_WIDE_LU),  # float32 is computed in float64
    "linalg_inv_ex.default": (_is_wide, _NO_WIDE_LU),
    "linalg_lu.default": (_is_wide, _NO_WIDE_LU),
    "linalg_lu_factor_ex.default": (_is_wide, _NO_WIDE_LU),
    **dict.fromkeys(("_fft_c2c.default", "_fft_c2r.default", "_fft_r2c.default"), (_is_wide, _NO_WIDE_FFT)),
    **{f"{op}.default": (_is_int64, _NO_INT64_PRODUCT) for op in _PRODUCTS},
    **dict.fromkeys(("pow.Scalar", "pow.Tensor_Tensor"), (_has_complex, _NO_WIDE_COMPLEX)),
    "frexp.Tensor": (_is_wide, "XLA takes no float64 apart on TPUs"),
}


@lower_factory.leading_half.on("tpu")
def leading_half(x: Any) -> Any:
    """Left to the host: on TPUs a float64 is two float32, and has no bits to be taken apart."""
    raise NoLowering("XLA takes no float64 apart on TPUs")


def _refusing(lower: Lowering, refuses: Callable[..., bool], why: str) -> Lowering:
    def lowered(cx: Any, *args: Any, **kwargs: Any) -> Any:
        if refuses(*args):
            raise NoLowering(why)
        return lower(cx, *args, **kwargs)

    lowered.__doc__ = f"Left to the host{_OF[refuses]}: {why}."
    return lowered


for _op, (_refuses, _why) in REFUSED.items():
    _row = RULES[f"aten.{_op}"]
    _same = {"promote": _row.promote, "keep": _row.keep, "hoist": _row.hoist, "may_raise": _row.may_raise}
    rule(_op, _row.cls, platform="tpu", **_same)(_refusing(_row.lower, _refuses, _why))  # type: ignore[arg-type]
