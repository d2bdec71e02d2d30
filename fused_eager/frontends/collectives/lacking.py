"""What gloo lacks, by what it has: `PREMUL_SUM`, averages of integers, sums of booleans, and half of the dtypes; and in
torch 2.11 exchanging lists of tensors.

A group's methods are called with tensors and options. Where gloo has not what is asked for, they are called with other
tensors and another reduction, and what comes of that is put into the tensors that were given. It is ordinary ops that
turn one into the other: on the device they are recorded and fused as all are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C import _distributed_c10d as c10d

from fused_eager.fusion_rules.lowering import leaves, map_leaves

from ...log import site
from ...ranks.work import FollowedWork
from .grouping import noted

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a group: which of its arguments are written and read, by position; of several names one exists.
    `is_flat`: only the number of elements counts, not the shape."""

    name: str
    written: int
    read: int | None = None
    reduces: bool = False
    is_flat: bool = False


METHODS = (
    Method("allreduce", 0, reduces=True),
    Method("allreduce_coalesced", 0, reduces=True),
    Method("reduce", 0, reduces=True),
    Method("reduce_scatter", 0, 1, reduces=True),
    Method("_reduce_scatter_base", 0, 1, reduces=True, is_flat=True),
    Method("reduce_scatter_single", 0, 1, reduces=True, is_flat=True),
    Method("reduce_scatter_tensor_coalesced", 0, 1, reduces=True),
    Method("reduce_scatter_single_coalesced", 0, 1, reduces=True),
    Method("broadcast", 0),
    Method("allgather", 0, 1),
    Method("_allgather_base", 0, 1, is_flat=True),
    Method("all_gather_single", 0, 1, is_flat=True),
    Method("allgather_coalesced", 0, 1),
    Method("allgather_into_tensor_coalesced", 0, 1),
    Method("all_gather_single_coalesced", 0, 1),
    Method("gather", 0, 1),
    Method("scatter", 0, 1),
    Method("alltoall", 0, 1),
    Method("alltoall_base", 0, 1),
    Method("all_to_all_single", 0, 1),
)

_FLOAT8 = tuple(getattr(torch, name) for name in dir(torch) if name.startswith("float8_"))

# What gloo does not take, as something of the same size that it takes: bytes are only moved.
MOVED_AS: dict[torch.dtype, torch.dtype] = {
    torch.int16: torch.float16,
    torch.uint16: torch.float16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    **dict.fromkeys(_FLOAT8, torch.uint8),
}
# And what it does not take, or cannot sum without overflow, as something wider that holds each of its values.
COMPUTED_AS: dict[torch.dtype, torch.dtype] = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    **dict.fromkeys(_FLOAT8, torch.float32),
}
_WIDER = {torch.int8: torch.int32, torch.uint8: torch.int32, torch.int32: torch.int64}

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Way:
    """A reduction by another one: what is done with the tensors before, which reduction it is, what is done after."""

    before: Change
    kind: Any
    after: Change


def way(operation: Any, dtype: torch.dtype, size: int) -> Way | None:
    """How to reduce tensors of a dtype; None where gloo does it, or says itself that it does not.

    Raises:
        RuntimeError: the reduction has no meaning for that dtype.
    """
    kinds: Any = c10d.ReduceOp.RedOpType
    kind = operation.op
    computed = COMPUTED_AS.get(dtype)
    if kind == kinds.PREMUL_SUM:
        if not (dtype.is_floating_point or dtype.is_complex):
            raise RuntimeError(f"ReduceOp.PREMUL_SUM is for floating-point tensors, and this one is {dtype}")
        factor = operation.__getstate__()[1]  # torch 2.11 has no other name for it
        number = factor.item() if isinstance(factor, Tensor) else factor
        return Way(lambda t: (t if computed is None else t.to(computed)) * number, kinds.SUM, lambda t: t)
    if dtype is torch.bool:
        if kind == kinds.AVG:
            raise RuntimeError("ReduceOp.AVG is not for torch.bool")
        # The sum of bytes would be 2, which no boolean is.
        return Way(lambda t: t, kinds.MAX, lambda t: t) if kind == kinds.SUM else None
    if kind == kinds.AVG and not (dtype.is_floating_point or dtype.is_complex):
        if dtype is torch.uint64:
            raise RuntimeError("ReduceOp.AVG is not for torch.uint64")
        wide = computed or _WIDER.get(dtype, dtype)
        return Way(lambda t: t.to(wide), kinds.SUM, lambda t: torch.div(t, size, rounding_mode="trunc"))
    if dtype is torch.uint64:
        if kind in (kinds.MIN, kinds.MAX):  # in the order of signed numbers, once the first bit is the other one
            low = torch.iinfo(torch.int64).min
            return Way(lambda t: t.view(torch.int64) ^ low, kind, lambda t: (t ^ low).view(torch.uint64))
        return Way(lambda t: t.view(torch.int64).clone(), kind, lambda t: t.view(torch.uint64))
    return None if computed is None else Way(lambda t: t.to(computed), kind, lambda t: t)


