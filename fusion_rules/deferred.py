"""JAX, imported when something of it is first asked for.

Importing it takes a quarter of a second. A program that torch runs alone, or whose last line comes before anything is
compiled, does without; so do modules that are imported at the start and need JAX later:

>>> from fused_eager.fusion_rules.deferred import jax, jnp, lax

are these modules, each with nothing in it yet. (`importlib.util.LazyLoader` would put such a module where the program
itself imports JAX, and is not safe among threads before Python 3.12.)
"""

from __future__ import annotations

import gc
import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch


class Deferred(ModuleType):
    """A module that is imported when one of its names is first asked for. Functions, classes and modules are kept from
    there on; all else may change in the module, and is asked of it each time."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self.__name__), name)
        if callable(value) or isinstance(value, ModuleType):
            vars(self)[name] = value
        return value


def go_through_once() -> None:
    """JAX has been imported while Python's collector was off: have it go through its objects now, and never after that.

    What it makes stays, so there is nothing to find among it. Left to itself the collector goes through all objects
    several times while they are imported, and again when a step's ops have been written down and compiled: the program
    then stands still for a tenth of a second. They are set aside for good, unless the program has tensors of its own
    by now: what holds them is worth to be looked for.
    """
    gc.collect()
    if not any(issubclass(kind, torch.Tensor) for kind in set(map(type, gc.get_objects()))):
        gc.freeze()


if TYPE_CHECKING:
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jaxlib import xla_client
else:
    jax, jnp, lax = Deferred("jax"), Deferred("jax.numpy"), Deferred("jax.lax")
    xla_client = Deferred("jaxlib.xla_client")

__all__ = ["Deferred", "go_through_once", "jax", "jnp", "lax", "xla_client"]
