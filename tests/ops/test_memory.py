"""What an op takes at its peak is at most `BOUND` times what it takes in eager, but for those that say why.

`make test` measures a few ops; all of the op corpus is `make test-full`, and `python -m tests.ops.memory` prints it.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch.testing._internal.opinfo.core import SampleInput

from fused_eager.executing import load

from . import memory
from .corpus import OPS
from .memory import BOUND, ENOUGH, Found, case_of, enlarged, of_case, peak_of

pytestmark = pytest.mark.skipif(not memory.is_supported(), reason="the system does not tell the peak of a process")

# Ops that may take more, and why. (From 256 MB on ATen runs them: `devices.host.housekeeping`.)
MORE: dict[str, str] = {
    "nn_functional_grid_sample": "for its gradients all corners of each position are gathered at once",
    "nn_functional_conv_transpose2d": "for the gradient of a grouped weight all places of the window lie side by side",
}

NAMES = list(OPS)
PARTS = [NAMES[i : i + 16] for i in range(0, len(NAMES), 16)]
# Of each family whose form differs most from ATen's loop: gathers, windows, distances, resampling, sorts, scatters.
QUICK = ("take_along_dim", "nn.functional.max_pool2d", "nn.functional.unfold", "cdist", "sort", "scatter_add")


def _beyond(names: list[str], mode: str, samples: int, ways: int) -> list[str]:
    wrong = []
    for name in names:
        case = case_of(name, mode)
        for found in [] if case is None else of_case(case, samples, ways):
            if isinstance(found, Found) and found.ratio > BOUND and name not in MORE:
                wrong.append(
                    f"{name} {mode}: {found.ratio:.1f} times eager's {found.eager >> 20} MB for {found.shapes}, most "
                    f"of it in {found.region}"
                )
            elif isinstance(found, Exception):
                wrong.append(f"{name} {mode}: {type(found).__name__}: {found}")
        load.forget()
        gc.collect()
    return wrong


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", QUICK)
def test_a_few(name: str) -> None:
    assert not _beyond([name], "strict", 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["strict", "fused"])
@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part[0]}-to-{part[-1]}")
def test_every_op(part: list[str], mode: str) -> None:
    wrong = _beyond(part, mode, 1, 2)
    assert not wrong, "\n".join(wrong)


def test_every_reason_is_of_an_op() -> None:
    assert set(MORE) | memory.UNMEASURED <= set(NAMES)


def test_a_peak_is_seen_and_what_was_there_is_not_counted() -> None:
    there = torch.ones(ENOUGH // 4)

    def program() -> float:
        more = torch.ones(ENOUGH // 4)
        return (there[:4] + more[:4]).sum().item()

    for _ in range(2):
        found, peak = peak_of(program)
        assert found == 8.0 and 0.9 * ENOUGH < peak < 1.3 * ENOUGH


def test_a_sample_is_made_large_alike_in_all_its_tensors() -> None:
    x, index = torch.rand(3, 5, requires_grad=True), torch.tensor([[0, 2, 1]])
    large = enlarged(SampleInput(x, args=(index, 3, [5, 3])), 3, 4, True)
    assert large.input.shape == (12, 5) and large.input.requires_grad
    assert torch.equal(large.input[3:6], x) and large.args[0].tolist() == [[0, 2, 1] * 4]
    assert large.args[1:] == (12, [5, 12])
    assert enlarged(SampleInput(x, args=(3,)), 0, 2, False).input.shape == (6, 10)
