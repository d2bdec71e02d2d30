"""Kernels of collectives: what torch calls for each op of `c10d` on tensors of a device.

The values that a collective reads are fetched, the host's own group does the work, and what it writes is put on the
device. The work runs beside the program: `wait`, or whoever is handed the future, has the results.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from torch._C import _distributed_c10d as c10d

from fused_eager.fusion_rules.lowering import leaves, map_leaves

from ...config import resolve
from ...devices.arrivals import await_all, await_values
from ...devices.buffer import LOCK
from ...devices.storage import storage_of
from ...executing import run
from ...log import site
from ...log.reasons import Reason
from ...quiet import as_eager, as_kernel, uncompiled
from ...ranks import arrival, calls, job
from ...ranks.table import COLLECTIVES, Collective
from ...ranks.work import described, told
from ..device import transfers
from ..device.doors import DOORS
from ..device.transfers import is_ours
from . import across_processes, grouping, in_regions, lacking, reducers
from .arriving import SILENT, ArrivingWork
from .promised import of_a_cut

Tensor = torch.Tensor


class Copies:
    """What the host's group works on, instead of a device's tensors, and the way back."""

    def __init__(self, row: Collective, reason: Reason):
        self.row, self.reason = row, reason
        # By the identity of a tensor: it, where it lay when it was given (it may be laid elsewhere until the results
        # are there), its twin. What is read alone has a twin of its own: the same tensor may be written, too.
        self._read: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._written: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def of(self, name: str, value: Any) -> Any:
        """An argument as the host's group takes it."""
        if name in self.row.reads or name in self.row.updates or name in self.row.writes:
            return map_leaves(lambda leaf: self._twin(name, leaf) if is_ours(leaf) else leaf, value)
        return value

    def _twin(self, name: str, t: Tensor) -> Tensor:
        twins = self._read if name in self.row.reads else self._written
        if id(t) not in twins:
            with as_eager():
                if name in self.row.writes:
                    twin = torch.empty(t.shape, dtype=t.dtype)
                else:
                    twin = transfers.to_host(t, self.reason).contiguous()
                    if name in self.row.updates:
                        twin = twin.clone()
            twins[id(t)] = t, t.detach(), twin
        return twins[id(t)][2]

    @property
    def nbytes(self) -> int:
        """Of all tensors that are taken."""
        return sum(twin.nbytes for _, _, twin in (*self._read.values(), *self._written.values()))

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        """Those that are written."""
        return [storage_of(t) for t, _, _ in self._written.values()]

    def put_back(self) -> list[Tensor]:
        """Give the device's tensors what has been written; they are returned. Once."""
        for _, place, twin in self._written.values():
            transfers.copy_(place, twin)
        results = [t for t, _, _ in self._written.values()]
        self._written.clear()  # a program may keep its work
        self._read.clear()  # here, and not before: else the group's own threads would be the last to hold them
        return results


def _run_what_is_read(row: Collective, given: dict[str, Any], reason: Reason) -> None:
    """Have run what the collective reads, and after that what else is pending: that runs while values are sent."""
    named = [given.get(name) for name in (*row.reads, *row.updates)]
    with LOCK:
        run.flush_first([DOORS[t.get_device()].buffer_of(t) for t in leaves(named) if is_ours(t)], reason)


