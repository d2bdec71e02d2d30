"""Every optimizer of torch.optim, with all options of torch's own suite: as in eager, saved and loaded on the way.

`make test` runs some of them in float32, fused, and one of each that is differentiated through its steps; `make
test-full` all, the other modes and float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import optim

from .compare import assert_all_agree, spread
from .optimizers import OPTIMIZERS, OptimizerInput, options, run

SPARSE = [name for name, info in OPTIMIZERS.items() if info.supports_sparse or info.only_supports_sparse_grads]
DENSE = [name for name, info in OPTIMIZERS.items() if not info.only_supports_sparse_grads]


# Options of one optimizer in `make test`, spread over all. Of Adam and SGD, which most programs use, it takes all.
MOST = {"Adam": 100, "SGD": 100, "LBFGS": 1}
FEW = 3
# What they compute is what the others do, in another order.
IN_FULL = {"Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"}


def _agree(name: str, dtype: torch.dtype, mode: str, given: Sequence[OptimizerInput], sparse: bool = False) -> None:
    programs = [(g.kwargs, lambda d, g=g: run(name, g, d, sparse)) for g in given]
    assert_all_agree(programs, dtype, mode)  # type: ignore[arg-type]


def _some(name: str, dtype: torch.dtype) -> list[OptimizerInput]:
    """Some of the options as they train, and the last ones, which are the most, with differentiable steps."""
    given = options(name, dtype)
    through = [g for g in given if g.kwargs.get("differentiable")]
    return [*spread([g for g in given if g not in through], MOST.get(name, FEW)), *through[-1:]]


# LBFGS decides by curvatures, which float32 knows to three digits here: in float64 alone it takes one way.
WAYS = [(name, dtype) for name in DENSE for dtype in (torch.float32, torch.float64)
        if (name, dtype) != ("LBFGS", torch.float32)]


@pytest.mark.thinned(8)
@pytest.mark.parametrize(("name", "dtype"), [
    pytest.param(*w, marks=[pytest.mark.slow] * (w[0] in IN_FULL)) for w in WAYS
    if w[1] is torch.float32 or w[0] == "LBFGS"
])  # fmt: skip
def test_every_optimizer_trains_as_in_eager(name: str, dtype: torch.dtype) -> None:
    _agree(name, dtype, "fused", _some(name, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["debug", "strict", "fused"])
@pytest.mark.parametrize(("name", "dtype"), WAYS)
def test_every_optimizer_in_every_way(name: str, dtype: torch.dtype, mode: str) -> None:
    _agree(name, dtype, mode, options(name, dtype))


@pytest.mark.parametrize("mode", [*[pytest.param(m, marks=pytest.mark.slow) for m in ("debug", "strict")], "fused"])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients_train_as_in_eager(name: str, mode: str) -> None:
    _agree(name, torch.float32, mode, options(name, torch.float32), sparse=True)


def test_no_optimizer_is_missing() -> None:
    known = {n for n, c in vars(optim).items() if isinstance(c, type) and issubclass(c, optim.Optimizer)}
    assert known - set(OPTIMIZERS) == {"Optimizer"}
