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


ACCEPTED: tuple[Accepted, ...] = ()

# Ops that are known to differ and are not done yet.
UNFIXED: frozenset[str] = frozenset(
    {
        "__rdiv__",
        "cdist",
        "cholesky_inverse",
        "fft.irfft",
        "fft.irfft2",
        "fft.irfftn",
        "geqrf",
        "index_reduce",
        "nansum",
        "nn.functional.gelu",
        "nn.functional.hardshrink",
        "nn.functional.hardswish",
        "nn.functional.hardtanh",
        "nn.functional.interpolate",
        "nn.functional.softshrink",
        "prod",
    }
)
