"""`module.to("tpu")`: parameters stay the objects that they are, so that tied ones stay tied and optimizers keep them.

torch puts another device's data into a parameter where it knows both kinds of tensors to be alike, and PrivateUse1's
are in no list of those: it would make new parameters, one for each place that a tied one has. It can exchange two
tensors whole instead; where somebody holds on to a parameter it cannot, and ties are then made again.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

_depth = threading.local()


def patch(device_type: str) -> None:
    """Have `Module.to` and its kind keep parameters where they go to a device, or come from one."""
    apply = nn.Module._apply

    @functools.wraps(apply)
    def moved(self: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        if getattr(_depth, "inside", False) or not _moves(self, fn, device_type):
            return apply(self, fn, recurse)
        _depth.inside = True
        before = torch.__future__.get_swap_module_params_on_conversion()
        places = _places(self)
        kept = [_Kept(where[0], type(p), dict(vars(p)), *_hooks(p)) for p, where in places.items()]
        try:
            torch.__future__.set_swap_module_params_on_conversion(True)
            try:
                apply(self, fn, recurse)
                _restore(kept)
                return self
            except RuntimeError as error:
                if "Couldn't swap" not in str(error):
                    raise
            torch.__future__.set_swap_module_params_on_conversion(False)
            apply(self, fn, recurse)
            _restore(kept)
            for where in places.values():
                first = where[0][0]._parameters[where[0][1]]
                for module, name in where[1:]:
                    module._parameters[name] = first
            return self
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)
            _depth.inside = False

    nn.Module._apply = moved  # type: ignore[method-assign,assignment]


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


class _Kept(NamedTuple):
    """Where a parameter is, and what else than its value belongs to it."""

    place: tuple[nn.Module, str]
    kind: type
    attributes: dict[str, Any]
    hooks: Any
    hooks_after: Any


def _hooks(p: Any) -> tuple[Any, Any]:
    return p._backward_hooks, p._post_accumulate_grad_hooks


def _restore(kept: list[_Kept]) -> None:
    """Give each parameter back what torch exchanges along with its value: its class (a lazy module's parameters are of
    one of their own), the attributes that the program has put on it, and its hooks."""
    for (module, name), kind, attributes, hooks, hooks_after in kept:
        p: Any = module._parameters[name]
        if nn.Parameter in kind.__mro__:  # or it wraps other tensors, which are its attributes
            if type(p) is not kind:
                p.__class__ = kind
            vars(p).update(attributes)
        if hooks:
            p._backward_hooks = hooks
        if hooks_after:
            p._post_accumulate_grad_hooks = hooks_after


def _places(module: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """For each parameter that a module has, where it is."""
    found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for each in module.modules():
        for name, p in each._parameters.items():
            if p is not None:
                found.setdefault(p, []).append((each, name))
    return found
