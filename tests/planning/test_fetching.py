"""Fetching: streams of ever new forms run on the host where their values come faster than a compiler is done."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fused_eager.planning import fetching
from fused_eager.planning.budget import REGION
from fused_eager.planning.costs import USUAL
from tests.streams import node

SMALL, LARGE = (torch.float32, (8,)), (torch.float32, (1 << 28,))
BUS = 4e9


def _stream(home: Any, structure: int) -> tuple[list[Any], dict[int, Any], frozenset[int]]:
    return [node(1, [0], structure=structure, home=home)], {0: home, 1: home}, frozenset({1})


def _is_cheaper(home: Any, structure: int, link: float) -> bool:
    return fetching.is_cheaper(*_stream(home, structure), link)


def test_small_values_are_fetched_rather_than_compiled_for() -> None:
    assert _is_cheaper(SMALL, 9001, BUS)
    assert _is_cheaper(SMALL, 9001, BUS), "and again, for nothing has been compiled"


def test_large_values_stay_and_what_has_been_compiled_is_used() -> None:
    assert not _is_cheaper(LARGE, 9002, BUS)
    assert not _is_cheaper(LARGE, 9002, math.inf), "now its op is compiled"


def test_where_the_memory_is_shared_only_the_hosts_work_counts() -> None:
    nodes, homes, live = _stream((torch.float32, (1 << 20,)), 9003)
    assert fetching.on_host(nodes, homes, live, math.inf) < USUAL + REGION < 0.1
    assert fetching.on_host(nodes, homes, live, 1e7) > 0.8


@pytest.mark.parametrize("op", ["mm", "bmm", "addmm"])
def test_a_product_takes_what_its_multiplications_take(op: str) -> None:
    n = 1 << 12
    made = node(2, [0, 1], home=(torch.float32, (n * n,)), op=getattr(torch.ops.aten, op).default)
    assert fetching._multiplications(made) == n**3
    assert fetching._multiplications(node(2, [0, 1], home=(torch.float32, (n * n,)))) == 0
