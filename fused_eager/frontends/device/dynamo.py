"""`torch.compile` on the device's tensors, by backend "tpu" or by none: Dynamo's graph runs op by op, and the device
fuses them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint, noop_context_fn

from fused_eager.fusion_rules.lowering import leaves

from ...config import OptionError, find, of_compiled
from ...log.graph_site import name_lines
from ..context.tracers import leave_us_out
from .doors import DOORS, is_on_device


def tpu(
    graph: Any, inputs: list[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """A graph as what runs it: its own code. Regions are the device's, as for a program that is not compiled.

    Args:
        mode: torch's own; one is as good as another here.
        options: the device's, as they are: it has the same for all its ops.

    Raises:
        OptionError: there is no such mode or option, or the device has another value for it.
    """
    config = of_compiled(mode, options)
    for name in options or {}:
        given = getattr(config, name)
        for door in DOORS:
            now = getattr(door.stream.config, name)
            if given != now:
                raise OptionError(
                    f"option {name!r} cannot be {given!r} for one function: all ops of the device share it, and it is "
                    f"{now!r}; set {find(name).env} for the program"
                )
    leave_us_out()
    name_lines(graph)
    for part in graph.modules():
        if isinstance(part, GraphModule):
            _as_in_a_program(part)
    run: Callable[..., Any] = graph.forward
    return run


def _as_in_a_program(graph: GraphModule) -> None:
    """Have checkpoints and repeated parts be what they are in a program that is not compiled. Torch's own ops for them
    are for what comes after Dynamo: run as they are, a checkpoint draws other random numbers in the backward pass, and
    a repeated part has none."""
    found = [node for node in graph.graph.nodes if str(node.target) in _CALLED]
    for node in found:
        node.target = _CALLED[str(node.target)]
    if found:
        graph.recompile()


def checkpointed(body: GraphModule, *args: Any, **kwargs: Any) -> Any:
    """A part of a graph that is computed again in the backward pass, as in a program that is not compiled."""
    contexts = body.meta.get("_checkpoint_context_fn", noop_context_fn)
    return checkpoint(body.forward, *args, **{**kwargs, "use_reentrant": False, "context_fn": contexts})


def repeated(body: GraphModule, name: str, *args: Any) -> Any:
    """A part of a graph that is there several times (`torch.compiler.nested_compile_region`)."""
    return body(*args)


def serve_the_default() -> None:
    """Have `torch.compile` without a backend, which means inductor, give us the graphs with tensors of the device."""
    wrapper: Any = torch._TorchCompileInductorWrapper
    inductor = wrapper.__call__

    @functools.wraps(inductor)
    def compiled(self: Any, model_: Any, inputs_: Any, **kwargs: Any) -> Any:
        if _is_of_device(model_, inputs_):
            return tpu(model_, inputs_)  # inductor's own options are for its kernels
        return inductor(self, model_, inputs_, **kwargs)

    wrapper.__call__ = compiled


def _is_of_device(graph: Any, inputs: Any) -> bool:
    """Whether a graph reads or makes a tensor of the device."""
    found = [*inputs, *(node.meta.get("example_value") for node in graph.graph.nodes)]
    return any(isinstance(t, torch.Tensor) and is_on_device(t) for t in leaves(found))


_CALLED = {"tag_activation_checkpoint": checkpointed, "invoke_subgraph": repeated}