def _kernel(row: Collective) -> Callable[..., Any]:
    op = getattr(torch.ops.c10d, row.op).default
    names = [a.name for a in op._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        group = c10d.ProcessGroup.unbox(given["process_group"])
        await_all(come=True)
        if row.op in SILENT:
            ArrivingWork.make_room()
        await_values(list(given.values()))
        serving = _serve_the_host(group)
        config = DOORS[0].stream.config
        calls.begin(row.op, given, config, serving)
        reason = Reason("sync.collective", of_a_cut(row.op), site.describe(site.here()))
        launched = across_processes.serve(row, given, group, serving, reason, waits=config.mode != "fused")
        if launched is not None:
            return (given[names[0]], launched.boxed()) if len(op._schema.returns) > 1 else launched.boxed()
        in_regions.run_what_is_pending(reason)  # others may wait for that, and not for this
        began = time.monotonic()
        copies = Copies(row, reason)
        _run_what_is_read(row, given, reason)
        named = {name: copies.of(name, value) for name, value in given.items()}
        named["process_group"] = serving.boxed()
        place = str(reason.site)
        ended = told(row, serving, copies.nbytes, time.monotonic() - began, place)

        def finish(waited: float | None) -> list[Tensor]:
            results = copies.put_back()
            ended(waited)
            return results

        with job.explained(lambda: f"calls {row.op.strip('_')} at {place}"):
            out = op(**named)
        boxed = out[-1] if isinstance(out, tuple) else out
        if boxed is None:
            return None  # a monitored barrier
        goes_on = row.is_for_all and config.mode == "fused"
        storages = copies.storages if goes_on else []
        told_of = described(row, group, place)
        work = ArrivingWork(c10d.Work.unbox(boxed), finish, told_of, storages, row.op in SILENT)
        return (given[names[0]], work.boxed()) if isinstance(out, tuple) else work.boxed()

    return kernel


_HOST = torch.device("cpu")
_serving: dict[str, tuple[Any, Any]] = {}  # by a group's name: the device's backend, and the group of that alone


def _serve_the_host(group: Any) -> Any:
    """The group in which the device's backend takes CPU tensors, which it can: the same one where it serves both, and
    where it was made for the device alone. A group that has another backend for CPU tensors goes on to use it for
    those: threads that save checkpoints rely on their collectives being apart from those of a training."""
    device = torch._C._get_privateuse1_backend_name()
    own = next((group._get_backend(of) for of in group._device_types if of.type == device), None)
    if own is None:
        return group
    if _HOST not in group._device_types:
        group._register_backend(_HOST, c10d.ProcessGroup.BackendType.GLOO, own)
        return group
    if group._get_backend(_HOST) is own:
        return group
    known = _serving.get(group.group_name)
    if known is None or known[0] is not own:
        separate: Any = c10d.ProcessGroup(group.get_group_store(), group.rank(), group.size())
        separate._register_backend(_HOST, c10d.ProcessGroup.BackendType.GLOO, own)
        separate._set_default_backend(c10d.ProcessGroup.BackendType.GLOO)
        separate._set_group_name(group.group_name)
        known = _serving[group.group_name] = own, separate
    return known[1]


def backend(group: Any, _: Any) -> Any:
    """What serves a group: torch's own for the host, through which a device's values go, too.

    Arguments:
        group: what torch tells of a group that is made: its store, its ranks, its timeout.

    Raises:
        RuntimeError: this torch has none.
        RankLost: a rank does not come to make the group, or is lost meanwhile.
    """
    if not distributed.is_gloo_available():
        raise RuntimeError("the backend 'fused_eager' sends values with gloo, and this torch is built without it")
    if not distributed.is_initialized():
        job.begin_anew()
        across_processes.announce(group.group_rank)
    store, rank, size = group.store, group.group_rank, group.group_size
    ranks = list(group.global_ranks_in_group) or list(range(size))
    name = arrival.meet(store, ranks, ranks[rank], group.timeout)
    with job.explained(lambda: "makes a process group"):
        made = c10d.ProcessGroupGloo(distributed.PrefixStore(name, store), rank, size, timeout=group.timeout)
    if not distributed.is_initialized():
        job.join(distributed.PrefixStore(name, store), rank, size, resolve())
    return made


NAMES = ("fused_eager", "tpu_dist")


def _is_ours(group: Any) -> bool:
    """Whether the library's backend serves a group."""
    served = str(distributed.distributed_c10d._world.pg_backend_config.get(group, ""))
    return any(name in served for name in NAMES)


_libraries: list[torch.library.Library] = []


def register(device: str) -> None:
    """Register the backend for a device type, and a kernel for each collective. Once for each process."""
    if not distributed.is_available():
        return
    for name in NAMES:
        distributed.Backend.register_backend(name, backend, extended_api=True, devices=["cpu", device])
    lacking.install(_is_ours)
    grouping.install(_is_ours)
    reducers.install(_serve_the_host)
    c10d.Work.wait = job.waits(c10d.Work.wait)  # type: ignore[method-assign]
    lib = torch.library.Library("c10d", "IMPL")
    _libraries.append(lib)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they stand in the place of others, as they are meant to
        for row in COLLECTIVES:
            if hasattr(torch.ops.c10d, row.op):
                lib.impl(row.op, uncompiled(as_kernel(_kernel(row))), "PrivateUse1", allow_override=True)


__all__ = ["NAMES", "register"]
