"""What the corpus and the fuzzer found, each as a test of its own."""

from __future__ import annotations

import pytest
import torch

from tests.semantics.programs import MODES, check


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    """One of the three modes."""
    return str(request.param)


def test_split_points_that_are_pending(mode: str) -> None:
    x = torch.arange(20.0).reshape(5, 4)
    points = torch.tensor([1, 2])

    def program() -> list[torch.Tensor]:
        y, p = x * 2, points * 2
        return [*torch.tensor_split(y, p), *y.tensor_split(p - 1, dim=0),
                *y.tensor_split(tensor_indices_or_sections=p - 1, dim=1), *torch.tensor_split(y, 3)]

    check(program, mode)
