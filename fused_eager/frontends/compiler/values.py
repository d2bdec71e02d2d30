"""Values of a graph that is recorded ahead: ordinary tensors, what stands for others, what a call promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Node

from .templates import mapped

Tensor = torch.Tensor


class Unfit(Exception):
    """A graph that cannot be recorded ahead; the text says why."""


@dataclass(frozen=True, slots=True)
class Opaque:
    """What stands for a value that is no dense tensor of the host's. Of a quantized one torch's inference knows
    nothing: it says of it, and of what comes of it, that they are plain tensors."""

    slot: int
    quantized: bool = False


def leaves(tree: Any) -> list[Any]:
    """What a tree of lists, tuples and dicts holds, in order."""
    found: list[Any] = []
    mapped(found.append, tree)
    return found


def is_ordinary(value: Any) -> bool:
    """Whether a value is a dense tensor of the host's, as regions take and make."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.device.type != "cpu":
        return False
    if value.is_nested or value._is_zerotensor():
        return False
    return type(value) in (Tensor, torch.nn.Parameter, FakeTensor) or (
        type(value).__torch_dispatch__ is Tensor.__torch_dispatch__
    )


def is_static(val: Any) -> bool:
    """Whether nothing of a value's form is a symbol."""
    if isinstance(val, Tensor):
        return all(type(n) is int for n in (*val.shape, *(val.stride() if val.layout is torch.strided else ())))
    return not isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool))


def promised(node: Node, target: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """What a call returns, as fake tensors of known sizes.

    Raises:
        Unfit: its sizes are known only when it has run.
    """
    if isinstance(target, OpOverload) and not target._schema.returns:
        return None
    val = node.meta.get("val", _NOTHING)
    if val is not _NOTHING and all(map(is_static, leaves([val]))):
        return val
    mode = FakeTensorMode()

    def fake(a: Any) -> Any:
        if isinstance(a, Opaque):
            raise Unfit(f"{target} takes what is no dense tensor, of a size that varies")
        if not isinstance(a, Tensor):
            return a
        return torch.empty_strided(a.shape, a.stride(), dtype=a.dtype)

    try:
        with mode:
            val = target(*mapped(fake, list(args)), **mapped(fake, kwargs))
    except Unfit:
        raise
    except Exception as error:
        raise Unfit(f"what {target} returns is known only when it has run ({type(error).__name__})") from error
    if not all(map(is_static, leaves([val]))):
        raise Unfit(f"what {target} returns is known only when it has run")
    return val


_NOTHING = object()
