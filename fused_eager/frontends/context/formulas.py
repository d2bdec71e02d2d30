"""Formulas: gradients that torch's autograd computes by another formula where any dispatch mode is active.

Autograd runs above the mode, and asks in C++ whether there is one. The gradient of a product over numbers is the
product of the others then, where eager divides the result by each: `inf / inf` is NaN in eager, and would be a number
here. So nodes of such ops are computed with the mode off torch's stack, on finished values, by eager's own formula.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKeySet
from torch._ops import OpOverload

from ... import quiet
from ...executing.island import tell
from ...executing.materialize import materialize_all
from ...log import site
from ...log.reasons import Reason
from . import snapshot
from .threads import current_door

WHY = "below any dispatch mode autograd takes another formula for its gradient"
OPS: tuple[OpOverload, ...] = (torch.ops.aten.prod.default, torch.ops.aten.prod.dim_int)


class _Alone:
    """The mode leaves before a node of the graph, and is back after it. Where the node raises torch puts it back."""

    def __init__(self, op: OpOverload):
        self.op = op
        self.left: list[Any] = []

    def before(self, gradients: Any) -> None:
        door, modes = current_door(), quiet.stack()
        if door is None or modes != [door]:  # of several modes the others are there in eager as well
            return
        if torch._C._current_graph_task_id() == -1:
            return  # the program calls the node itself: if that raised, nobody would put the mode back
        materialize_all(Reason("sync.memory", f"the gradient of {self.op}"))
        tell(door.stream.config, self.op, site.here(), WHY, called=f"{self.op}'s gradient")
        quiet.restack([])
        self.left = modes

    def after(self, *gradients: Any) -> None:
        modes, self.left = self.left, []
        if modes and not quiet.stack():
            quiet.restack(modes)


def _kernel(op: OpOverload) -> Callable[..., Any]:
    def kernel(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        out = snapshot.redispatch(op, keys, args, kwargs)
        node = out.grad_fn
        if node is not None and current_door() is not None:
            alone = _Alone(op)
            node.register_prehook(alone.before)
            node.register_hook(alone.after)
        return out

    return kernel


def meet_formulas() -> Callable[[], None]:
    """Notice these ops where autograd is told of them, for as long as a context is open; returns what ends it."""
    library = torch.library.Library("aten", "IMPL")
    for op in OPS:
        library.impl(op, _kernel(op), snapshot.KEY, with_keyset=True)
    return library._destroy
