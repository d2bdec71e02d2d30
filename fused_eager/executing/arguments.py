"""Arguments: what a compiled region is called with, without copies where the memory allows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fused_eager.fusion_rules.deferred import jax

from ..devices.device import Device
from ..devices.host.device import HOST
from ..devices.storage import pointer_of
from ..planning.plan import Region
from ..tracing.stream import NativeInput, Node


def as_array(value: Any, of: Device = HOST) -> jax.Array:
    """A value of an execution as a JAX array; islands leave torch tensors."""
    return of.put(value) if isinstance(value, torch.Tensor) else value


def import_native(item: NativeInput, of: Device, anew: bool = True) -> jax.Array:
    """The array over a native input's memory, which the caller keeps alive. One of its own where it may be donated, for
    that ends it for whoever has it."""
    return of.borrow(pointer_of(item.storage) + item.offset, item.home, anew)


def numbers(
    nodes: Sequence[Node], region: Region, memory: list[np.ndarray], of: Device = HOST
) -> tuple[jax.Array, jax.Array]:
    """The hoisted numbers of a region: its last two arguments. What is put into `memory` has to outlive the run."""
    floats, ints = hoisted(nodes, region)
    return of.numbers(floats, torch.float64, memory), of.numbers(ints, torch.int64, memory)


def hoisted(nodes: Sequence[Node], region: Region) -> tuple[list[float], list[int]]:
    """The hoisted numbers of a region, of both kinds in order."""
    scalars = [s for i in region.nodes for s in nodes[i].scalars]
    return [s for s in scalars if type(s) is float], [s for s in scalars if type(s) is int]
