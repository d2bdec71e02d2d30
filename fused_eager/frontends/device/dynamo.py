"""`torch.compile(backend="tpu")` on the device's tensors: Dynamo's graph runs op by op, and the device fuses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...log.graph_site import name_lines
from ..context.tracers import leave_us_out


def tpu(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
    """A graph as what runs it: its own code. Regions are the device's, as for a program that is not compiled."""
    leave_us_out()
    name_lines(graph)
    run: Callable[..., Any] = graph.forward
    return run
