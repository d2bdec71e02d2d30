"""How long a configuration of a kernel takes: measured on the host or on a device, or what XLA's compiler for a target
expects. The last two are kept in the compile cache under the device's kind, so that what was forecast for a target is
found by a program that runs on one.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from fused_eager.cache import Key, Unencodable
from fused_eager.fusion_rules.xla_tpu.kernel_costs import steps

from ... import xla
from ...compiling import surroundings
from ...compiling.caching import Keeper
from ...compiling.compile import as_it_is, lower, trace, tracing_for
from ...compiling.cross import cost_of
from ...devices.device import Device
from ...devices.host.device import HOST
from ...executing import choices
from ...quiet import unobserved
from ...targets.device import STOOD_FOR
from . import native
from .program import Program, digest, form_of

Tensor = torch.Tensor
STEP = 0.35e-6  # seconds that a step of a grid takes by itself, of which XLA's compiler knows nothing
RUNS, BUDGET = 3, 0.2  # runs of each, and seconds after which no further one is begun


def device_of(tensors: Sequence[Tensor]) -> Device | None:
    """The device that a call on these is tuned for: the host where it computes them, as for a device over a CPU; None
    if they are on several."""
    if all(t.is_cpu for t in tensors):
        return HOST
    from ..device.doors import DOORS, is_on_device

    if not all(map(is_on_device, tensors)) or len({t.device for t in tensors}) > 1:
        return None
    if STOOD_FOR:
        return STOOD_FOR[-1]
    found: Device = DOORS[tensors[0].get_device()].device
    return HOST if found.xla.platform == "cpu" else found


class Run:
    """A call with one configuration, on a device, and on values made up."""

    def __init__(
        self, op: OpOverload, operands: Sequence[Tensor], numbers: Sequence[int | float], program: Program,
        device: Device,
    ):  # fmt: skip
        self.op, self.operands, self.numbers, self.program, self.device = op, operands, numbers, program, device
        self.form = form_of(operands)

    def keys(self, kept: Any, first: Run) -> list[Key]:
        """Under which keys the cache may have its time, `first` being the first configuration; it is kept under the
        first key. A device that is here takes what was forecast for its kind, as that is compiled already."""
        if not isinstance(kept, Keeper):
            return []
        config = digest(first.program.digest, self.program.digest, str(self.form))
        try:
            kept.describe_here()
            if self.device is HOST:
                return [choices.key((("config", config),), kept.salt, torch.get_num_threads())]
            parts = surroundings.parts(True, kept.salt, self.device)
            found = [{"format": choices.FORMAT, "how": how, "config": config} for how in ("forecast", "measured")]
            return [Key({"choice": about, **parts}) for about in found[:: 1 if not self.device.is_here else -1]]
        except Unencodable:
            return []

    @functools.cached_property
    def _call(self) -> Callable[[], list[Tensor]]:
        with unobserved():
            made = [_made_up(t) for t in self.operands]
        if self._is_on_host:
            return functools.partial(native.run, self.op, made, self.numbers, self.program.name)
        there = [t.to(like.device) for t, like in zip(made, self.operands, strict=True)]
        return lambda: list(self.op(there, self.numbers, self.program.name))

    @property
    def _is_on_host(self) -> bool:
        return self.device is HOST or not self.device.is_here

    @functools.cached_property
    def results(self) -> list[Tensor]:
        """What it returns; for a target, what its kernels do when they are interpreted."""
        with as_it_is():
            return [t.cpu() for t in self._call()]

    def seconds(self) -> float:
        """How long it takes.

        Raises:
            Exception: it cannot be run, or compiled.
        """
        if not self.device.is_here:
            return self._expected()
        times: list[float] = []
        self._call()  # compiles it
        while len(times) < RUNS and sum(times) < BUDGET:
            self._wait()
            began = time.perf_counter()
            made = self._call()
            self._wait()
            times.append(time.perf_counter() - began)
            del made
        return max(min(times), 1e-9)

    def _wait(self) -> None:
        if not self._is_on_host:
            getattr(torch, self.operands[0].device.type).synchronize()

    def _expected(self) -> float:
        computation = native.alone(self.op, self.form, self.numbers, self.program.name)
        made = lower(computation, True, self.device)
        with tracing_for(self.device):
            cost = cost_of(xla.compiled(made.lowered, self.device.xla.platform))
        return max(cost.seconds + STEP * steps(trace(computation, True, self.device.xla.platform)), 1e-9)


def _made_up(t: Tensor) -> Tensor:
    """Values of its own: those of the program may not be there yet. Indices of zero are in range wherever any is."""
    if t.dtype.is_floating_point or t.dtype.is_complex:
        return torch.linspace(-1, 1, max(t.numel(), 1))[: t.numel()].reshape(t.shape).to(t.dtype)
    return torch.zeros(t.shape, dtype=t.dtype)
