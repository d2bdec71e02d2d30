"""Collectives among the devices of one process, inside XLA: what the ranks give stays on their devices.

The parts of a call are one array, laid over a mesh of the devices, a part on each; a collective is a program of that
array, and on chips it goes over the links between them. What only goes from one device to another needs no program: the
copy does it. Where the CPU stands in for the devices, the host combines what it has in its memory anyway (`combined`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fused_eager.fusion_rules.collectives import AXIS, Program, exchanged, gathered, scattered, summed
from fused_eager.fusion_rules.deferred import jax

from ...devices.accelerator import moved, shaped
from ...devices.buffer import LOCK
from ...log.reasons import Reason
from ...quiet import as_eager
from ...xla import enable_x64
from ..device import transfers
from ..device.doors import DOORS
from ..device.transfers import is_ours
from . import combined
from .combined import Given, Got

Tensor = torch.Tensor
ON_SIMULATED = False  # whether the CPU does so, too, where it stands in for the devices
_REASON = Reason("sync.collective", "between devices")


def part(t: Tensor, reason: Reason) -> Tensor:
    """A rank's part as the others see it: a copy which nobody writes, on the device if it stays there, else on the
    host."""
    t = t.detach()
    if not is_ours(t):
        with as_eager(), torch.no_grad():
            return t.clone(memory_format=torch.preserve_format if t.is_sparse else torch.contiguous_format)
    if not _stays(t):
        return _fetched(t, reason)
    return transfers.copied(t, reason)[0]  # begun here, so that what it fails with is raised here


def _stays(t: Tensor) -> bool:
    """Whether a part stays on its device."""
    of_chips = ON_SIMULATED or DOORS[t.get_device()].device.xla.platform != "cpu"
    return of_chips and transfers.goes_between(t)


def _fetched(t: Tensor, reason: Reason = _REASON) -> Tensor:
    with as_eager(), torch.no_grad():
        return transfers.to_host(t.detach(), reason).contiguous()


def together(combine: Callable[[Sequence[Given]], Got], given: Sequence[Given]) -> Got:
    """What each rank gets, in the order of the group. Raises as `combine`.

    Arguments:
        combine: one of `combined`'s functions.
    """
    if combine in _MOVES or not any(is_ours(t) for of in given for t in of.values):
        return combine(given)
    program = _PROGRAMS.get(combine)
    found = program(given) if program is not None and _is_one_array(given) else None
    if found is not None:
        return found
    return combine([Given([_fetched(t) if is_ours(t) else t for t in of.values], of.about) for of in given])


def _is_one_array(given: Sequence[Given]) -> bool:
    """Whether each tensor of a rank has its like on all others, each on a device of its own."""
    if len({len(of.values) for of in given}) > 1:
        return False
    return all(
        all(is_ours(t) for t in parts)
        and len({t.get_device() for t in parts}) == len(parts)
        and len({(t.dtype, t.shape) for t in parts}) == 1
        for parts in zip(*(of.values for of in given), strict=True)
    )


@functools.lru_cache(maxsize=64)
def laid_over(devices: tuple[Any, ...]) -> Any:
    """The sharding of an array of which each of these devices has a part."""
    return jax.sharding.NamedSharding(jax.sharding.Mesh(devices, (AXIS,)), jax.sharding.PartitionSpec(AXIS))


@functools.lru_cache(maxsize=256)
def compiled(program: Program, kind: str, devices: tuple[Any, ...]) -> Any:
    """A program for the parts on these devices, as a jitted function of the array that is laid over them."""
    laid = laid_over(devices)

    def of_part(part: Any) -> Any:  # (1, *shape)
        return jax.tree.map(lambda out: out.reshape(1, -1), program(part.reshape(-1), kind=kind, size=len(devices)))

    return jax.jit(jax.shard_map(of_part, mesh=laid.mesh, in_specs=laid.spec, out_specs=laid.spec))


def _run(program: Program, kind: str, parts: Sequence[Tensor], shape: Sequence[int]) -> list[Tensor]:
    """Each rank's result, of this shape, on its device."""
    doors = [DOORS[t.get_device()] for t in parts]
    devices = tuple(door.device.xla for door in doors)
    with LOCK, enable_x64(True):
        arrays = [
            moved(shaped(door.array_of(door.buffer_of(t), _REASON), (1, *t.shape)), device)
            for door, device, t in zip(doors, devices, parts, strict=True)
        ]
        whole = len(parts), *parts[0].shape
        laid = jax.make_array_from_single_device_arrays(whole, laid_over(devices), arrays)
        made = {shard.device: shard.data for shard in compiled(program, kind, devices)(laid).addressable_shards}
        return [transfers.of_array(door, shaped(made[d], shape)) for door, d in zip(doors, devices, strict=True)]


