"""Listed: torch refuses devices by lists in its own code, which no backend can add to; the device is put into them.

The list is a constant of a function. Another function in its place would be none that Dynamo looks into, so the
constant is exchanged, and torch's function stays what it is.
"""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from types import FunctionType

from ..context.imports import after_import

# By module: functions that have a set of names of devices.
_REFUSING = {"torch.nn.attention.flex_attention": ["_validate_device"]}


def enter(device_type: str) -> None:
    """Have the device in all of these lists, as soon as the program has imported the module of each."""
    for name, functions in _REFUSING.items():

        def add(name: str = name, functions: list[str] = functions) -> None:
            module = importlib.import_module(name)
            for each in functions:
                function = getattr(module, each, None)
                if isinstance(function, FunctionType):
                    _add(function, device_type)

        after_import(name, nullcontext, add)


def _add(function: FunctionType, device_type: str) -> None:
    code = function.__code__
    constants = [c | {device_type} if isinstance(c, frozenset) and "cuda" in c else c for c in code.co_consts]
    function.__code__ = code.replace(co_consts=tuple(constants))
