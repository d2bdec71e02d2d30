"""`module.to("tpu")`: parameters stay the objects that they are, so that tied ones stay tied and optimizers keep them.

torch puts another device's data into a parameter where it knows both kinds of tensors to be alike, and PrivateUse1's
are in no list of those: it would make new parameters, one for each place that a tied one has. It can exchange two
tensors whole instead; where somebody holds on to a parameter it cannot, and ties are then made again.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_depth = threading.local()


def patch(device_type: str) -> None:
    """Have `Module.to` and its kind keep parameters where they go to a device, or come from one."""
    apply = nn.Module._apply

    @functools.wraps(apply)
    def kept(self: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        if getattr(_depth, "inside", False) or not _moves(self, fn, device_type):
            return apply(self, fn, recurse)
        _depth.inside = True
        before = torch.__future__.get_swap_module_params_on_conversion()
        places = _places(self)
        try:
            torch.__future__.set_swap_module_params_on_conversion(True)
            try:
                return apply(self, fn, recurse)
            except RuntimeError as error:
                if "Couldn't swap" not in str(error):
                    raise
            torch.__future__.set_swap_module_params_on_conversion(False)
            apply(self, fn, recurse)
            for where in places:
                first = where[0][0]._parameters[where[0][1]]
                for module, name in where[1:]:
                    module._parameters[name] = first
            return self
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)
            _depth.inside = False

    nn.Module._apply = kept  # type: ignore[method-assign,assignment]


def _moves(module: nn.Module, fn: Callable[[Any], Any], device_type: str) -> bool:
    """Whether `fn` takes some parameter of a module to a device, or from one."""
    for p in module.parameters():
        if p.device.type not in ("cpu", device_type):
            return False
        try:
            made = fn(torch.empty(0, dtype=p.dtype, device=p.device))
        except (RuntimeError, TypeError):
            return False  # it says so itself
        return isinstance(made, torch.Tensor) and made.device.type != p.device.type
    return False


def _places(module: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """For each parameter that a module has in several places, these."""
    found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for each in module.modules():
        for name, p in each._parameters.items():
            if p is not None:
                found.setdefault(p, []).append((each, name))
    return [places for places in found.values() if len(places) > 1]
