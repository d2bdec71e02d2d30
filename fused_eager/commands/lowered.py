"""Regions that are lowered as for XLA and not compiled: ATen computes their values. For who asks how ops run, and not
how fast: most of the time that a new op takes is XLA's compiler's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..compiling.compile import AROUND, Computation, Executable, Settings, lower
from ..devices.host.device import HOST
from ..executing.island import as_home, run_node
from ..executing.load import forget
from ..quiet import as_eager


@contextmanager
def lowered_only() -> Iterator[None]:
    """In the body, regions of CPU tensors are lowered only. What was made before is forgotten, and what is made is
    forgotten afterwards, so that nobody takes the one for the other."""
    forget()
    AROUND.append(_lowered)
    try:
        yield
    finally:
        AROUND.remove(_lowered)
        forget()


def _lowered(computation: Computation, settings: Settings, make: Callable[[], Executable]) -> Executable:
    """What stands for a region's executable. Raises `NodeFailed` as compiling does."""
    if settings.device is not HOST:
        return make()
    lower(computation, settings.bounds, settings.device)  # checks of values are ATen's own: it raises
    return Executable(_Through(computation), (), 0.0, computation.name)


class _Through:
    """A region, computed by ATen; called as an executable is."""

    def __init__(self, computation: Computation):
        self.computation = computation

    def __call__(self, *arrays: Any) -> tuple[list[Any], Any]:
        region, nodes = self.computation.region, self.computation.nodes
        *inputs, floats, ints = arrays
        values: dict[int, Any] = {v: as_home(x).clone() for v, x in zip(region.inputs, inputs, strict=True)}
        numbers = {float: iter(np.asarray(floats).tolist()), int: iter(np.asarray(ints).tolist())}
        with as_eager():
            for i in region.nodes:
                node = copy.copy(nodes[i])  # the numbers are those of this call
                node.scalars = [next(numbers[type(s)]) for s in node.scalars]
                run_node(node, values)
        outputs = [HOST.put(values[v]) for v in region.outputs]
        return outputs, HOST.put(torch.zeros((1, 2), dtype=torch.int64))
