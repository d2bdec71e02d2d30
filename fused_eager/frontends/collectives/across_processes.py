"""Collectives of processes inside XLA: each rank launches the same program, and its values stay on its device.

JAX knows the devices of all ranks then (`multi_controller`). A rank's part is one of an array that is laid over them,
as `across` has it for the devices of one process. Whether XLA serves a call is decided by what has to be the same on
all ranks, its kind, shapes, dtypes and reduction: so all decide alike. The others are the host's.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch._C import _distributed_c10d as c10d

from fused_eager.cache.exits import call_at_exit, fail_at_exit
from fused_eager.fusion_rules import collectives
from fused_eager.fusion_rules.collectives import Program
from fused_eager.fusion_rules.deferred import jax

from ...devices.accelerator import moved, shaped
from ...devices.buffer import LOCK
from ...log.reasons import Reason
from ...ranks import calls, job, multi_controller, order
from ...ranks.multi_controller import has_joined
from ...ranks.table import Collective
from ...ranks.work import told
from ...xla import enable_x64
from ..device import transfers
from ..device.doors import CURRENT, DOORS
from ..device.transfers import is_ours
from . import across, in_regions

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Members:
    """The devices of a group's ranks, in its order, and which rank this is."""

    devices: tuple[Any, ...]
    rank: int

    @property
    def own(self) -> Any:
        """This rank's."""
        return self.devices[self.rank]

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.devices)


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor that a rank gives, the program of all ranks' parts, and where its pieces go: to nobody on this rank, or
    to each of these tensors as much as it has room for."""

    given: Tensor
    program: Program
    kind: str = ""
    to: Sequence[Tensor] = ()


# ---- what XLA makes of a call; None: the host does it --------------------------------------------------------------

Given = dict[str, Any]
Parts = list[Part] | None


def _reduces(given: Given, tensors: Sequence[Tensor], scattered: bool = False) -> str:
    """The reduction, if XLA has it for these tensors; else an empty string."""
    name = calls.reduction(given["reduce_op"])
    on_a_tpu = DOORS[0].device.xla.platform == "tpu"
    return name if all(across.reduces(name, t.dtype, scattered, on_a_tpu) for t in tensors) else ""


def _allreduce(given: Given, of: Members) -> Parts:
    kind = _reduces(given, given["tensors"])
    return [Part(t, collectives.summed, kind, [t]) for t in given["tensors"]] if kind else None


def _reduce(given: Given, of: Members) -> Parts:
    kind, here = _reduces(given, given["tensors"]), given["root_rank"] == of.rank
    return [Part(t, collectives.summed, kind, [t] if here else ()) for t in given["tensors"]] if kind else None


def _broadcast(given: Given, of: Members) -> Parts:
    root, on_a_tpu = given["root_rank"], DOORS[0].device.xla.platform == "tpu"
    if any(t.is_complex() or (on_a_tpu and t.dtype is torch.float64) for t in given["tensors"]):
        return None
    # The root's own is what it has; but as a program of all ranks it is the same with each.
    writes = root != of.rank or in_regions.serves()
    return [Part(t, collectives.chosen, f"{root}", [t] if writes else ()) for t in given["tensors"]]


def _allgather(given: Given, of: Members) -> Parts:
    if len(given["input_tensors"]) != 1:
        return None
    (t,), (out,) = given["input_tensors"], given["output_tensors"]
    return [Part(t, collectives.gathered, "", out)] if _are_alike([t, *out]) else None


def _allgather_flat(given: Given, of: Members) -> Parts:
    return _gathered([(given["input_tensor"], given["output_tensor"])], of)


def _allgather_flat_coalesced(given: Given, of: Members) -> Parts:
    return _gathered(list(zip(given["inputs"], given["outputs"], strict=True)), of)


def _gathered(pairs: Sequence[tuple[Tensor, Tensor]], of: Members) -> Parts:
    if any(out.numel() != of.size * t.numel() for t, out in pairs):  # gloo has its error for it
        return None
    return [Part(t, collectives.gathered, "", [out]) for t, out in pairs]


def _scattered(pairs: Sequence[tuple[Tensor, Tensor]], given: Given, of: Members) -> Parts:
    kind = _reduces(given, [t for t, _ in pairs], scattered=True)
    if not kind or any(t.numel() != of.size * out.numel() for t, out in pairs):
        return None
    return [Part(t, collectives.scattered, kind, [out]) for t, out in pairs]


def _reduce_scatter(given: Given, of: Members) -> Parts:
    if len(given["output_tensors"]) != 1:
        return None
    (out,), (pieces,) = given["output_tensors"], given["input_tensors"]
    if not _are_alike([out, *pieces]):
        return None
    return _scattered([(torch.stack([t.detach() for t in pieces]), out)], given, of)


def _reduce_scatter_flat(given: Given, of: Members) -> Parts:
    return _scattered([(given["input_tensor"], given["output_tensor"])], given, of)


def _reduce_scatter_flat_coalesced(given: Given, of: Members) -> Parts:
    return _scattered(list(zip(given["inputs"], given["outputs"], strict=True)), given, of)


def _alltoall_flat(given: Given, of: Members) -> Parts:
    t, out = given["input"], given["output"]
    is_even = not (given["output_split_sizes"] or given["input_split_sizes"]) and t.numel() == out.numel()
    return [Part(t, collectives.exchanged, "", [out])] if is_even and t.shape[0] % of.size == 0 else None


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    return len({(t.dtype, t.shape) for t in tensors}) == 1


_PROGRAMS: dict[str, Callable[[Given, Members], Parts]] = {
    "allreduce_": _allreduce,
    "allreduce_coalesced_": _allreduce,
    "reduce_": _reduce,
    "broadcast_": _broadcast,
    "allgather_": _allgather,
    "_allgather_base_": _allgather_flat,
    "allgather_into_tensor_coalesced_": _allgather_flat_coalesced,
    "reduce_scatter_": _reduce_scatter,
    "_reduce_scatter_base_": _reduce_scatter_flat,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_flat_coalesced,
    "alltoall_base_": _alltoall_flat,
}


def serve(row: Collective, given: Given, group: Any, serving: Any, reason: Reason, waits: bool) -> Any:
    """Launch a collective inside XLA, and return its work; None if the host is to do it.

    Arguments:
        given: the op's arguments by name.
        serving: the group in which the host's values go.
        waits: it is done when this returns, as the mode says.

    Raises:
        RankLost: a rank that it needs is lost.
    """
    found = _PROGRAMS.get(row.op) if has_joined() else None
    if found is None:
        return None
    tensors = [t for name in (*row.reads, *row.updates, *row.writes) for t in _flat(given[name])]
    if not tensors or not all(is_ours(t) and transfers.goes_between(t) for t in tensors):
        return None
    if len({t.dtype for t in tensors}) > 1:  # gloo has its error for it
        return None
    of = _members(group)
    parts = found(given, of)
    if parts is None:
        return None
    _compare(row, given, group, of, reason)
    order.ran_in_xla(serving.group_name)
    with torch.no_grad(), job.explained(lambda: f"calls {row.op.strip('_')} at {reason.site}"):
        _before_the_end()
        _attend()
        ended = told(row, serving, sum(t.nbytes for t in tensors), 0.0, str(reason.site))
        if in_regions.serves():
            in_regions.record(parts, of.devices, of.rank, ended)
            if waits:
                in_regions.run_what_is_pending(reason)
        else:
            try:
                numbers = [_launched(part, of, reason) for part in parts]
            except ValueError as error:  # of a program that has run at once
                raise RuntimeError(str(error)) from error
            _under_way.append(Launched(numbers, ended))
        if waits:
            for launched in _under_way:
                _wait_for(launched.numbers)
            _attend()
    return _in_the_queue([t for part in parts for t in part.to])


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for of in value:
            yield from _flat(of)


@functools.cache
def _with_a_number(program: Program) -> Program:
    """The program, which also makes one number, by which it can be told when it has ended."""

    def both(x: Any, kind: str, size: int) -> Any:
        made = program(x, kind=kind, size=size)
        return made, made[:1]

    return both


def _launched(part: Part, of: Members, reason: Reason) -> Any:
    """Launch a part's program and put its pieces where they go. Returns the number that it makes."""
    door = DOORS[part.given.get_device()]
    own, array = transfers.copied(part.given, reason)
    with LOCK, enable_x64(True):
        flat = moved(shaped(array, (1, own.numel())), of.own)
        laid = jax.make_array_from_single_device_arrays((of.size, own.numel()), across.laid_over(of.devices), [flat])
        function = across.compiled(_with_a_number(part.program), part.kind, of.devices)
        (shard,), (number,) = (a.addressable_shards for a in function(laid))
        out = moved(shaped(shard.data, (shard.data.size,)), door.device.xla)
        pieces = transfers.of_array(door, out).split([t.numel() for t in part.to]) if part.to else ()
    for t, piece in zip(part.to, pieces, strict=True):
        t.detach().copy_(piece.view(t.shape))
    return number.data


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """A collective that may be under way: the numbers that its programs make, and what tells the event log that it has
    ended."""

    numbers: list[Any]
    ended: Callable[[float | None], None]