def _reduced(method: Method, original: Callable[..., Any], group: Any, args: tuple[Any, ...], found: Way) -> Any:
    """Call a reduction in another way."""
    options = args[-1]
    written = list(leaves([args[method.written]]))
    changed = list(args)
    if method.read is None:
        changed[method.written] = map_leaves(lambda t: _copied(found.before(t), t), args[method.written])
    else:
        of = next(iter(leaves([args[method.read]])))
        dtype = found.before(of.new_empty(0)).dtype
        changed[method.read] = map_leaves(found.before, args[method.read])
        changed[method.written] = map_leaves(lambda t: torch.empty_like(t, dtype=dtype), args[method.written])
    results = list(leaves([changed[method.written]]))
    keeps = method.name != "reduce" or options.rootRank == group.rank()
    before = options.reduceOp
    options.reduceOp = c10d.ReduceOp(found.kind)
    try:
        work = original(group, *changed)
    finally:
        options.reduceOp = before

    def finish(waited: float | None = None) -> list[Tensor]:
        if keeps:
            for t, result in zip(written, results, strict=True):
                t.copy_(found.after(result))
        return written

    if work is None:
        finish()
        return None
    return FollowedWork(work, finish, _told(method.name.strip("_"), group))


@functools.cache
def _exchanges_lists() -> bool:
    """Whether gloo has `alltoall`: torch 2.11 has it for one tensor alone. Asked of a group of this process."""
    alone: Any = c10d.ProcessGroupGloo(distributed.HashStore(), 0, 1, timedelta(seconds=30))
    try:
        alone.alltoall([torch.empty(1)], [torch.empty(1)], c10d.AllToAllOptions()).wait()
    except RuntimeError:
        return False
    return True


def _exchanged(group: Any, written: list[Tensor], read: list[Tensor], options: Any) -> Any:
    """`alltoall`, as that of one tensor, cut into parts of any size."""
    result = torch.cat([torch.empty_like(t.detach().reshape(-1)) for t in written])
    sizes = [t.numel() for t in written]
    parts = [t.detach().reshape(-1) for t in read]
    work = group.alltoall_base(result, torch.cat(parts), sizes, [t.numel() for t in parts], options)

    def finish(waited: float | None = None) -> list[Tensor]:
        for t, part in zip(written, result.split(sizes), strict=True):
            t.copy_(part.view(t.shape))
        return written

    if work is None:
        finish()
        return None
    return FollowedWork(work, finish, _told("alltoall", group))


def _told(name: str, group: Any) -> str:
    return f"{name} of rank {group.rank()} in a group of {group.size()}, at {site.caller()}"


def _copied(changed: Tensor, t: Tensor) -> Tensor:
    """What is written instead of `t`, which stays what it is until the work is finished."""
    return changed.clone() if changed is t else changed


def _as_moved(value: Any) -> Any:
    return value.view(MOVED_AS[value.dtype]) if isinstance(value, Tensor) and value.dtype in MOVED_AS else value


def _flat(value: Any) -> Any:
    """What gloo would cut along its first dimension, which need not be one of as many as there are ranks."""
    is_one = isinstance(value, Tensor) and value.dim() != 1 and value.is_contiguous()
    return value.detach().view(-1) if is_one else value


def _as_real(value: Any) -> Any:
    return torch.view_as_real(value) if isinstance(value, Tensor) else value


def _wrapped(method: Method, original: Callable[..., Any], is_ours: Callable[[Any], bool]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        return noted(group, _by_gloo(group, args, kwargs))

    def _by_gloo(group: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        first = next((t for t in leaves([args]) if isinstance(t, Tensor)), None)
        if first is None or kwargs or not is_ours(group):
            return original(group, *args, **kwargs)
        if method.is_flat:
            args = tuple(map(_flat, args))
        if not method.reduces:
            if method.name == "alltoall" and not _exchanges_lists():
                return _exchanged(group, *args)
            if method.name == "gather" and first.dtype.is_complex:  # the one that does not take them
                return original(group, *(map_leaves(_as_real, a) for a in args))
            if first.dtype in MOVED_AS:
                return original(group, *(map_leaves(_as_moved, a) for a in args))
            return original(group, *args)
        operation = getattr(args[-1], "reduceOp", None)
        found = None if operation is None else way(operation, first.dtype, group.size())
        return original(group, *args) if found is None else _reduced(method, original, group, args, found)

    return call


def install(is_ours: Callable[[Any], bool]) -> None:
    """Let groups that are ours have what gloo lacks. Once for each process."""
    barrier = distributed.monitored_barrier

    @functools.wraps(barrier)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        # torch asks for the backend's name.
        of: Any = distributed.group.WORLD if group is None else group
        if of is None or not is_ours(of):
            return barrier(group, timeout, wait_all_ranks)
        given = timeout or distributed.distributed_c10d._get_default_timeout(distributed.Backend("gloo"))
        given = timedelta(seconds=given) if isinstance(given, float) else given
        of.monitored_barrier(given, wait_all_ranks=wait_all_ranks)  # which names who has not come

    module: Any = distributed.distributed_c10d
    module.monitored_barrier = monitored_barrier
    distributed.monitored_barrier = monitored_barrier
    kind: Any = c10d.ProcessGroup
    for method in METHODS:
        original = getattr(kind, method.name, None)
        if original is not None:
            setattr(kind, method.name, _wrapped(method, original, is_ours))
