"""Run every module of torch.nn with all variants that torch's own suite knows, and compare it with eager.

A *variant* is a module's class, the arguments that make it, and those that call it. It is made, called and
differentiated several rounds within one context, so that the later rounds are followed and not recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.common_modules import ModuleInput, module_db
from torch.utils._pytree import tree_leaves, tree_map

from tests.ops.outcomes import is_float, own

from .more_modules import more

ROUNDS = 3


@dataclass(frozen=True)
class Variant:
    """One way to make a module and to call it."""

    cls: type[torch.nn.Module]
    given: ModuleInput
    number: int

    def __str__(self) -> str:
        return f"{self.cls.__name__} variant {self.number} {self.given.constructor_input.args} " \
               f"{self.given.constructor_input.kwargs}"[:200]


def names() -> list[str]:
    """The modules that there are variants of."""
    return sorted({info.module_cls.__name__ for info in module_db} | {cls.__name__ for cls, _ in more(torch.zeros)})


def variants(name: str, dtype: torch.dtype, training: bool) -> list[Variant]:
    """All variants of a module, made for a dtype."""
    torch.manual_seed(0)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, requires_grad=True)

    given = [
        (info.module_cls, one)
        for info in module_db
        if info.module_cls.__name__ == name and dtype in info.dtypes
        for one in info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    ]
    given += [(cls, one) for cls, one in more(make) if cls.__name__ == name]
    return [Variant(cls, one, i) for i, (cls, one) in enumerate(given)]


def run(variant: Variant, dtype: torch.dtype, training: bool) -> Callable[[], list[Any]]:
    """A function that trains a variant for some rounds and returns all that one can see of it."""
    made, called = variant.given.constructor_input, variant.given.forward_input
    made_args, made_kwargs = own([list(made.args), dict(made.kwargs)])
    args, kwargs = _cast(own([list(called.args), dict(called.kwargs)]), dtype)
    leaves = [t for t in tree_leaves([args, kwargs]) if isinstance(t, torch.Tensor)]

    def program() -> list[Any]:
        torch.manual_seed(1)
        module = variant.cls(*made_args, **made_kwargs).to(dtype)
        module.train(training)
        seen: list[Any] = []
        for _ in range(ROUNDS):
            outs = [t for t in tree_leaves(module(*args, **kwargs)) if isinstance(t, torch.Tensor)]
            seen += outs
            ends = [t for t in outs if t.requires_grad]
            if ends:
                torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
        seen += [t.grad for t in [*leaves, *module.parameters()] if t.is_leaf and t.grad is not None]
        return [*seen, *module.state_dict().values(), *leaves]

    return program


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def cast(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and is_float(x) and x.dtype is not dtype:
            return x.detach().to(dtype).requires_grad_(x.requires_grad)
        return x

    return tree_map(cast, tree)
