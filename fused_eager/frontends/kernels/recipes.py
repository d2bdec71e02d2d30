"""Recipes: a program's name says how to make it again, so that a graph that another process kept can be run here.

A name is the digest and, where all static arguments are plain values, a recipe: the op, a part of its content's digest,
the static arguments, then the steps by which it was derived. Dynamo's caches and `torch.export` keep such names; a
process that has the same function makes the program when it meets one, and compares the digest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fused_eager.fusion_rules import programs

from . import derive
from .program import KernelError, Mode, Program, owner_of

# What makes a program of an op's function: (content, mode, one entry for each parameter) -> program.
Maker = Callable[[str, Mode, Sequence[Any]], Program | None]
_MAKERS: dict[str, list[Maker]] = {}


def offer(op: str, maker: Maker) -> None:
    """Have `maker` asked for programs of an op."""
    _MAKERS.setdefault(op, []).insert(0, maker)


def of_op(op: str, content: str, mode: Mode, entries: Sequence[Any]) -> str:
    """The recipe of a program of an op's function; "" where an entry is no plain value."""
    try:
        text = json.dumps([op, content[:16], mode, [_plain(e) for e in entries]], separators=(",", ":"))
    except TypeError:
        return ""
    return text


def _plain(entry: Any) -> Any:
    if isinstance(entry, torch.dtype):
        return {"dtype": str(entry).removeprefix("torch.")}
    if entry is None or type(entry) in (bool, int, str):
        return entry
    if type(entry) is float:
        return {"float": entry.hex()}
    if type(entry) in (tuple, list):
        return [_plain(e) for e in entry]
    raise TypeError(f"{type(entry).__name__} is no plain value")


def _value(entry: Any) -> Any:
    if isinstance(entry, dict):
        ((kind, inner),) = entry.items()
        return getattr(torch, inner) if kind == "dtype" else float.fromhex(inner)
    return tuple(_value(e) for e in entry) if isinstance(entry, list) else entry


def make(name: str) -> Program:
    """The program of a name: one that this process has, or one that is made by its recipe.

    Raises:
        KernelError: this process has not the function that the name speaks of.
    """
    found = owner_of(name)
    if found is not None:
        return found
    digest, _, recipe = name.partition(":")
    try:
        (op, content, mode, entries), *steps = json.loads(f"[{recipe}]") if recipe else [("", "", (), ())]
        made = None
        for maker in _MAKERS.get(op, ()):
            made = maker(content, tuple(mode), [_value(e) for e in entries])
            if made is not None:
                break
        for step in steps:
            made = made and derive.step(made, step)
    except (ValueError, TypeError, KeyError) as error:
        raise KernelError(f"no program has the name {name[:200]!r}: {type(error).__name__}: {error}") from error
    if made is None or made.name.partition(":")[0] != digest:
        what = f"the function of {op}" if op else "the function"
        raise KernelError(
            f"{what} that was compiled is not one of this process: import the module that defines it, "
            f"and compile again if it has changed (digest {digest})"
        )
    return made


programs.resolver = lambda name: make(name).lower
