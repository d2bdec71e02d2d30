"""Listed: what torch does for devices by lists in its own code, which no backend can add to.

Where it refuses devices, the list is a constant of a function. Another function in its place would be none that Dynamo
looks into, so the constant is exchanged, and torch's function stays what it is.

Dynamo has the count of an optimizer's steps lie with its parameters, from the first step on, for CUDA and XPU alone.
For others it moves the count as it traces each group of parameters: then the graph counts in the tensor that was moved
for the group before, and the optimizer goes on from one that stays behind.
"""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from types import FunctionType
from typing import Any

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
    after_import("torch._dynamo.variables.optimizer", nullcontext, lambda: _leave_steps(device_type))


def _leave_steps(device_type: str) -> None:
    """Have Dynamo leave the counts of steps of the device's parameters where they are."""
    from torch._dynamo.variables.optimizer import OptimizerVariable

    move = OptimizerVariable.move_step_if_cpu

    def move_step_if_cpu(self: Any) -> None:
        states = [state for p, state in self.value.state.items() if p.device.type == device_type and "step" in state]
        steps = [state["step"] for state in states]
        move(self)
        for state, step in zip(states, steps, strict=True):
            state["step"] = step

    OptimizerVariable.move_step_if_cpu = move_step_if_cpu  # type: ignore[method-assign]


def _add(function: FunctionType, device_type: str) -> None:
    code = function.__code__
    constants = [c | {device_type} if isinstance(c, frozenset) and "cuda" in c else c for c in code.co_consts]
    function.__code__ = code.replace(co_consts=tuple(constants))
