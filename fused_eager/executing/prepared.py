"""Prepared: what runs a stream that was recorded and planned ahead, with all that can be decided once decided.

A flush keeps what it takes to undo it, tells which memory it reads, and looks for numbers anew. None of that is needed
where the caller holds all inputs and waits for the results: what is left of a run is the calls of its executables, and
a look at their checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import numpy as np

from .. import profiled
from ..compiling.ready import Ready
from ..config import Config
from ..devices.buffer import LOCK
from ..devices.device import Device
from ..log.events import LOG
from ..tracing.stream import Node
from .arguments import as_array, numbers
from .deferred_checks import DEFERRED, Run, check
from .run import LARGE

Vids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """The executables of a plan, each with the values that it takes and makes, and those that nobody needs after it.

    `made` is what it was prepared from: another one has to be prepared again.
    """

    made: Ready
    nodes: Sequence[Node]
    device: Device
    calls: tuple[tuple[Callable[..., Any], Vids, tuple[Any, Any], Vids, Vids], ...]
    checked: tuple[int, ...]  # which of them make checks
    memory: tuple[np.ndarray, ...]  # of the numbers, which the executables read
    is_shared: bool  # it is run by one thread at a time: under the runtime's lock
    tensors: frozenset[int]  # inputs that may be tensors of the host

    def run(self, values: dict[int, Any]) -> None:
        """Add what the stream makes to its inputs. XLA returns before all is computed: whoever reads a value waits.

        Raises:
            Exception: what an op raised, with eager's type, or XLA; nothing reads the inputs any more.
        """
        tokens: list[Any] = []
        try:
            for call, inputs, vectors, outputs, drops in self.calls:
                arrays = [values[v] for v in inputs]
                if tokens:  # what a call before has made may be tensors
                    arrays = [as_array(a, self.device) for a in arrays]
                made, token = call(*arrays, *vectors)
                tokens.append(token)
                values.update(zip(outputs, made, strict=True))
                for vid in drops:
                    values.pop(vid, None)
            if self.checked:
                self._check(tokens)
        except BaseException:
            for token in tokens:
                with suppress(RuntimeError):  # what it failed with is the error, or another one came before
                    token.block_until_ready()  # the caller may free what is being read
            raise

    def _check(self, tokens: list[Any]) -> None:
        regions, executables = self.made.plan.regions, self.made.executables
        flags = [(regions[at], tokens[at], found.checks) for at in self.checked if (found := executables[at])]
        if any(np.asarray(failed)[: len(checks), 0].any() for _, failed, checks in flags):
            with LOCK:
                DEFERRED.serial += 1
                DEFERRED.runs.append(Run(DEFERRED.serial, get_ident(), list(self.nodes), {}, flags=flags))
                check()


def is_watched(config: Config) -> bool:
    """Whether somebody wants to see more of a run than its results."""
    return bool(profiled.on or LOG.detailed or config.verify or config.validates)


def prepare(nodes: Sequence[Node], ready: Ready, device: Device) -> Prepared | None:
    """What runs a stream; None where something has to be decided at each run: an op is ATen's, or needs much memory."""
    executables = [executable for executable in ready.executables if executable and executable.needs < LARGE]
    if ready.commits or len(executables) < len(ready.executables):
        return None
    calls: list[tuple[Callable[..., Any], Vids, tuple[Any, Any], Vids, Vids]] = []
    memory: list[np.ndarray] = []
    as_tensors: set[int] = set()
    as_arrays: set[int] = set()
    for region, executable, drops in zip(ready.plan.regions, executables, ready.plan.drops, strict=True):
        vectors = numbers(nodes, region, memory, device)
        calls.append((executable.call, region.inputs, vectors, region.outputs, drops))
        for at, vid in enumerate(region.inputs):
            (as_tensors if at in executable.tensors else as_arrays).add(vid)
    checked = tuple([at for at, executable in enumerate(executables) if executable.checks])
    is_shared = any(executable.is_shared for executable in executables)
    tensors = frozenset(as_tensors - as_arrays)
    return Prepared(ready, nodes, device, tuple(calls), checked, tuple(memory), is_shared, tensors)
