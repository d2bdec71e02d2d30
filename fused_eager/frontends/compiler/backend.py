"""Backend: what `torch.compile(model, backend="fused_eager")` calls with a graph.

AOTAutograd makes of it a graph forward and one backward, without mutations and views of inputs, and chooses by a
minimal cut what is kept for the backward pass and what is computed again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from ...compiling.caching import keeper
from ...config import Config, of_compiled
from ...devices.host.device import HOST
from ..context.tracers import leave_us_out
from . import autograd_cache
from .graphs import CompiledGraph


def configured(mode: str | None, options: Mapping[str, Any] | None) -> Config:
    """The options of a compiled graph.

    Raises:
        OptionError: a mode or an option that there is not, or a value that is not allowed.
    """
    config = of_compiled(mode, options)
    # One op at a time there: each is a region of its own.
    return config.replace(max_region=1) if config.mode in ("strict", "debug") else config


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """The ops that a graph is to be without."""
    import torch._inductor.inductor_prims  # it has the one that Dynamo makes of `addcmul_` and `addcdiv_`

    made: dict[Any, Callable[..., Any]] = {}
    if hasattr(torch.ops.prims, "fma"):
        made[torch.ops.prims.fma.default] = lambda a, b, c: a * b + c
    return made


def compile_graph(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph of torch calls for tensors of the host's memory: the backend `fused_eager`.

    Args:
        mode: torch's own: "default", "reduce-overhead", "max-autotune" or "max-autotune-no-cudagraphs".
        options: any of those that `python -m fused_eager config` lists.

    Raises:
        OptionError: a mode or an option that there is not.
    """
    leave_us_out()
    config = configured(mode, options)
    keeps = keeper(config) is not None and autograd_cache.keeps(graph, inputs)
    HOST.housekeeping.begin()

    compiled = autograd_cache.KeptGraph if keeps else CompiledGraph

    def forward(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        known = torch._guards.TracingContext.get().fw_metadata
        if known is not None:
            # Nothing here writes over what is kept for the backward pass, so a program may go through it again.
            known.bw_donated_idxs = []
        return compiled(graph, config, backward=False, shown=known.num_forward if known is not None else None)

    compilers = {
        "fw_compiler": forward,
        "bw_compiler": lambda graph, inputs: compiled(graph, config, backward=True),
        "inference_compiler": lambda graph, inputs: compiled(graph, config, backward=False),
    }
    make = aot_autograd(
        **(autograd_cache.serializable(compilers) if keeps else compilers),
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="fused_eager"),
        decompositions=decompositions(),
        keep_inference_input_mutations=True,
    )
    with autograd_cache.kept(config) if keeps else nullcontext():
        return make(graph, inputs)
