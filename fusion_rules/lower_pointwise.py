"""Pointwise ops."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from .lowering import Context
from .rule import OpClass, Promote, rule


@rule("add.Tensor", OpClass.POINTWISE, promote=Promote.DEFAULT)
def add(cx: Context, x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return x + y if isinstance(alpha, int) and alpha == 1 else x + y * alpha


@rule("mul.Tensor", OpClass.POINTWISE, promote=Promote.DEFAULT)
def mul(cx: Context, x: Any, y: Any) -> Any:
    return x * y


@rule("sin.default", OpClass.POINTWISE, promote=Promote.INT_TO_FLOAT)
def sin(cx: Context, x: Any) -> Any:
    return jnp.sin(x)
