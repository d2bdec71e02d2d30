"""Every module of torch.nn, in all variants of torch's own suite: as in eager, made and trained within a context.

`make test` trains each module in float32, fused; `make test-full` takes all variants, modes, evaluation and float64.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from .compare import assert_all_agree, spread
from .modules import names, run, variants

NAMES = names()
# Containers and base classes, which compute nothing; SyncBatchNorm needs a process group and a GPU.
NOT_RUN = {
    "Container", "DataParallel", "Module", "ModuleDict", "ModuleList", "ParameterDict", "ParameterList", "RNNBase",
    "RNNCellBase", "SyncBatchNorm",
}
# Variants of one module in `make test`, spread over all: one loss has 857. Of losses two, which differ in what they are
# told, and not in size.
MOST = {True: 2, False: 1}
LOSS = re.compile("(?<!CrossEntropy)Loss$")


def _agree(name: str, dtype: torch.dtype, mode: str, training: bool, most: int = 10_000) -> None:
    some = spread(variants(name, dtype, training), most)
    assert_all_agree([(v, lambda d, v=v: run(v, d, training)) for v in some], dtype, mode)  # type: ignore[misc]


@pytest.mark.thinned(8)
@pytest.mark.parametrize("name", NAMES)
def test_every_module_trains_as_in_eager(name: str) -> None:
    _agree(name, torch.float32, "fused", True, MOST[LOSS.search(name) is not None])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["debug", "strict", "fused"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_module_in_every_way(name: str, dtype: torch.dtype, training: bool, mode: str) -> None:
    _agree(name, dtype, mode, training)


def test_no_module_is_missing() -> None:
    modules = {n for n, c in vars(nn).items() if isinstance(c, type) and issubclass(c, nn.Module)}
    assert modules - set(NAMES) == NOT_RUN