_under_way: list[Launched] = []
in_regions.LAUNCHED.append(lambda token, ended: _under_way.append(Launched([token], ended)))
AT_THE_END = Reason("sync.collective", "the program ends")
LOOK = 0.01  # seconds


def _attend() -> None:
    """Forget the collectives that have ended, and tell of them.

    Raises:
        RuntimeError: one has failed. Nobody may ever read what it was to make.
    """
    over = [launched for launched in _under_way if all(number.is_ready() for number in launched.numbers)]
    _under_way[:] = [launched for launched in _under_way if launched not in over]
    for launched in over:
        _wait_for(launched.numbers)
        launched.ended(None)


def _wait_for(numbers: Sequence[Any]) -> None:
    for number in numbers:
        number.block_until_ready()


def _finish() -> None:
    """At the end of the process: wait for what has been launched, as the others need this rank for it; but not for a
    rank that is lost."""
    failed = None
    try:
        in_regions.run_what_is_pending(AT_THE_END)
        while _under_way and not job.is_lost():
            _attend()
            time.sleep(LOOK)
    except RuntimeError as error:
        failed = job.explain(error, "has come to its end", is_raised=False)
    if failed is not None:  # not while it is handled: it would be taken for one that ends the process anyway
        fail_at_exit(failed)


@functools.cache
def _before_the_end() -> None:
    """Called once the job is joined: its heartbeat ends after this."""
    call_at_exit(_finish)


