"""Where results for special values may differ from eager's: one row each, as narrow as it can be, with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .corpus import Case

# What a row may accept. There is none for a NaN of eager's that is a number here: that is never accepted, but where
# the NaN comes of numbers that eager has let become infinite on the way ("overflows"), in another order of additions.
KINDS = frozenset({"overflows", "makes NaN", "infinite", "values", "sign of zero", "raises", "looks"})


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


ACCEPTED: tuple[Accepted, ...] = (
    Accepted(
        ("*",),
        ("overflows",),
        ("cycle",),
        "gradients of what is broadcast are sums, and some of its numbers are so large that two of them are infinite: "
        "the order of additions decides whether such a sum meets an infinity of the other sign",
    ),
    Accepted(
        ("fmax", "fmin"),
        ("sign of zero",),
        ("cycle", "cycles", "pairs", "ties"),
        "C leaves open which of 0.0 and -0.0 is the larger, and eager's answer differs by dtype",
        ("bfloat16", "float16"),
    ),
)

# Ops that are known to differ and are not done yet.
UNFIXED: frozenset[str] = frozenset(
    {
        "cdist",
        "cholesky_inverse",
        "fft.irfft",
        "fft.irfft2",
        "fft.irfftn",
        "geqrf",
        "index_reduce",
        "nansum",
        "nn.functional.interpolate",
        "prod",
    }
)
