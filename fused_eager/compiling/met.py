"""Met: the regions that a program comes to on a simulated device, written down as the keys that a target asks for.

Each is lowered for the target too, so that what has no lowering there becomes an island here as it will there. With
`valueless` nothing is compiled or computed here: every result is zeros that take no memory until somebody writes them.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fused_eager.cache import Key, Unencodable

from ..devices.accelerator import Accelerator, unpaged
from ..devices.device import Device
from ..devices.home import Home
from ..log import site
from ..lowering.failed import NodeFailed
from ..planning import plan
from ..targets.device import TargetDevice
from ..tracing.stream import Node
from ..xla import enable_x64
from . import canonical, surroundings
from .compile import AROUND, Settings, lower
from .executable import Executable
from .key import Computation


@dataclass(frozen=True, slots=True)
class Op:
    """One op of a region: its name, and the line and the module of the program that it came from."""

    name: str
    line: str
    module: str = ""


@dataclass(slots=True)
class Met:
    """A region: its key for the target, its name, its ops, and how often it ran in each step of the program's.

    `beside` are the most bytes that were on the device meanwhile, its arguments left out. `why` says why it has no key,
    or no lowering for the target.
    """

    key: Key | None
    name: str
    ops: list[Op] = field(default_factory=list)
    runs: Counter[int] = field(default_factory=Counter)
    beside: int = 0
    why: str = ""


class Meetings:
    """What a program meets while it runs; `step` is the number of its current step."""

    def __init__(self, device: TargetDevice, salt: str, valueless: bool = False):
        self.device, self.salt, self.valueless = device, salt, valueless
        self.found: dict[str, Met] = {}
        self.step = 0
        self._lock = threading.Lock()

    def __call__(self, computation: Computation, settings: Settings, make: Callable[[], Executable]) -> Executable:
        """Stands around the making of an executable. Raises NodeFailed where the target has no lowering."""
        met = self._note(computation, settings)
        try:
            lower(computation, settings.bounds, self.device)
        except NodeFailed as failed:
            met.why = failed.reason
            raise
        made = _without_values(computation, settings.device) if self.valueless else make()
        return replace(made, call=self._counting(met, made.call, settings.device))

    def _note(self, computation: Computation, settings: Settings) -> Met:
        try:
            around = surroundings.parts(settings.bounds, self.salt, self.device)
            key = Key({"region": canonical.to_parts(computation), **around})
            digest, why = key.digest, ""
        except Unencodable as error:
            key, digest, why = None, computation.name, str(error)
        ops = [_op(node) for node in computation.chosen]
        with self._lock:
            return self.found.setdefault(digest, Met(key, computation.name, ops, why=why))

    def _counting(self, met: Met, call: Callable[..., Any], device: Device) -> Callable[..., Any]:
        def counted(*arrays: jax.Array) -> Any:
            met.runs[self.step] += 1
            met.beside = max(met.beside, _bytes_beside(arrays, device))
            return call(*arrays)

        return counted


def _bytes_beside(arrays: Sequence[jax.Array], device: Device) -> int:
    """Bytes of all that is on the device but the arguments: what tensors hold, and what later regions wait for."""
    taken = {id(a) for a in arrays}
    return sum(a.nbytes for a in device.xla.client.live_arrays() if id(a) not in taken and not a.is_deleted())


def _op(node: Node) -> Op:
    place = site.describe(node.place)
    return Op(node.op.name(), str(place), place.module)


@contextmanager
def uncut() -> Iterator[None]:
    """In the body, regions are cut for islands and what has to be alone, and for nothing else: the limit of fusing."""
    kept = plan.repeats.boundaries, plan.temporaries.boundaries
    plan.repeats.boundaries = plan.temporaries.boundaries = lambda *args: {}  # type: ignore[assignment]
    try:
        yield
    finally:
        plan.repeats.boundaries, plan.temporaries.boundaries = kept


@contextmanager
def meeting(meetings: Meetings) -> Iterator[None]:
    """In the body, what is to be compiled is noted, with the modules that it comes from."""
    AROUND.append(meetings)
    Accelerator.is_a_target, Accelerator.is_valueless = True, meetings.valueless
    site.ask_for_details(1)
    try:
        yield
    finally:
        site.ask_for_details(-1)
        AROUND.remove(meetings)
        Accelerator.is_a_target = Accelerator.is_valueless = False


def _without_values(computation: Computation, device: Device) -> Executable:
    homes: Sequence[Home] = [computation.homes[v] for v in computation.region.outputs]
    flags = np.zeros((1, 2), np.int64)

    def call(*arrays: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        with enable_x64(True):
            outputs = [unpaged(home, device.xla) for home in homes]
            return outputs, jax.device_put(flags, device.xla)

    return Executable(call, (), 0.0, computation.name)


def write(found: Sequence[Met], path: Path, **about: Any) -> None:
    """Regions as a file of JSON lines, and in its last line what else there is to say."""
    with path.open("w", encoding="utf-8") as file:
        for met in found:
            row = {
                "key": None if met.key is None else met.key.to_json(),
                "name": met.name,
                "ops": [[op.name, op.line, op.module] for op in met.ops],
                "runs": sorted(met.runs.items()),
                "beside": met.beside,
                "why": met.why,
            }
            file.write(json.dumps(row) + "\n")
        file.write(json.dumps({"about": about}) + "\n")


def read(path: Path) -> tuple[list[Met], dict[str, Any]]:
    """What `write` has written."""
    found, about = [], {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "about" in row:
            about = row["about"]
            continue
        key = None if row["key"] is None else Key.from_json(row["key"])
        runs = Counter({int(step): int(n) for step, n in row["runs"]})
        found.append(Met(key, row["name"], [Op(*op) for op in row["ops"]], runs, row["beside"], row["why"]))
    return found, about