_MEMBERS: weakref.WeakKeyDictionary[Any, Members] = weakref.WeakKeyDictionary()


def announce(rank: int) -> None:
    """This process is about to make its default group, as that rank: its collectives are the current device's."""
    if has_joined():
        multi_controller.publish(rank, jax.process_index(), CURRENT[0])


def _members(group: Any) -> Members:
    """The devices of a group's ranks."""
    found = _MEMBERS.get(group)
    if found is None:
        platform = DOORS[0].device.xla.platform
        by_process: dict[int, list[Any]] = {}
        for device in jax.devices(platform):
            by_process.setdefault(device.process_index, []).append(device)
        told_of = [multi_controller.published(rank) for rank in distributed.get_process_group_ranks(group)]
        devices = tuple(by_process[process][device] for process, device in told_of)
        found = _MEMBERS[group] = Members(devices, group.rank())
    return found


def _compare(row: Collective, given: Given, group: Any, of: Members, reason: Reason) -> None:
    """Where the order of collectives is compared: of those of all groups over the same devices, as these do one after
    the other.

    Raises:
        CollectivesDiffer: another rank has launched another one.
    """
    beat = job.current()
    if beat is not None and beat.checks:
        called = f"{calls.words(row.op, row, given)} in group {group.group_name}"
        order.check(beat, f"of {sorted(d.id for d in of.devices)}", called, str(reason.site), 0)


def _in_the_queue(results: Sequence[Tensor]) -> Any:
    """The work of a collective that the device's queue has: what comes later comes after it, so nobody waits, and an
    error is raised where a result is used."""
    future: Any = torch.futures.Future()
    future.set_result(list(results))
    return c10d._create_work_from_future(future)  # type: ignore[attr-defined] # of C++: Python's has to be kept


__all__ = ["announce", "serve"]
