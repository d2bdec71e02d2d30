"""Shapes: what a program returns for given tensors, from tracing it; with symbolic sizes where JAX allows that.

A symbolic size of torch's is a variable of JAX's (`jax.export.symbolic_shape`), the same one for sizes that torch knows
to be equal. Where the function needs to know more of a size than that, it is specialised to what the size is now, which
torch guards, and the event log says why. Derivatives for symbolic sizes keep nothing but the operands, for what JAX
would keep is laid out for one size.
"""

from __future__ import annotations

import operator
import traceback
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from fused_eager.fusion_rules.spec import JAX_DTYPE, TORCH_DTYPE

from ...log.events import LOG
from ...log.site import is_internal
from . import derive
from .content import is_installed
from .program import Form, Program, number_avals
from .recipes import make

Numbers = Sequence[int | float]
Tensor = torch.Tensor


def kinds_of(numbers: Numbers) -> tuple[type, ...]:
    """The types of a call's numbers."""
    return tuple([float if isinstance(n, (float, torch.SymFloat)) else int for n in numbers])


def concrete(operands: Sequence[Tensor]) -> Form:
    """Shapes and dtypes, where symbolic sizes stand for what they are now (and are guarded)."""
    return tuple([(tuple([int(n) for n in t.shape]), t.dtype) for t in operands])


def _is_symbol(size: Any) -> bool:
    return isinstance(size, torch.SymInt)


def _is_symbolic(operands: Sequence[Tensor]) -> bool:
    return any(_is_symbol(n) for t in operands for n in t.shape)


def specs(operands: Sequence[Tensor], numbers: Numbers, program: str) -> list[tuple[Any, torch.dtype]]:
    """Shapes and dtypes of a program's results."""
    owner = make(program)
    if _is_symbolic(operands):
        try:
            return _symbolic(owner, operands, numbers)
        except Exception as why:  # JAX's own, or the function's; a wrong call fails again below
            first = f"{type(why).__name__}: {str(why).partition(chr(10))[0][:200]}"
            LOG.count(f"{owner.title} is specialised to its sizes: {first}")
    return list(owner.traced(concrete(operands), kinds_of(numbers)).specs)


def way_back(operands: Sequence[Tensor], numbers: Numbers, program: str, mask: tuple[bool, ...]) -> derive.Way:
    """How a program is differentiated for these operands."""
    owner, kinds = make(program), kinds_of(numbers)
    if _is_symbolic(operands):
        return derive.recomputed(owner, len(operands), len(specs(operands, numbers, program)), mask)
    return derive.way_back(owner, concrete(operands), kinds, mask)


def fake(operands: Sequence[Tensor], numbers: Numbers, program: str) -> list[Tensor]:
    """Tensors without values, like those that the program returns."""
    device: Any = operands[0].device if operands else torch.device("cpu")
    try:
        found = specs(operands, numbers, program)
    except Exception as error:
        # Whoever traces with such tensors keeps of an error what it says, and nothing of where it was raised.
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f for f in frames if not (is_internal(f.filename) or is_installed(f.filename))]
        if lines and error.args and isinstance(error.args[0], str):
            at = f"{lines[-1].filename}:{lines[-1].lineno}, in {lines[-1].name}: {lines[-1].line}"
            error.args = (f"{error.args[0]} ({at})", *error.args[1:])
        raise
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in found]


class _Place:
    """Where a tensor's elements lie in its storage, for numpy, which does not look there."""

    def __init__(self, t: Tensor):
        size = t.element_size()
        self.__array_interface__ = {
            "version": 3, "typestr": f"|V{size}", "data": (1 + t.storage_offset() * size, False),
            "shape": tuple(t.shape), "strides": tuple(n * size for n in t.stride()),
        }  # fmt: skip


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have an element in common, as far as that is known: not where sizes are symbolic."""
    if not torch._C._overlaps(a, b):  # storages
        return False
    geometry = [n for t in (a, b) for n in (*t.shape, *t.stride(), t.storage_offset())]
    if any(map(_is_symbol, geometry)) or not (a.numel() and b.numel()):
        return False
    shares: Any = np.shares_memory  # whose stub says that no work may be too much
    try:
        return bool(shares(np.asarray(_Place(a)), np.asarray(_Place(b)), max_work=10_000))
    except np.exceptions.TooHardError:
        return False


def _symbolic(program: Program, operands: Sequence[Tensor], numbers: Numbers) -> list[tuple[Any, torch.dtype]]:
    names: dict[str, str] = {}
    sizes: dict[str, Any] = {}
    for t in operands:
        n: Any  # torch's types say that sizes are ints
        for n in t.shape:
            if _is_symbol(n) and str(n.node.expr) not in names:
                names[str(n.node.expr)] = name = f"d{len(names)}"
                sizes[name] = n
    scope = jax.export.SymbolicScope()
    variables = dict(zip(names, jax.export.symbolic_shape(", ".join(names.values()), scope=scope), strict=True))

    def dimension(n: Any) -> Any:
        return variables[str(n.node.expr)] if _is_symbol(n) else n

    def aval(t: Tensor) -> Any:
        shape = tuple(dimension(n) for n in t.shape)
        return jax.ShapeDtypeStruct(shape, JAX_DTYPE[t.dtype])

    def flat(arrays: Sequence[Any], scalars: Sequence[Any]) -> list[Any]:
        return program.call(list(arrays), list(scalars))[0]

    with program.tracing():
        made = jax.eval_shape(flat, [aval(t) for t in operands], number_avals(kinds_of(numbers), program.x64))
    now = {name: int(n.node.hint) for name, n in sizes.items()}
    hints = tuple([(tuple([_hint(n) for n in t.shape]), t.dtype)
                   for t in operands])
    found, seen = [], []
    for result in made:
        found.append((tuple(_size(n, sizes) for n in result.shape), TORCH_DTYPE[np.dtype(result.dtype)]))
        seen.append((tuple(_size(n, now) for n in result.shape), found[-1][1]))
    if tuple(seen) != program.traced(hints, kinds_of(numbers)).specs:
        raise ValueError("the function returns other shapes for a size than for a symbol")
    return found


def _hint(n: Any) -> Any:
    return n.node.hint if _is_symbol(n) else n


def _size(dimension: Any, values: dict[str, Any]) -> Any:
    """A dimension of JAX's with `values` for its variables. JAX's own evaluation would make numbers of them."""
    if isinstance(dimension, int):
        return dimension
    return eval(str(dimension).replace("^", "**"), {"__builtins__": {}, **_FUNCTIONS}, values)


# What JAX writes dimensions with, besides sums and products.
_FUNCTIONS = {"floordiv": operator.floordiv, "mod": operator.mod, "max": torch.sym_max, "min": torch.sym_min}