# ---- what they make of a call; None: the host does it --------------------------------------------------------------


def _kind(given: Sequence[Given], scattered: bool = False) -> str:
    """The reduction, if XLA has it between devices and all ranks mean the same; else an empty string."""
    (name, *others) = {of.about["operation"].op.name for of in given}
    on_a_tpu = DOORS[given[0].values[0].get_device()].device.xla.platform == "tpu"
    known = not others and all(reduces(name, t.dtype, scattered, on_a_tpu) for t in given[0].values)
    return name if known else ""


def reduces(name: str, dtype: torch.dtype, scattered: bool, on_a_tpu: bool) -> bool:
    """Whether XLA has a reduction between devices. (A TPU's numbers of 64 bits are two of 32.)"""
    if dtype.is_complex or dtype is torch.bool or (name == "AVG" and not dtype.is_floating_point):
        return False
    if on_a_tpu and dtype.itemsize == 8 and (name != "SUM" or dtype.is_floating_point):
        return False
    return name in (("SUM", "AVG") if scattered else ("SUM", "AVG", "MIN", "MAX"))


def _by_rank(columns: Sequence[list[Tensor]], size: int) -> Got:
    return [[column[r] for column in columns] for r in range(size)]


def _columns(given: Sequence[Given]) -> list[tuple[Tensor, ...]]:
    return list(zip(*(of.values for of in given), strict=True))


def _allreduce(given: Sequence[Given]) -> Got | None:
    kind = _kind(given)
    if not kind:
        return None
    return _by_rank([_run(summed, kind, parts, parts[0].shape) for parts in _columns(given)], len(given))


def _reduce(given: Sequence[Given]) -> Got | None:
    sums = _allreduce(given)
    return sums and [of if r == given[r].about["root"] else None for r, of in enumerate(sums)]


def _allgather_flat(given: Sequence[Given]) -> Got | None:
    size = len(given)
    return _by_rank([_run(gathered, "", p, (size * p[0].numel(),)) for p in _columns(given)], size)


def _reduce_scatter_flat(given: Sequence[Given]) -> Got | None:
    kind, size = _kind(given, scattered=True), len(given)
    if not kind or any(t.numel() % size for t in given[0].values):
        return None
    return _by_rank([_run(scattered, kind, p, (p[0].numel() // size,)) for p in _columns(given)], size)


def _alltoall_flat(given: Sequence[Given]) -> Got | None:
    size = len(given)
    even = all(len(set(of.about["sizes"])) < 2 and of.values[0].shape[0] % size == 0 for of in given)
    if not even:
        return None
    return _by_rank([_run(exchanged, "", p, (p[0].numel(),)) for p in _columns(given)], size)


_PROGRAMS: dict[Any, Callable[[Sequence[Given]], Got | None]] = {
    combined.allreduce: _allreduce,
    combined.reduce: _reduce,
    combined.allgather_flat: _allgather_flat,
    combined.reduce_scatter_flat: _reduce_scatter_flat,
    combined.alltoall_flat: _alltoall_flat,
}
# What only says which part goes to whom.
_MOVES = (
    combined.broadcast, combined.allgather, combined.allgather_by_rank, combined.gather, combined.scatter,
    combined.alltoall,
)  # fmt: skip
