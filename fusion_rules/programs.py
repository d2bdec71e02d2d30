"""Programs: ops whose lowering the user wrote in JAX. One row for all of them, an argument of which names the program.

Such an op has the schema `(Tensor[] operands, Scalar[] numbers, str program) -> Tensor[]`. `program` is a name with a
digest of all that decides what is computed: the function's code and what it refers to, static arguments, and how it was
derived. So it is part of each key by being an argument, and an edited function is another program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src.lax.lax import _convert_element_type  # public conversions make no weak types

from .lowering import Context
from .rule import RULES, OpClass, Rule

SCHEMA = "(Tensor[] operands, Scalar[] numbers, str program) -> Tensor[]"
Program = Callable[[Sequence[jax.Array], Sequence[jax.Array]], Sequence[jax.Array]]

# By name, what `frontends.kernels` has made in this process.
PROGRAMS: dict[str, Program] = {}


def resolver(name: str) -> Program:
    """What makes a program that is not there yet, once `frontends.kernels` is."""
    raise LookupError(f"no function of this process is the program {name[:200]}: import the module that defines it")


def weak(number: jax.Array) -> jax.Array:
    """A number as JAX takes one that is written in Python: it takes on the dtype of the array that it meets."""
    return _convert_element_type(number, number.dtype, weak_type=True)


def lower(cx: Context, operands: Sequence[jax.Array], numbers: Sequence[Any], program: str) -> Sequence[jax.Array]:
    """The row: the user's function, as part of a region."""
    found = PROGRAMS.get(program) or resolver(program)
    return found(operands, [weak(n) if isinstance(n, jax.Array) else n for n in numbers])


def enter(op: str) -> None:
    """Enter the row of an op whose last argument names a program, by a name like "mylib.rotary.call"."""
    RULES.setdefault(op, Rule(op, OpClass.COMPOSITE, lower, note="the user's own JAX function", defines=True))
