"""Signatures: which parameters of a JAX function are tensors, numbers or static, from annotations or a schema.

| annotation | schema | in the function |
|---|---|---|
| `torch.Tensor`, `jax.Array` (`| None`) | `Tensor` (`Tensor?`) | an array (or None) |
| `list[Tensor]`, `tuple[Tensor, ...]` | `Tensor[]` | a list of arrays |
| `float` | `float` | a scalar of a trace: another number is no other program |
| `int`, `bool`, `str`, `torch.dtype`, and lists of ints | the same | itself: static, another value is another program |
| anything else | none | a pytree: its tensors are arrays, its floats scalars, all else is static |

`static=` and `traced=` name numbers for which it is the other way round.
"""

from __future__ import annotations

import collections.abc
import inspect
import types
import typing
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import torch

from .program import KernelError

TENSOR, TENSORS, NUMBER, STATIC, TREE = "tensor", "tensors", "number", "static", "tree"
_TENSORS = (torch.Tensor, jax.Array, torch.nn.Parameter)
_STATIC: dict[Any, str] = {int: "SymInt", bool: "bool", str: "str", torch.dtype: "ScalarType"}
_ALLOWED = (
    "allowed are torch.Tensor or jax.Array (optional, or in a list), float, int, bool, str, torch.dtype, lists of "
    "ints, and for pytrees any other annotation, such as dict"
)
MISSING = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: what kind of argument it takes, and how torch's schema writes that ("" if it cannot)."""

    name: str
    kind: str
    schema: str
    default: Any = MISSING
    keyword: bool = False  # only by name
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters, and what is returned: `returns` results, -1 for a list, None for a pytree. `schema` is torch's,
    "" where an argument or the result has none."""

    parameters: tuple[Parameter, ...]
    returns: int | None
    schema: str


def of_function(
    function: Callable[..., Any], mutates: Sequence[str], static: Collection[str], traced: Collection[str]
) -> Signature:
    """The signature that a function's annotations make.

    Raises:
        KernelError: a parameter has no annotation, or one that is not allowed; or a name is none of a parameter.
    """
    name = getattr(function, "__name__", repr(function))
    try:
        given = inspect.signature(function)
        hints = typing.get_type_hints(inspect.unwrap(function))
    except (TypeError, ValueError) as error:
        raise KernelError(f"{name} has no signature that Python knows: {error}") from error
    except NameError as error:
        raise KernelError(f"an annotation of {name} names what is not there: {error}") from error
    parameters = []
    for p in given.parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise KernelError(f"{name} takes *{p.name}, and an op's arguments are fixed: use a list or a dict")
        if p.annotation is p.empty:
            raise KernelError(f"parameter {p.name!r} of {name} has no annotation; {_ALLOWED}")
        kind, schema, optional = _kind(hints[p.name], name, p.name)
        _check_default(hints[p.name], p.default, name, p.name)
        parameters.append(Parameter(p.name, kind, schema, p.default, p.kind is p.KEYWORD_ONLY, optional))
    returned = hints.get("return", torch.Tensor)
    return signature(parameters, _returns(returned), mutates, static, traced, name)


# What a default of a parameter with such an annotation may be.
_DEFAULTS: dict[Any, Any] = {int: int, bool: bool, str: str, float: (int, float), torch.dtype: torch.dtype}


def _check_default(hint: Any, default: Any, function: str, parameter: str) -> None:
    if default is MISSING:
        return
    if not (hint in _TENSORS or (hint in _DEFAULTS and not isinstance(default, _DEFAULTS[hint]))):
        return
    own = hint.__name__.rpartition(".")[2]
    given = f"parameter {parameter!r} of {function} is annotated {own}, and its default is {default!r:.60}"
    raise KernelError(f"{given}: write {own} | None" if default is None else given)


def _kind(hint: Any, function: str, parameter: str) -> tuple[str, str, bool]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in _TENSORS:
        return TENSOR, "Tensor", False
    if origin in (typing.Union, types.UnionType):
        rest = [a for a in inner if a is not type(None)]
        if rest and all(a in _TENSORS for a in rest):
            return TENSOR, "Tensor?" if len(rest) < len(inner) else "Tensor", len(rest) < len(inner)
        if len(rest) == 1 and len(inner) == 2 and rest[0] in (float, *_STATIC):
            return STATIC, f"{_STATIC.get(rest[0], 'float')}?", True
        return TREE, "", False
    if origin in (list, tuple, collections.abc.Sequence) and inner:
        elements = [a for a in inner if a is not Ellipsis]
        if all(a in _TENSORS for a in elements) and (origin is not tuple or Ellipsis in inner):
            return TENSORS, "Tensor[]", False
        if all(a is int for a in elements):
            return STATIC, "SymInt[]", False
        return TREE, "", False
    if hint is float:
        return NUMBER, "float", False
    if origin is typing.Literal:
        kinds = {type(a) for a in inner}
        return STATIC, _STATIC.get(kinds.pop(), "") if len(kinds) == 1 else "", False
    if hint in _STATIC:
        return STATIC, _STATIC[hint], False
    if hint in (complex, bytes) or (isinstance(hint, type) and issubclass(hint, torch.nn.Module)):
        raise KernelError(f"parameter {parameter!r} of {function} is annotated {hint!r}; {_ALLOWED}")
    return TREE, "", False


def _returns(hint: Any) -> int | None:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is type(None) or hint is None:
        return 0
    if hint in _TENSORS:
        return 1
    if origin is tuple and inner and all(a in _TENSORS for a in inner):
        return len(inner)
    if (origin is list and inner and inner[0] in _TENSORS) or (origin is tuple and inner[1:] == (Ellipsis,)):
        return -1
    return None


def signature(
    parameters: Sequence[Parameter],
    returns: int | None,
    mutates: Sequence[str],
    static: Collection[str],
    traced: Collection[str],
    name: str,
) -> Signature:
    """The signature with what the declaration says beside the annotations. Raises KernelError."""
    names = [p.name for p in parameters]
    for what, told in (("mutates_args", mutates), ("static", static), ("traced", traced)):
        for n in told:
            if n not in names:
                raise KernelError(f"{what} names {n!r}, which {name} has not; its parameters are {', '.join(names)}")
    changed: list[Parameter] = []
    for p in parameters:
        if p.name in static and p.name in traced:
            raise KernelError(f"parameter {p.name!r} of {name} is static and traced at once")
        if p.name in static:
            if p.kind in (TENSOR, TENSORS):
                raise KernelError(f"parameter {p.name!r} of {name} is a tensor, and tensors are not static")
            p = replace(p, kind=STATIC)
        elif p.name in traced:
            if p.schema not in ("SymInt", "float"):
                raise KernelError(f"parameter {p.name!r} of {name} is no int or float, which alone are traced")
            p = replace(p, kind=NUMBER, schema="int" if p.schema == "SymInt" else p.schema)
        if p.name in mutates:
            if p.kind != TENSOR or p.optional:
                raise KernelError(f"mutates_args names {p.name!r}, which is no tensor of {name}")
            p = replace(p, schema=f"Tensor({chr(97 + len(changed) % 26)}!)")
        changed.append(p)
    return Signature(tuple(changed), returns, _schema(changed, returns))


def _schema(parameters: Sequence[Parameter], returns: int | None) -> str:
    if returns is None or any(not p.schema for p in parameters):
        return ""
    words, starred = [], False
    for p in parameters:
        if p.keyword and not starred:
            words.append("*")
            starred = True
        default = "" if p.default is MISSING else f"={_default(p)}"
        if default and default[1:] == "?":
            return ""
        words.append(f"{p.schema} {p.name}{default}")
    made = "Tensor[]" if returns < 0 else "Tensor" if returns == 1 else f"({', '.join(['Tensor'] * returns)})"
    return f"({', '.join(words)}) -> {made}"


def _default(p: Parameter) -> str:
    """A default as torch's schemas write it; "?" where they cannot."""
    value = p.default
    if isinstance(value, str):
        return f'"{value}"' if value.isprintable() and '"' not in value and "\\" not in value else "?"
    if value is None or type(value) in (bool, int, float):
        return repr(value)
    if isinstance(value, (list, tuple)) and all(type(v) is int for v in value):
        return repr(list(value))
    return "?"


