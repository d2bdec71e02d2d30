"""Declaring: `jax_op`, the decorator that makes a torch op of a JAX function."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch

from . import signature
from .dispatch import define
from .op import LOWER, JaxOp
from .program import KernelError

_RESERVED = frozenset({"aten", "prim", "prims", "quantized", "c10d", "_c10d_functional", "profiler", "higher_order"})
_WORD = re.compile(r"[A-Za-z_]\w*")
# What torch.ops has, and whom a name stands for now: who is declared last, as with functions.
_DEFINED: dict[str, str] = {}  # with their schemas
_CURRENT: dict[str, JaxOp] = {}


@overload
def jax_op(function: Callable[..., Any], /) -> JaxOp: ...
@overload
def jax_op(
    name: str | None = None,
    /,
    *,
    schema: str | None = None,
    mutates_args: Sequence[str] = (),
    static: Sequence[str] = (),
    traced: Sequence[str] = (),
    autocast: Mapping[str, Any] | str | torch.dtype | None = None,
) -> Callable[[Callable[..., Any]], JaxOp]: ...
def jax_op(
    name: Any = None,
    /,
    *,
    schema: str | None = None,
    mutates_args: Sequence[str] = (),
    static: Sequence[str] = (),
    traced: Sequence[str] = (),
    autocast: Mapping[str, Any] | str | torch.dtype | None = None,
) -> Any:
    """Make a torch op of a JAX function.

    The op takes and returns tensors. Outside of contexts it runs at once, through XLA; inside, it is recorded, and
    fused with the ops around it. Gradients of any order, forward derivatives and `torch.func.vmap` come from JAX.

    >>> @jax_op
    ... def scaled(x: torch.Tensor, s: float) -> torch.Tensor:
    ...     return jnp.tanh(x) * s

    Arguments:
        name: the op's name in `torch.ops`, like "mylib::scaled". Without one it is called after the function and its
            module.
        schema: torch's, like "(Tensor x, float s) -> Tensor". Without one the annotations are read.
        mutates_args: the parameters whose tensors the op changes in place. Their new values are the last things that
            the function returns.
        static: numbers that the function gets as themselves: another one is another program. Ints are, unless `traced`.
        traced: ints that are inputs of the program, so that another one is no other program. Floats are.
        autocast: what floating point arguments become where autocast is on: "lower" (its dtype) or a dtype, for all of
            them or by the name of the parameter.

    Returns:
        The op, a `JaxOp`, to be called like the function.

    Raises:
        KernelError: the declaration does not fit the function; the text says what was given, and what is allowed.
    """
    if name is not None and not isinstance(name, str):
        return declared(name, None, schema, mutates_args, static, traced, autocast, {})
    return lambda function: declared(function, name, schema, mutates_args, static, traced, autocast, {})


def declared(
    function: Any,
    name: str | None,
    schema: str | None,
    mutates: Sequence[str],
    static: Sequence[str],
    traced: Sequence[str],
    autocast: Any,
    options: Mapping[str, Any],
    make: Callable[..., Any] = JaxOp,
) -> Any:
    """An op of a function, of the class `make`. Raises KernelError."""
    if isinstance(function, JaxOp):
        raise KernelError(f"{function.name} is an op already")
    if not callable(function) or isinstance(function, (type, torch.nn.Module)):
        raise KernelError(f"jax_op decorates a JAX function, or takes the op's name, and {function!r:.100} is neither")
    for what, given in (("mutates_args", mutates), ("static", static), ("traced", traced)):
        if isinstance(given, str):
            raise KernelError(f"{what} is {given!r}: write a list of names, [{given!r}]")
    full = _name(function, name)
    if schema is None:
        found = signature.of_function(function, mutates, static, traced)
    else:
        if mutates:
            raise KernelError(f"{full} has a schema, which says by `Tensor(a!)` what is written: no mutates_args")
        found, mutates = signature.of_schema(schema, function, static, traced, full)
    op = make(function, full, found, mutates, _autocast(autocast, found, full), options)
    _define(op)
    return op


def _name(function: Any, name: str | None) -> str:
    if name is None:
        module = getattr(function, "__module__", None) or "user"
        own = getattr(function, "__name__", "")
        if not _WORD.fullmatch(own):
            raise KernelError(f"{function!r:.100} has no name: give one, @jax_op('mylib::{own.strip('<>') or 'name'}')")
        return f"{re.sub(r'[^0-9A-Za-z_]', '', module.rpartition('.')[2]) or 'user'}::{own}"
    namespace, colons, base = name.partition("::")
    if not colons or not _WORD.fullmatch(namespace) or not _WORD.fullmatch(base):
        raise KernelError(f"the name {name!r} is none of an op: it is like 'mylib::rotary', two words of letters")
    if namespace in _RESERVED:
        raise KernelError(f"the name {name!r} is in {namespace}, which is torch's own: choose another namespace")
    return name


def _autocast(given: Any, found: signature.Signature, name: str) -> dict[str, Any]:
    tensors = [p.name for p in found.parameters if p.kind not in (signature.NUMBER, signature.STATIC)]
    if given is None:
        return {}
    rules = dict(given) if isinstance(given, Mapping) else dict.fromkeys(tensors, given)
    for argument, rule in rules.items():
        if argument not in tensors:
            raise KernelError(f"autocast of {name} names {argument!r}; its tensors are {', '.join(tensors)}")
        if rule != LOWER and not (isinstance(rule, torch.dtype) and rule.is_floating_point):
            raise KernelError(f"autocast of {argument!r} is {rule!r}; allowed are 'lower' and floating dtypes")
    return rules


def _define(op: JaxOp) -> None:
    """Have `torch.ops` know the op. A name that is declared again stands for the new function, as in Python.

    Raises:
        KernelError: torch does not take the schema.
    """
    before = _CURRENT.get(op.name)
    if before is not None:
        before.named = False
    _CURRENT[op.name] = op
    if not op.schema or op.name in _DEFINED:
        op.named = bool(op.schema) and op.schema == _DEFINED[op.name]
        return
    name, schema = op.name, op.schema

    def call(*args: Any, **kwargs: Any) -> Any:
        now = _CURRENT[name]
        if now.schema != schema:  # torch cannot take an op back while others have its name
            raise KernelError(
                f"{name} has been declared again with the schema {now.schema or 'of a pytree'}, and torch.ops keeps "
                f"the first, {schema}: call what was declared, or give it another name"
            )
        return now.apply(*args, **kwargs)

    try:
        define(name, "default", schema, call)
    except RuntimeError as error:
        raise KernelError(f"torch does not take {name}{schema}: {str(error).partition(chr(10))[0]}") from error
    _DEFINED[name] = schema
    op.named = True
