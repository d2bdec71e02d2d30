"""What each collective makes of what the ranks have given, where all of it is in one process: plain functions of lists.

A rank gives `values`, host tensors in the order of its arguments, and `about`, what else it has said. Each function
returns what every rank gets, in the order of what it writes; None where a rank gets nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from . import lacking

Tensor = torch.Tensor
Got = list[list[Tensor] | None]


@dataclass(frozen=True, slots=True)
class Given:
    """One rank's part. `about`: the reduction, the root, or sizes, by name."""

    values: list[Tensor]
    about: dict[str, Any]


_KINDS: Any = c10d.ReduceOp.RedOpType
_TWO: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    _KINDS.SUM: torch.add,
    _KINDS.AVG: torch.add,
    _KINDS.PRODUCT: torch.mul,
    _KINDS.MIN: torch.minimum,
    _KINDS.MAX: torch.maximum,
    _KINDS.BAND: torch.bitwise_and,
    _KINDS.BOR: torch.bitwise_or,
    _KINDS.BXOR: torch.bitwise_xor,
}
_HALF = (torch.float16, torch.bfloat16)


def reduced(parts: Sequence[Tensor], operations: Sequence[Any]) -> Tensor:
    """One tensor of each rank's, in the order of the ranks.

    Arguments:
        operations: the reduction as each rank names it (the factor of `PREMUL_SUM` may be each one's own).

    Raises:
        RuntimeError: the reduction has no meaning for that dtype.
    """
    dtype, size = parts[0].dtype, len(parts)
    ways = [lacking.way(operation, dtype, size) for operation in operations]
    kind = operations[0].op if ways[0] is None else ways[0].kind
    taken = [t if found is None else found.before(t) for t, found in zip(parts, ways, strict=True)]
    between = taken[0].dtype
    if between.is_floating_point and kind in (_KINDS.BAND, _KINDS.BOR, _KINDS.BXOR):
        raise RuntimeError(f"a reduction of bits is not for {between}")
    if between.is_complex and kind in (_KINDS.MIN, _KINDS.MAX):
        raise RuntimeError(f"complex numbers have no order, and {kind} asks for one")
    if between in _HALF:  # rounded once, and not for each rank
        taken = [t.float() for t in taken]
    out = functools.reduce(_TWO[kind], taken)
    if kind == _KINDS.AVG:
        out = out / size
    out = out.to(between)
    return (out if ways[0] is None else ways[0].after(out)).to(dtype)


def _operations(given: Sequence[Given]) -> list[Any]:
    return [of.about["operation"] for of in given]


def allreduce(given: Sequence[Given]) -> Got:
    sums = [reduced(parts, _operations(given)) for parts in zip(*(of.values for of in given), strict=True)]
    return [sums for _ in given]


def reduce(given: Sequence[Given]) -> Got:
    sums = allreduce(given)[0]
    return [sums if r == of.about["root"] else None for r, of in enumerate(given)]


def broadcast(given: Sequence[Given]) -> Got:
    return [given[given[0].about["root"]].values for _ in given]


def allgather(given: Sequence[Given]) -> Got:
    """For each input in turn: every rank's."""
    parts = [part for of_input in zip(*(of.values for of in given), strict=True) for part in of_input]
    return [parts for _ in given]


def allgather_flat(given: Sequence[Given]) -> Got:
    """For each input: every rank's, one behind another."""
    parts = [torch.cat([t.reshape(-1) for t in of]) for of in zip(*(of.values for of in given), strict=True)]
    return [parts for _ in given]


def allgather_by_rank(given: Sequence[Given]) -> Got:
    """Every rank's inputs, one rank after another."""
    return [[t for of in given for t in of.values] for _ in given]


def gather(given: Sequence[Given]) -> Got:
    parts = [of.values[0] for of in given]
    return [parts if r == of.about["root"] else None for r, of in enumerate(given)]


def scatter(given: Sequence[Given]) -> Got:
    root = given[0].about["root"]
    return [[part] for part in given[root].values]


def reduce_scatter(given: Sequence[Given]) -> Got:
    """Each rank gives one tensor for each rank."""
    columns = zip(*(of.values for of in given), strict=True)
    return [[reduced(column, _operations(given))] for column in columns]


def reduce_scatter_flat(given: Sequence[Given]) -> Got:
    """Each input is cut into as many equal parts as there are ranks."""
    size, columns = len(given), zip(*(of.values for of in given), strict=True)
    sums = [reduced(parts, _operations(given)).reshape(size, -1) for parts in columns]
    return [[s[r] for s in sums] for r in range(size)]


def alltoall(given: Sequence[Given]) -> Got:
    return [[of.values[r] for of in given] for r in range(len(given))]


def alltoall_flat(given: Sequence[Given]) -> Got:
    """One tensor of each rank, cut along its first dimension into parts of these sizes, or equal ones."""
    size = len(given)
    cut = [of.values[0].split(of.about["sizes"] or [of.values[0].shape[0] // size] * size) for of in given]
    return [[torch.cat([parts[r].reshape(-1) for parts in cut])] for r in range(size)]


def barrier(given: Sequence[Given]) -> Got:
    return [[] for _ in given]
