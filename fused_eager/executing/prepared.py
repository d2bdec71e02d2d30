"""Prepared: what runs a stream that was recorded and planned ahead, with all that can be decided once decided.

A flush keeps what it takes to undo it, tells which memory it reads, and looks for numbers anew. None of that is needed
where the caller holds all inputs and waits for the results: what is left of a run is the calls of its executables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import profiled
from ..compiling.ready import Ready
from ..config import Config
from ..devices.device import Device
from ..log.events import LOG
from ..tracing.stream import Node
from .arguments import numbers
from .run import LARGE

Vids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """The executables of a plan, each with the values that it takes and makes, and those that nobody needs after it.

    `made` is what it was prepared from: another one has to be prepared again.
    """

    made: Ready
    calls: tuple[tuple[Callable[..., Any], Vids, tuple[Any, Any], Vids, Vids], ...]
    memory: tuple[np.ndarray, ...]  # of the numbers, which the executables read

    def run(self, values: dict[int, Any]) -> None:
        """Add what the stream makes to its inputs. XLA returns before all is computed: whoever reads a value waits.

        Raises:
            Exception: what XLA raises; nothing reads the inputs any more.
        """
        token = None
        try:
            for call, inputs, vectors, outputs, drops in self.calls:
                made, token = call(*[values[v] for v in inputs], *vectors)
                values.update(zip(outputs, made, strict=True))
                for vid in drops:
                    values.pop(vid, None)
        except BaseException:
            if token is not None:
                token.block_until_ready()  # the caller may free what is being read
            raise


def is_watched(config: Config) -> bool:
    """Whether somebody wants to see more of a run than its results."""
    return bool(profiled.on or LOG.detailed or config.verify or config.validates)


def prepare(nodes: Sequence[Node], ready: Ready, device: Device) -> Prepared | None:
    """What runs a stream; None where something has to be decided at each run: an op is ATen's, may raise, or may need
    more memory than there is."""
    calls, memory = [], []
    for region, executable, drops in zip(ready.plan.regions, ready.executables, ready.plan.drops, strict=True):
        if executable is None or executable.checks or executable.needs >= LARGE:
            return None
        vectors = numbers(nodes, region, memory, device)
        calls.append((executable.call, region.inputs, vectors, region.outputs, drops))
    return None if ready.commits else Prepared(ready, tuple(calls), tuple(memory))
