"""`_foreach_*`: the lowering of one tensor, mapped over lists. Results come as one list, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch._ops import OpOverload

from .elementwise import NUMBERS, convert, kind, spread, where
from .lower import lower
from .lowering import Context, Hoisted, apply_rule
from .rule import RULES, OpClass, rule

_KINDS: dict[str, type] = {"b": bool, "u": int, "i": int, "f": float, "c": complex}


def _number(x: Any) -> Any:
    """A hoisted number as the single-tensor row wants it: still a number to type promotion, not a 0-d tensor."""
    return x if isinstance(x, NUMBERS) else Hoisted(x, _KINDS[kind(x)])


def one(cx: Context, i: int, op: str, *args: Any, **kwargs: Any) -> Any:
    """The row of `op` for the i-th tensor, promoted on its own: lists may mix dtypes."""
    inner = Context((cx.out[i],), bounds=cx.bounds)
    result = apply_rule(RULES[f"aten.{op}"], inner, args, kwargs)
    cx.checks.extend(inner.checks)
    return result


def _enter(op: str, lower: Callable[..., Any], keep: Sequence[str] = ()) -> None:
    rule(op, OpClass.OPTIMIZER, keep=keep)(lower)


_UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round "
    "rsqrt sigmoid sign sin sinh sqrt tan tanh trunc clone"
)
for _name in _UNARY.split():

    def _unary(cx: Context, self: Any, name: str = _name, **layout: Any) -> list[Any]:
        return [one(cx, i, f"{name}.default", x) for i, x in enumerate(self)]

    _enter(f"_foreach_{_name}.default", _unary)


# foreach name: the rows for a number and for a tensor on the right.
_BINARY = {
    "add": ("add.Scalar", "add.Tensor"),
    "clamp_max": ("clamp_max.default", "clamp_max.Tensor"),
    "clamp_min": ("clamp_min.default", "clamp_min.Tensor"),
    "div": ("div.Scalar", "div.Tensor"),
    "maximum": ("clamp_min.default", "maximum.default"),
    "minimum": ("clamp_max.default", "minimum.default"),
    "mul": ("mul.Scalar", "mul.Tensor"),
    "pow": ("pow.Tensor_Scalar", "pow.Tensor_Tensor"),
    "sub": ("sub.Scalar", "sub.Tensor"),
}
for _name, (_by_number, _by_tensor) in _BINARY.items():

    def _scalar(cx: Context, self: Any, scalar: Any, op: str = _by_number) -> list[Any]:
        return [one(cx, i, op, x, _number(scalar)) for i, x in enumerate(self)]

    def _scalar_list(cx: Context, self: Any, scalars: Any, op: str = _by_number) -> list[Any]:
        return [one(cx, i, op, x, _number(s)) for i, (x, s) in enumerate(zip(self, scalars, strict=True))]

    def _list(cx: Context, self: Any, other: Any, op: str = _by_tensor, **alpha: Any) -> list[Any]:
        factor = {k: _number(v) for k, v in alpha.items()}
        return [one(cx, i, op, x, y, **factor) for i, (x, y) in enumerate(zip(self, other, strict=True))]

    def _tensor(cx: Context, self: Any, other: Any, op: str = _by_tensor, **alpha: Any) -> list[Any]:
        return _list(cx, self, [other] * len(self), op, **alpha)

    # Exponents choose the kernel; the names of the arguments differ, their positions do not.
    _keep = ("exponent",) if _name == "pow" else ()
    _enter(f"_foreach_{_name}.Scalar", _scalar, _keep)
    _enter(f"_foreach_{_name}.ScalarList", _scalar_list, _keep)
    _enter(f"_foreach_{_name}.List", _list)
    if _name in ("add", "div", "mul"):
        _enter(f"_foreach_{_name}.Tensor", _tensor)


@rule("_foreach_pow.ScalarAndTensor", OpClass.OPTIMIZER)
def pow_of_number(cx: Context, self: Any, exponent: Any) -> list[Any]:
    return [one(cx, i, "pow.Scalar", _number(self), n) for i, n in enumerate(exponent)]


for _name in ("addcdiv", "addcmul"):

    def _fused(
        cx: Context, self: Any, tensor1: Any, tensor2: Any, scalars: Any, op: str = f"{_name}.default"
    ) -> list[Any]:
        rows = enumerate(zip(self, tensor1, tensor2, scalars, strict=True))
        return [one(cx, i, op, x, y, z, value=_number(s)) for i, (x, y, z, s) in rows]

    def _fused_by_one(
        cx: Context, self: Any, tensor1: Any, tensor2: Any, value: Any = 1, fused: Any = _fused
    ) -> list[Any]:
        return fused(cx, self, tensor1, tensor2, [value] * len(self))

    _enter(f"_foreach_{_name}.Scalar", _fused_by_one)
    _enter(f"_foreach_{_name}.ScalarList", _fused)
    # One tensor of numbers: iterating over it gives them as 0-d arrays.
    _enter(f"_foreach_{_name}.Tensor", _fused)


@rule("_foreach_lerp.List", OpClass.OPTIMIZER)
def lerp_list(cx: Context, self: Any, tensors1: Any, weights: Any) -> list[Any]:
    rows = enumerate(zip(self, tensors1, weights, strict=True))
    return [one(cx, i, "lerp.Tensor", x, y, w) for i, (x, y, w) in rows]


@rule("_foreach_lerp.ScalarList", OpClass.OPTIMIZER)
def lerp_numbers(cx: Context, self: Any, tensors1: Any, weight: Any) -> list[Any]:
    rows = enumerate(zip(self, tensors1, weight, strict=True))
    return [one(cx, i, "lerp.Scalar", x, y, _number(w)) for i, (x, y, w) in rows]


@rule("_foreach_lerp.Scalar", OpClass.OPTIMIZER)
def lerp_number(cx: Context, self: Any, tensors1: Any, weight: Any) -> list[Any]:
    return lerp_numbers(cx, self, tensors1, [weight] * len(self))


@rule("_foreach_zero.default", OpClass.OPTIMIZER)
def zero(cx: Context, self: Any) -> list[Any]:
    return [jnp.zeros_like(x) for x in self]


@rule("_foreach_copy.default", OpClass.OPTIMIZER)
def copy(cx: Context, self: Any, src: Any, non_blocking: bool = False) -> list[Any]:
    rows = enumerate(zip(self, src, strict=True))
    return [spread(convert(y, cx.out[i].dtype), cx.out[i].shape) for i, (_, y) in rows]


def _as_one(cx: Context, i: int, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """An op of another family for the i-th tensor, by its row or its decomposition."""
    (result,), checks = lower(op, args, kwargs, (cx.out[i],), cx.bounds)
    cx.checks.extend(checks)
    return result


@rule("_foreach_max.default", OpClass.OPTIMIZER)
def maximum_of_all(cx: Context, self: Any) -> list[Any]:
    return [_as_one(cx, i, torch.ops.aten.max.default, x) for i, x in enumerate(self)]


@rule("_foreach_mm.default", OpClass.OPTIMIZER)
def mm(cx: Context, self: Any, mat2: Any) -> list[Any]:
    return [_as_one(cx, i, torch.ops.aten.mm.default, x, y) for i, (x, y) in enumerate(zip(self, mat2, strict=True))]


# Gradient scaling under autocast.


@rule("_amp_foreach_non_finite_check_and_unscale.default", OpClass.OPTIMIZER)
def unscale(cx: Context, self: Any, found_inf: Any, inv_scale: Any) -> list[Any]:
    scaled, bad = [], found_inf
    for x in self:
        bad = where(jnp.isfinite(x).all(), bad, 1)
        wide = x.astype(np.promote_types(x.dtype, np.float32)) if x.dtype.itemsize < 4 else x
        scaled.append(where(inv_scale == 1, wide, wide * inv_scale.astype(wide.dtype)))
    return [*scaled, bad.reshape(found_inf.shape)]


@rule("_amp_update_scale.default", OpClass.OPTIMIZER)
def update_scale(
    cx: Context,
    self: Any,
    growth_tracker: Any,
    found_inf: Any,
    scale_growth_factor: float,
    scale_backoff_factor: float,
    growth_interval: int,
) -> tuple[Any, Any]:
    bad = found_inf.reshape(self.shape) != 0
    done = growth_tracker.reshape(self.shape) + 1
    due = done == growth_interval
    grown = self * np.asarray(scale_growth_factor, self.dtype)
    backed_off = self * np.asarray(scale_backoff_factor, self.dtype)
    scale = where(bad, backed_off, where(due & jnp.isfinite(grown), grown, self))
    return scale, where(bad | due, 0, done).reshape(growth_tracker.shape)
