"""Where results for special values may differ from eager's: one row each, as narrow as it can be, with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .corpus import Case

# What a row may accept. There is none for a NaN of eager's that is a number here: that is never accepted, but where
# the NaN comes of numbers that eager has let become infinite on the way ("overflows"), in another order of additions,
# or where the result is the same whichever numbers are in place of those that are none ("independent").
KINDS = frozenset(
    {"overflows", "independent", "infinite for NaN", "infinite complex", "makes NaN", "infinite", "values"}
    | {"sign of zero", "raises", "looks"}
)


@dataclass(frozen=True)
class Accepted:
    """One op (or several of one reason), the kinds of difference, the patterns ("*": all) and why."""

    ops: tuple[str, ...]
    kinds: tuple[str, ...]
    patterns: tuple[str, ...]
    reason: str
    dtypes: tuple[str, ...] = ("*",)

    def covers(self, op: str, case: Case, pattern: str, kind: str) -> bool:
        """Whether the row accepts such a difference."""
        return (
            (op in self.ops or "*" in self.ops)
            and kind in self.kinds
            and ("*" in self.patterns or pattern in self.patterns)
            and ("*" in self.dtypes or str(case.dtype).removeprefix("torch.") in self.dtypes)
        )


INFINITE = ("inf", "-inf", "one inf", "one -inf", "cycle", "cycles", "pairs", "gradients")
NOT_FINITE = ("inf", "-inf", "nan", "one nan", "one inf", "one -inf", "cycle", "cycles", "pairs")
TRANSFORMS = (
    "fft.irfft", "fft.irfft2", "fft.irfftn", "fft.hfft", "fft.hfft2", "fft.hfftn", "fft.fft", "fft.fft2", "fft.fftn",
    "fft.ifft", "fft.ifft2", "fft.ifftn", "fft.rfft", "fft.rfft2", "fft.rfftn", "fft.ihfft", "fft.ihfft2",
    "fft.ihfftn", "stft", "istft",
)
# What adds, or takes the minimum of, what may be nothing but zeros.
SUMS = (
    "nn.functional.interpolate", "nn.functional.layer_norm", "native_layer_norm", "index_reduce", "scatter_reduce",
    "lu_unpack", "lu", "nn.functional.grid_sample", "grid_sampler_3d",
    "linalg.lu", "linalg.lu_factor", "linalg.lu_factor_ex", "nn.functional.rms_norm", "nn.functional.bilinear",
    "block_diag", "nn.functional.adaptive_max_pool1d", "nn.functional.adaptive_max_pool3d", "bmm", "native_batch_norm",
    "addbmm", "baddbmm", "msort", "trace", "nn.functional.batch_norm", "tanh",
    "nn.functional.group_norm",
    "_batch_norm_with_update", "_native_batch_norm_legit", "native_group_norm", "_softmax_backward_data",
    "nn.functional.softmin", "nn.functional.avg_pool1d", "nn.functional.avg_pool2d", "nn.functional.avg_pool3d",
    "nn.functional.adaptive_avg_pool1d", "nn.functional.adaptive_avg_pool2d", "nn.functional.adaptive_avg_pool3d",
    "nn.functional.conv1d", "nn.functional.conv2d", "nn.functional.conv3d", "nn.functional.conv_transpose1d",
    "nn.functional.conv_transpose2d", "nn.functional.conv_transpose3d", "nn.functional.cross_entropy",
    "nn.functional.linear_cross_entropy", "nn.functional.pad", "nn.functional.upsample_bilinear",
    "_upsample_bilinear2d_aa", "nn.functional.gaussian_nll_loss",
)

ACCEPTED: tuple[Accepted, ...] = (
    Accepted(
        ("*",),
        ("overflows",),
        ("cycle",),
        "gradients of what is broadcast are sums, and some of its numbers are so large that two of them are infinite: "
        "the order of additions decides whether such a sum meets an infinity of the other sign",
    ),
    Accepted(
        ("*",),
        ("infinite complex",),
        (*INFINITE, "zeros", "negative zeros"),
        "of complex numbers with an infinite part eager's formulas make NaN where C has a number: inf + inf, 1 / inf",
    ),
    Accepted(
        ("addmm",),
        ("sign of zero",),
        ("negative zeros", "ties", "cycle", "cycles", "pairs"),
        "a product that sums over no elements is 0.0, and 0.0 comes of adding it to -0.0",
    ),
    Accepted(
        ("fmax", "fmin"),
        ("sign of zero",),
        ("cycle", "cycles", "pairs", "ties"),
        "C leaves open which of 0.0 and -0.0 is the larger, and eager's answer differs by dtype",
        ("bfloat16", "float16"),
    ),
    Accepted(
        (
            "cholesky_inverse",
            "geqrf",
            "ormqr",
            "qr",
            "linalg.qr",
            "lu",
            "linalg.lu",
            "linalg.lu_factor",
            "linalg.lu_factor_ex",
            "linalg.inv",
            "linalg.inv_ex",
            "linalg.tensorinv",
            "linalg.matrix_power",
            "linalg.pinv",
            "pinverse",
            "svd_lowrank",
            "pca_lowrank",
            "linalg.lstsq",
        ),
        ("makes NaN", "raises"),
        NOT_FINITE,
        "of a matrix with NaN or infinity all factors are NaN; LAPACK libraries spread it or pass it by, and so find "
        "another pivot to be zero",
    ),
    Accepted(
        ("lu", "linalg.lu", "linalg.lu_factor", "linalg.lu_factor_ex"),
        ("values",),
        NOT_FINITE,
        "which of several complex numbers with NaN or infinity is the largest, and so the pivot, nobody says",
        ("complex64",),
    ),
    Accepted(
        ("masked.cumprod",),
        ("overflows",),
        ("largest", "lowest", "pairs"),
        "a complex product that is too large is infinite in one part, or NaN where the next factor meets it first",
        ("complex64",),
    ),
    Accepted(
        ("svd_lowrank", "pca_lowrank"),
        ("raises",),
        ("smallest",),
        "products of the smallest numbers are zeros, whose factors are rounding errors: eager's are infinite here",
        ("complex64",),
    ),
    Accepted(
        ("masked.mean",),
        ("overflows",),
        ("largest", "lowest"),
        "an infinite complex sum over the count: eager divides complex numbers, and inf + inf j by a number is NaN",
        ("complex64",),
    ),
    Accepted(
        ("cholesky", "linalg.cholesky"),
        ("raises", "makes NaN"),
        NOT_FINITE,
        "whether a matrix with infinity is refused is up to LAPACK's order of computing; here its factor is NaN",
    ),
    Accepted(
        ("ormqr",),
        ("makes NaN",),
        ("gradients",),
        "of a matrix with NaN or infinity, incoming gradients here, all of the product is NaN",
    ),
    Accepted(
        ("lu", "linalg.lu", "linalg.lu_factor", "linalg.lu_factor_ex"),
        ("values",),
        ("largest", "lowest"),
        "of equal rows nothing is left to factorize: 0 here, a rounding error of such a number in eager",
    ),
    Accepted(
        ("nn.functional.glu",),
        ("values",),
        ("pairs", "cycles"),
        "of three factors two make a subnormal number, which is flushed; eager multiplies the other two first",
        ("float64",),
    ),
    Accepted(
        ("corrcoef",),
        ("values",),
        ("gradients",),
        "two observations correlate by 1 or -1, so that the gradient is a rounding error, times what comes in",
        ("float64",),
    ),
    Accepted(
        ("linalg.eig", "linalg.eigh"),
        ("raises",),
        ("gradients",),
        "whether a loss is refused for hanging on a phase is a comparison, here of numbers that are none",
    ),
    Accepted(
        ("linalg.eig",),
        ("overflows",),
        ("largest", "lowest"),
        "the eigenvectors of a matrix of one number are a basis but for their rounding, and the gradient divides by it",
        ("float64",),
    ),
    Accepted(
        ("linalg.inv_ex",),
        ("infinite",),
        ("ties",),
        "of a matrix without an inverse the sign of an infinity is that of the zero that a pivot is",
    ),
    Accepted(
        ("nn.functional.nll_loss",),
        ("sign of zero",),
        ("smallest",),
        "a product is taken from 0 without being rounded: one that is too small is a negative number, and flushed",
    ),
    Accepted(
        ("nn.functional.grid_sample",),
        ("overflows",),
        ("gradients",),
        "incoming gradients are added in float32 where eager adds in the half type: the sum of large ones is finite",
        ("bfloat16",),
    ),
    Accepted(
        ("linalg.matrix_rank",),
        ("raises",),
        NOT_FINITE,
        "whether the singular values of a matrix with infinities converge is up to where in memory it lies",
    ),
    Accepted(
        ("linalg.cholesky_ex",),
        ("makes NaN",),
        ("*",),
        "a factor that does not exist is NaN; eager leaves what it had come to",
    ),
    Accepted(
        (
            *("cholesky_inverse", "cholesky_solve", "cholesky", "linalg.cholesky", "linalg.cholesky_ex", "geqrf"),
            *("qr", "linalg.qr", "ormqr", "linalg.householder_product"),
            *TRANSFORMS,
        ),
        ("sign of zero",),
        ("*",),
        "where terms cancel, which of two zeros comes out is up to the order in which they are added",
    ),
    Accepted(
        ("cholesky_inverse",),
        ("makes NaN",),
        ("smallest",),
        "the inverse of the smallest numbers is infinite, in some terms of a sum before others",
    ),
    Accepted(
        ("qr", "linalg.qr", "geqrf", "svd_lowrank", "pca_lowrank", "lu", "lu_solve", "linalg.tensorsolve"),
        ("overflows", "values", "infinite", "makes NaN"),
        ("equal rows", "ones", "halves", "negative", "ties", "smallest"),
        "of a matrix that has not its full rank some columns of Q are rounding errors, blown up",
    ),
    Accepted(
        TRANSFORMS,
        ("makes NaN",),
        (*NOT_FINITE, "gradients"),
        "where a transform of NaN and infinities is NaN, infinite or a number is up to the algorithm for its length",
    ),
    Accepted(
        SUMS,
        ("sign of zero",),
        ("*",),
        "which of two zeros a sum or a minimum of zeros of both signs is depends on their order, and XLA does not add "
        "a single number to zero, which makes 0.0 of -0.0, and takes a minus out of a sum",
    ),
    Accepted(
        (
            "nn.functional.conv1d",
            "nn.functional.conv2d",
            "nn.functional.conv3d",
            "nn.functional.conv_transpose1d",
            "nn.functional.conv_transpose2d",
            "nn.functional.conv_transpose3d",
        ),
        ("makes NaN", "overflows", "independent", "infinite for NaN"),
        (*NOT_FINITE, "gradients"),
        "kernels that multiply the zeros in and around a window as well spread NaN to results that do not depend on "
        "it: those of oneDNN (half types), which float64 is without, and XLA's (groups, dilations) do so elsewhere",
    ),
    Accepted(
        ("_upsample_bilinear2d_aa", "nn.functional.grid_sample"),
        ("makes NaN",),
        NOT_FINITE,
        "numbers outside of a point's support have the weight 0, and are multiplied",
    ),
    Accepted(
        ("max", "min", "median", "nanmedian"),
        ("makes NaN",),
        ("pairs", "gradients"),
        "below any dispatch mode autograd takes its formula for GPUs, which multiplies the incoming gradient by a mask",
    ),
    Accepted(
        ("var", "std", "var_mean", "std_mean", "mean"),
        ("makes NaN", "infinite", "overflows"),
        ("largest", "lowest"),
        "sums are taken in the dtype itself, of half types in float32, where eager goes by running means or float64",
    ),
    Accepted(
        (
            "native_group_norm",
            "_batch_norm_with_update",
            "nn.functional.instance_norm",
            "nn.functional.group_norm",
            "nn.functional.layer_norm",
            "native_layer_norm",
        ),
        ("overflows", "infinite", "makes NaN"),
        ("largest", "lowest", "cycles"),
        "the variance of the largest numbers overflows in one order of the sums and not in the other",
    ),
    Accepted(
        ("var_mean", "std_mean"),
        ("makes NaN",),
        ("pairs",),
        "the mean of numbers with an infinity is infinite where they are added one by one, and NaN where its distance "
        "to them is wanted as well",
    ),
    Accepted(
        ("tanh",),
        ("makes NaN",),
        ("gradients",),
        "an infinite gradient times `1 - y * y` is NaN where `y` is 1, and infinite where it is the number before that",
    ),
    Accepted(
        ("nn.functional.bilinear",),
        ("infinite for NaN",),
        ("one inf", "one -inf"),
        "the gradient sums products with an infinity, in eager one by one: those of both signs make NaN, and an "
        "infinity times the sum does not",
    ),
    Accepted(
        ("nn.functional.group_norm", "native_group_norm", "nn.functional.layer_norm", "native_layer_norm"),
        ("makes NaN",),
        ("one inf", "one -inf"),
        "the gradient of a row with an infinite weight is NaN in all of its elements, infinite in some of eager's",
    ),
    Accepted(
        (
            *("matrix_exp", "nn.functional.interpolate", "nn.functional.upsample_bilinear"),
            "nn.functional.binary_cross_entropy_with_logits",
        ),
        ("overflows", "infinite", "makes NaN"),
        ("largest", "lowest"),
        "products and weighted sums of the largest numbers overflow, or come out a little smaller and do not",
    ),
    Accepted(
        ("bmm", "dot", "vdot", "addr", "cross"),
        ("overflows",),
        ("pairs", "largest", "lowest"),
        "a product that is too large need not be infinite where it is contracted with the sum that takes it",
    ),
    Accepted(
        ("asin", "asinh", "atan", "atanh"),
        ("overflows",),
        ("largest", "lowest"),
        "x * x of the largest complex numbers is NaN + inf j, by which the slope is divided: NaN, or 0 by C's rules",
        ("complex64",),
    ),
    Accepted(
        ("nn.functional.rms_norm", "geqrf", "qr", "linalg.qr", "linalg.inv_ex", *TRANSFORMS),
        ("overflows", "makes NaN"),
        ("largest", "lowest"),
        "squares and transforms of the largest numbers overflow in one order of the sums and not in the other",
    ),
    Accepted(
        TRANSFORMS,
        ("values",),
        ("largest", "wrapping"),
        "equal terms of a thousand and more cancel, and what is left of them is their rounding",
        ("uint8", "int32", "int64"),
    ),
    Accepted(
        ("special.laguerre_polynomial_l",),
        ("values",),
        ("wrapping",),
        "a recurrence of hundreds of steps in float32 rounds in each",
        ("uint8",),
    ),
    Accepted(
        ("masked.median",),
        ("values",),
        ("nan",),
        "which of many NaN the median is torch leaves open; a gradient goes to the first",
    ),
    Accepted(
        ("scatter_reduce",),
        ("infinite",),
        ("largest", "lowest"),
        "numbers of half types are added in float32, where the sum of the largest is finite; eager adds in the dtype",
        ("float16", "bfloat16"),
    ),
    Accepted(
        ("nn.functional.scaled_dot_product_attention",),
        ("infinite",),
        ("largest", "lowest"),
        "a difference of equal sums of the largest numbers, 0 but for their rounding, is multiplied by such a number",
        ("float16",),
    ),
)

# Not run, by (op, pattern): eager itself dies, or what it returns is unwritten memory, or is not defined.
_LOW_RANK = "the gradient divides by a difference of equal singular values: whether that is 0 is up to rounding"
_POSITION = "where a position is not finite, or becomes infinite, eager's gradients are written outside of their memory"
UNRUN: dict[tuple[str, str], str] = {
    **{
        (op, pattern): _POSITION
        for op in ("nn.functional.grid_sample", "grid_sampler_2d")
        for pattern in (*NOT_FINITE, "largest", "lowest")
    },
    **{(op, p): _LOW_RANK for op in ("svd_lowrank", "pca_lowrank") for p in ("ones", "halves", "negative")},
    ("lcm", "wrapping"): "eager divides the lowest number by -1 in C++, which ends the process",
    ("native_batch_norm", "no elements"): "eager divides by zero in C++, which ends the process",
    ("_native_batch_norm_legit", "no elements"): "eager divides by zero in C++, which ends the process",
    ("resize_", "no elements"): "what it grows into is unwritten memory",
    ("resize_as_", "no elements"): "what it grows into is unwritten memory",
}
