"""Templates: arguments and results of a recorded graph, in which slots stand for memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fused_eager.fusion_rules.geometry import Geometry

from .stage import Slots, over


@dataclass(frozen=True, slots=True)
class Fetch:
    """In a template: what slot `slot` holds; with `geometry`, that view of its memory."""

    slot: int
    geometry: Geometry | None = None


def mapped(leaf: Callable[[Any], Any], tree: Any) -> Any:
    """A tree of lists, tuples, dicts and slices with `leaf` of each leaf."""
    if isinstance(tree, (list, tuple)):
        made = [mapped(leaf, x) for x in tree]
        # torch.fx has lists of a type of its own, which no key knows.
        return made if isinstance(tree, list) else type(tree)(*made) if hasattr(tree, "_fields") else tuple(made)
    if isinstance(tree, dict):
        return {name: mapped(leaf, x) for name, x in tree.items()}
    if isinstance(tree, slice):
        return slice(mapped(leaf, tree.start), mapped(leaf, tree.stop), mapped(leaf, tree.step))
    return leaf(tree)


def fetched(template: Any, slots: Slots) -> Any:
    """A template with the values of the slots."""

    def leaf(a: Any) -> Any:
        if type(a) is not Fetch:
            return a
        held = slots[a.slot]
        return held if a.geometry is None else over(held, a.geometry)

    return mapped(leaf, template)


def read(template: Any) -> list[int]:
    """The slots of a template, in order."""
    found: list[int] = []

    def leaf(a: Any) -> Any:
        if type(a) is Fetch:
            found.append(a.slot)
        return a

    mapped(leaf, template)
    return found
