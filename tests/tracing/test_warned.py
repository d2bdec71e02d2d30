"""What ATen warns of is warned of at the line of the call, each time, once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from fused_eager import fused_eager


def _warned() -> list[tuple[int, str]]:
    mask, x, none = torch.zeros(10, dtype=torch.uint8), torch.ones(10, 10) * 2, torch.ones(0, 10) * 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x[mask]
        x.index_put_((mask,), none, accumulate=True)
        put = torch.index_put(x, (mask,), none)
        one = x[0:1].std(0), x[0:1].var(0), torch.var_mean(x[0:1], 0), torch.std_mean(x[0:1], 0), x[0, 0].std()
        few = torch.std_mean(x, 0, correction=10), torch.var(x, (0, 1), correction=200), torch.std_mean(x, -1)
        again = torch.std_mean(x, 0, correction=1), torch.var(x, (0, 1), correction=1)
        str((put, one, few, again, x))
    return [(w.lineno, str(w.message)) for w in caught]


@pytest.mark.parametrize(
    "options", [{"mode": "strict"}, {"mode": "debug"}, {}, {"compile": "wait"}, {"compile": "wait", "native": "never"}],
    ids=str,
)  # fmt: skip
def test_warnings_come_at_their_lines(options: dict[str, Any]) -> None:
    expected = _warned()
    assert len(expected) == 10
    with fused_eager(**options):
        for _ in range(3):
            assert _warned() == expected


def test_a_dimension_that_is_not_there_is_refused_by_aten() -> None:
    with fused_eager(mode="strict"), pytest.raises(IndexError, match="Dimension out of range"):
        (torch.ones(3) * 2).std(2)
