"""Arguments: hoisted numbers are handed over where they lie."""

from __future__ import annotations

import numpy as np
import pytest

from fused_eager.executing.arguments import numbers
from fused_eager.planning.plan import Region
from tests.streams import END, node


@pytest.mark.parametrize("floats", [[], [0.5], [0.1, float("nan"), -0.0, 1e308], [1.0] * 9])
@pytest.mark.parametrize("ints", [[], [2**63 - 1, -(2**63), 0]])
def test_numbers_arrive_without_a_copy(floats: list[float], ints: list[int]) -> None:
    nodes = [node(1, [0], scalars=(*floats, *ints))]
    memory: list[np.ndarray] = []
    found = numbers(nodes, Region((0,), (0,), (1,), (), "xla", END), memory)
    assert [str(array.dtype) for array in found] == ["float64", "int64"]
    np.testing.assert_array_equal(found[0], floats)
    np.testing.assert_array_equal(found[1], ints)
    spans = [(m.ctypes.data, m.ctypes.data + m.nbytes) for m in memory]
    for array in found:
        assert not array.size or any(a <= array.unsafe_buffer_pointer() < b for a, b in spans)


def test_a_number_that_does_not_fit_is_refused() -> None:
    nodes = [node(1, [0], scalars=(2**63,))]
    with pytest.raises(OverflowError):
        numbers(nodes, Region((0,), (0,), (1,), (), "xla", END), [])
