"""Fused optimizer steps: `_fused_adam`, `_fused_adamw`, `_fused_sgd`, `_fused_adagrad`.

Numbers are computed in float64 and rounded to the parameter's computation dtype, as ATen's kernels do. Learning
rates and betas are inputs of the region, for schedules change them; the others choose what is computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from .elementwise import as_array, divide, where
from .lower_pointwise import lerp
from .lowering import Context
from .rule import OpClass, rule


def _wide(x: Any) -> Any:
    """The dtype in which a parameter is updated."""
    return x.astype(np.float32) if x.dtype.itemsize < 4 else x


def _double(x: Any) -> Any:
    return as_array(x, np.float64)


class Step:
    """What all fused steps share: gradients unscaled, negated and decayed, and no change if an infinity was found."""

    def __init__(self, grad_scale: Any, found_inf: Any, maximize: bool):
        self.scale = grad_scale
        self.skip = None if found_inf is None else found_inf.reshape(()) == 1
        self.maximize = maximize

    def unscaled(self, grad: Any) -> Any:
        return grad if self.scale is None else divide(grad, self.scale.reshape(()).astype(grad.dtype))

    def keep(self, new: list[Any], old: list[Any]) -> list[Any]:
        """The new values, or the old ones if this step is skipped."""
        if self.skip is None:
            return new
        return [where(self.skip, o.astype(n.dtype), n) for n, o in zip(new, old, strict=True)]


def _adam(decoupled: bool) -> Any:
    def lower(
        cx: Context,
        self: list[Any],
        grads: list[Any],
        exp_avgs: list[Any],
        exp_avg_sqs: list[Any],
        max_exp_avg_sqs: list[Any],
        state_steps: list[Any],
        *,
        lr: Any,
        beta1: Any,
        beta2: Any,
        weight_decay: float,
        eps: float,
        amsgrad: bool,
        maximize: bool,
        grad_scale: Any = None,
        found_inf: Any = None,
    ) -> list[list[Any]]:
        step = Step(grad_scale, found_inf, maximize)
        lr, beta1, beta2 = _double(lr).reshape(()), _double(beta1), _double(beta2)
        out: list[list[Any]] = [[], [], [], [], []]
        for i, param in enumerate(self):
            x, mean, square = _wide(param), _wide(exp_avgs[i]), _wide(exp_avg_sqs[i])
            dtype = x.dtype
            grad = step.unscaled(_wide(grads[i]))
            out[1].append(grad)
            grad = -grad if maximize else grad
            if weight_decay != 0 and decoupled:
                x = x * as_array(1 - lr * weight_decay, dtype)
            elif weight_decay != 0:
                grad = grad + x * as_array(weight_decay, dtype)
            count = _double(state_steps[i]).reshape(())
            size = as_array(lr / (1 - lax.pow(beta1, count)), dtype)
            root = as_array(lax.sqrt(1 - lax.pow(beta2, count)), dtype)
            mean = lerp(cx, mean, grad, as_array(1 - beta1, dtype))
            square = as_array(beta2, dtype) * square + as_array(1 - beta2, dtype) * grad * grad
            top = square
            if amsgrad:
                top = lax.max(_wide(max_exp_avg_sqs[i]), square)
                out[4].append(top)
            x = x - size * mean / (divide(lax.sqrt(top), root) + as_array(eps, dtype))
            for column, value in zip((out[0], out[2], out[3]), (x, mean, square), strict=True):
                column.append(value)
        old = [self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs]
        # Lists that this variant does not touch come back as they are.
        out[4] = out[4] if amsgrad else list(max_exp_avg_sqs)
        return [step.keep(n, o) for n, o in zip(out, old, strict=True)]

    return lower


for _name, _decoupled in {"_fused_adam": False, "_fused_adamw": True}.items():
    rule([f"{_name}.default", f"{_name}.tensor_lr"], OpClass.OPTIMIZER, hoist=["lr", "beta1", "beta2"])(
        _adam(_decoupled)
    )


@rule(["_fused_sgd.default", "_fused_sgd.tensor_lr"], OpClass.OPTIMIZER, hoist=["lr"])
def sgd(
    cx: Context,
    self: list[Any],
    grads: list[Any],
    momentum_buffer_list: list[Any],
    *,
    weight_decay: float,
    momentum: float,
    lr: Any,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Any = None,
    found_inf: Any = None,
) -> list[list[Any]]:
    step = Step(grad_scale, found_inf, maximize)
    params, unscaled, buffers = [], [], []
    for i, param in enumerate(self):
        x, grad = _wide(param), step.unscaled(_wide(grads[i]))
        dtype = x.dtype
        unscaled.append(grad)
        grad = -grad if maximize else grad
        if weight_decay != 0:
            grad = grad + x * as_array(weight_decay, dtype)
        if momentum != 0:
            speed = grad
            if not is_first_step:
                old = _wide(momentum_buffer_list[i])
                speed = as_array(momentum, dtype) * old + as_array(1 - dampening, dtype) * grad
            buffers.append(speed)
            grad = grad + as_array(momentum, dtype) * speed if nesterov else speed
        params.append(x - as_array(_double(lr).reshape(()), dtype) * grad)
    return [
        step.keep(params, self),
        step.keep(unscaled, grads),
        step.keep(buffers, momentum_buffer_list) if momentum != 0 else list(momentum_buffer_list),
    ]


@rule(["_fused_adagrad.default", "_fused_adagrad.tensor_lr"], OpClass.OPTIMIZER, hoist=["lr"])
def adagrad(
    cx: Context,
    self: list[Any],
    grads: list[Any],
    state_sums: list[Any],
    state_steps: list[Any],
    *,
    lr: Any,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    grad_scale: Any = None,
    found_inf: Any = None,
) -> list[list[Any]]:
    step = Step(grad_scale, found_inf, maximize)
    params, unscaled, sums = [], [], []
    for i, param in enumerate(self):
        x, grad = _wide(param), step.unscaled(_wide(grads[i]))
        dtype = x.dtype
        unscaled.append(grad)
        grad = -grad if maximize else grad
        if weight_decay != 0:
            grad = grad + x * as_array(weight_decay, dtype)
        rate = _double(lr).reshape(()) / (1 + (_double(state_steps[i]).reshape(()) - 1) * lr_decay)
        total = _wide(state_sums[i]) + grad * grad
        sums.append(total)
        params.append(x - as_array(rate, dtype) * grad / (lax.sqrt(total) + as_array(eps, dtype)))
    out = [step.keep(params, self), step.keep(unscaled, grads), step.keep(sums, state_sums)]
    # The overload with a tensor for a learning rate does not give the step counts back.
    flat = sum(map(len, out))
    return [*out, list(state_steps)] if len(cx.out) > flat else out
