"""The device that is meant where none is named, in calls that torch itself completes: `t.to("tpu")`, `torch.tensor`.

Torch asks its guard which device is current, and of a guard in Python it asks nothing: it takes number 0. So a name
without a number is completed before torch sees it, from the first moment on at which another device is meant.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors

from .doors import CURRENT, WATCHES

_installed: list[str] = []


def _completed(value: Any) -> Any:
    """A device without a number, with that of the one that is meant; anything else as it is."""
    name = _installed[0]
    if isinstance(value, str) and value == name:
        return f"{name}:{CURRENT[0]}"
    if isinstance(value, torch.device) and value.type == name:
        index: Any = value.index
        return torch.device(name, CURRENT[0]) if index is None else value
    return value


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if CURRENT[0]:
            if args:
                args = (_completed(args[0]), *args[1:])
            elif "device" in kwargs:
                kwargs["device"] = _completed(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def _maker(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def made(*args: Any, **kwargs: Any) -> Any:
        if CURRENT[0]:
            device = kwargs.get("device")
            kwargs["device"] = _completed(_default() if device is None else device)
        return original(*args, **kwargs)

    return made


def _default() -> torch.device | None:
    """The device of the innermost `with torch.device(...)`, or of `torch.set_default_device`."""
    modes = _get_current_function_mode_stack()
    return next((mode.device for mode in reversed(modes) if isinstance(mode, DeviceContext)), None)


def _install() -> None:
    _device_constructors()  # which remembers them as they are
    kind: Any = torch.Tensor
    package: Any = torch
    lazy: Any = torch.nn.parameter
    kind.to = _to(kind.to)
    lazy.UninitializedTensorMixin._allowed_methods.append(kind.to)  # of lazy modules, which may be moved
    for name in ("tensor", "as_tensor", "asarray", "scalar_tensor"):
        original = getattr(package, name)
        made, script = _maker(original), torch.jit._builtins._find_builtin(original)
        if script is not None:  # TorchScript knows it by its identity
            torch.jit._builtins._register_builtin(made, script)
        setattr(package, name, made)


def watch(name: str) -> None:
    """Complete names of this type of device from now on, once another than number 0 is meant."""
    _installed[:] = [name]
    WATCHES.append(_install)
