"""Collectives inside regions: they are recorded like other ops, and XLA overlaps them with what does not need them.

All ranks have to run the same program then. So before a rank runs one it asks the others (`ranks.agreement`), and where
one of them differs, each collective is a region of its own, on all ranks, for that time. What is pending runs when its
time has come, as without collectives; or before the host's group is used, as the program ends, or after `PATIENCE`: the
others may wait for it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fused_eager.fusion_rules.collectives import named

from ...devices.buffer import LOCK
from ...executing import load, run
from ...log import site
from ...log.events import LOG
from ...log.reasons import Reason
from ...planning.plan import collective
from ...ranks import job
from ...ranks.agreement import Agreement
from ...tracing.stream import Node, Stream
from ..device.doors import DOORS

Told = Callable[[float | None], None]
PATIENCE = 2.0  # seconds
_ENDS = Reason("sync.collective", "the process group is destroyed")
_LATE = Reason("sync.collective", "other ranks may wait for it")
_agreements: dict[tuple[int, str], Agreement] = {}
_numbers: dict[int, tuple[int, int]] = {}  # by stream: its epoch, and how many collectives it holds
_told: deque[Told] = deque()  # of what has been recorded and not launched
_began = [0.0]  # when the first of these was recorded
_watch: list[threading.Thread] = []
LAUNCHED: list[Callable[[Any, Told], None]] = []  # is told of what has been launched


def serves() -> bool:
    """Whether collectives are recorded. In each mode, so that ranks in different modes run the same programs."""
    return DOORS[0].stream.config.collectives == "regions" and job.current() is not None


def record(parts: Sequence[Any], devices: Sequence[Any], rank: int, ended: Told) -> None:
    """Record a collective: what it makes of each part is written where that is to go. `ended` is called once it has
    run."""
    name = named(devices)
    _agreement(name, rank, len(devices))
    if not load.RANKS:
        load.RANKS.append(_Ranks())
        job.ENDING.append(lambda: run_what_is_pending(_ENDS))
    for k, part in enumerate(parts):
        stream = DOORS[part.given.get_device()].stream
        epoch, number = _numbers.get(id(stream), (-1, 0))
        number = number if epoch == stream.epoch else 0
        _numbers[id(stream)] = stream.epoch, number + 1
        if not _told:
            _began[0] = time.monotonic()
        _told.append(ended if k == len(parts) - 1 else _nothing)
        flat = part.given.detach().reshape(-1)
        out = torch.ops.fused_eager.collective(flat, part.program.__name__, part.kind, name, number)
        for t, piece in zip(part.to, out.split([t.numel() for t in part.to]) if part.to else (), strict=True):
            t.detach().copy_(piece.view(t.shape))
    if not _watch:
        _watch.append(threading.Thread(target=_watching, name="fused_eager-collectives", daemon=True))
        _watch[0].start()


def run_what_is_pending(reason: Reason) -> None:
    """Run the streams that hold collectives. Raises as `run.flush`."""
    if not _told:
        return
    with LOCK:
        for stream in _pending():
            run.flush(stream, reason)


def _pending() -> list[Stream]:
    streams = [door.stream for door in DOORS]
    return [s for s in streams if s.nodes and _numbers.get(id(s), (-1, 0))[0] == s.epoch]


def _nothing(waited: float | None) -> None:
    """Of a collective of several parts the last one is told of."""


def _agreement(devices: str, rank: int, size: int) -> Agreement:
    beat = job.current()
    assert beat is not None
    key = id(beat), devices
    if key not in _agreements:
        _agreements[key] = Agreement(beat, devices, rank, size)
    return _agreements[key]


class _Ranks:
    """What the runtime asks before it runs collectives that were recorded, and tells after that."""

    called = "the collectives of a region"  # what this rank is at meanwhile, as the others are told

    def agree(self, nodes: Sequence[Node], digest: str) -> bool:
        beat, began = job.current(), time.perf_counter()
        if beat is None:
            return False
        names = [collective(node) for node in nodes]
        if digest:
            together = _agreements[id(beat), names[0]].reached(digest, len(names))
        else:
            for name in names:
                _agreements[id(beat), name].alone()
            together = False
        waited, line = time.perf_counter() - began, str(site.describe(nodes[0].place))
        LOG.emit("agreement", collectives=len(names), together=together, wait_s=waited, site=line)
        return together

    def launched(self, count: int, token: Any) -> None:
        for _ in range(min(count, len(_told))):
            LAUNCHED[0](token, _told.popleft())


def _watching() -> None:
    """A rank that goes on with something else has what it has called run all the same."""
    while True:
        time.sleep(PATIENCE / 4)
        if _told and time.monotonic() - _began[0] > PATIENCE and not job.is_lost():
            with contextlib.suppress(Exception):  # it is raised where a result is used
                run_what_is_pending(_LATE)