# What a schema's types are, in the parameters of a function.
_TYPES = {"Tensor": TENSOR, "Tensor?": TENSOR, "Optional[Tensor]": TENSOR, "List[Tensor]": TENSORS, "float": NUMBER,
          "number": NUMBER}  # fmt: skip


def of_schema(
    text: str, function: Callable[..., Any], static: Collection[str], traced: Collection[str], name: str
) -> tuple[Signature, tuple[str, ...]]:
    """The signature that a schema such as "(Tensor x, float eps=1e-6) -> Tensor" makes, and the arguments it writes.

    Raises:
        KernelError: torch cannot read it, or the function has other parameters.
    """
    try:
        read = torch._C.parse_schema(f"fused_eager::op{text}" if text.startswith("(") else text)
    except RuntimeError as error:
        first = str(error).strip().partition("\n")[0]
        like = "one is '(Tensor x, int n=2) -> Tensor'"
        raise KernelError(f"the schema {text!r} of {name} is none: {first}; {like}") from error
    own = list(inspect.signature(function).parameters)
    names = [a.name for a in read.arguments]
    if own != names:
        raise KernelError(f"the schema of {name} has the arguments {', '.join(names)}, the function {', '.join(own)}")
    written = text[text.index("(") : text.rindex("->")]
    parameters, mutates = [], []
    for a in read.arguments:
        kind = _TYPES.get(str(a.type), STATIC)
        if a.alias_info is not None:
            if not a.alias_info.is_write:
                raise KernelError(f"the schema of {name} says that {a.name!r} is aliased: results never are; {written}")
            mutates.append(a.name)
        schema = str(a.type)
        schema = {"List[Tensor]": "Tensor[]", "Optional[Tensor]": "Tensor?", "int": "SymInt", "number": "float"}.get(
            schema, schema
        )
        default = a.default_value if a.has_default_value() else MISSING
        optional = "Optional" in str(a.type)
        parameters.append(Parameter(a.name, kind, schema, default, a.kwarg_only, optional))
    kinds = [str(r.type) for r in read.returns]
    if kinds != ["List[Tensor]"] and set(kinds) - {"Tensor"}:
        raise KernelError(f"the schema of {name} returns {', '.join(kinds)}; an op returns tensors, or a list of them")
    returns = -1 if kinds == ["List[Tensor]"] else len(kinds)
    found = signature(parameters, returns, mutates, static, traced, name)
    full = text if text.startswith("(") else text[text.index("(") :]
    return replace(found, schema=full), tuple(mutates)
