"""A call of a collective, in words: what has to be the same on all ranks, and what an error says of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from ..config import Config
from ..log import site
from . import job, order
from .table import BY_OP, Collective


def group_of(named: dict[str, Any]) -> Any:
    """The process group that a call names; None if it names none.

    Arguments:
        named: the call's arguments by name.
    """
    boxed = named.get("process_group")
    if boxed is not None:
        return distributed.ProcessGroup.unbox(boxed)
    name: Any = named.get("group_name")
    return None if name is None else torch._C._distributed_c10d._resolve_process_group(name)


def _shapes(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "(" + ", ".join(map(_shapes, value)) + ")"


def reduction(value: Any) -> str:
    """The name of a reduction, as `c10d` ops are given it."""
    if isinstance(value, str):
        return value.upper()
    kinds = distributed.ReduceOp.RedOpType.__members__
    return next((name for name, kind in kinds.items() if kind.value == value.op()), "?")


def words(name: str, row: Collective | None, named: dict[str, Any]) -> str:
    """What of a call has to be the same on all ranks of the group."""
    parts = [_shapes(named[argument]) for argument in (row.alike if row is not None else ()) if argument in named]
    if "reduce_op" in named:
        parts.append(reduction(named["reduce_op"]))
    if "root_rank" in named:
        parts.append(f"root {named['root_rank']}")
    return f"{name.strip('_')}({', '.join(parts)})"


_HOST = torch.device("cpu")


def begin(name: str, named: dict[str, Any], options: Config, group: Any = None) -> None:
    """Before a collective is called: the job is joined, and if it is asked for, the ranks compare what they call.

    Arguments:
        named: its arguments by name.
        group: the group that it is called in, if the caller has it.

    Raises:
        RankLost: another rank is lost.
        CollectivesDiffer: another rank has called something else.
    """
    job.join_default(options)
    beat = job.current()
    if beat is None:
        return
    if beat.fault is not None:
        raise beat.error(f"calls {name.strip('_')} at {site.caller()}")
    if not beat.checks:
        return
    group = group_of(named) if group is None else group
    if group is None or group.size() < 2:
        return
    row = BY_OP.get(name)
    if row is not None and not row.is_for_all:
        order.passed(beat, group.group_name)
    else:
        counted = group._get_backend(_HOST)._get_sequence_number_for_group()
        order.check(beat, group.group_name, words(name, row, named), str(site.caller()), counted)
