"""Pooling over one, two and three trailing dimensions, batched or not."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .lowering import Context
from .pool_windows import Adaptive, Axis, adaptive, max_windows, place_maxima, spread_windows, sum_windows
from .precision import accumulator
from .rule import OpClass, rule


def _axes(size: Any, out: Any, kernel: Any, stride: Any, padding: Any, dilation: Any) -> tuple[Axis, ...]:
    """One `Axis` per dimension from torch's lists, which may have one entry for all; no stride means the kernel."""
    rank = len(size)

    def every(values: Any) -> tuple[int, ...]:
        values = tuple(values) if isinstance(values, (list, tuple)) else (values,)
        return values * rank if len(values) == 1 else values

    kernel = every(kernel)
    stride = every(stride) if stride else kernel
    return tuple(map(Axis, size, out, kernel, stride, every(padding), every(dilation)))


def _max_pool(rank: int) -> Any:
    def lower(
        cx: Context, self: Any, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Any:  # fmt: skip
        axes = _axes(self.shape[-rank:], cx.out[0].shape[-rank:], kernel_size, stride, padding, dilation)
        return max_windows(self, axes)

    return lower


def _max_pool_backward(rank: int) -> Any:
    def lower(
        cx: Context, grad_output: Any, self: Any, kernel_size: Any, stride: Any, padding: Any, dilation: Any,
        ceil_mode: bool, indices: Any,
    ) -> Any:  # fmt: skip
        axes = _axes(self.shape[-rank:], grad_output.shape[-rank:], kernel_size, stride, padding, dilation)
        return place_maxima(grad_output.astype(accumulator(grad_output.dtype)), indices, axes)

    return lower


def _divisors(axes: tuple[Axis, ...], count_include_pad: bool, divisor_override: int | None) -> np.ndarray | int:
    """How many elements ATen divides each window by, as an array over the windows where it varies."""
    if divisor_override is not None:
        return divisor_override
    total = np.ones((), np.int64)
    for a in axes:
        start = a.position(0)
        end = np.minimum(start + a.kernel, a.size + a.padding)
        count = end - start if count_include_pad else np.minimum(end, a.size) - np.maximum(start, 0)
        total = total[..., None] * count
    return int(total.flat[0]) if total.size and (total == total.flat[0]).all() else total


def _divide(x: Any, by: Any) -> Any:
    by = np.asarray(by, x.dtype)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return lax.div(x, jnp.broadcast_to(by, x.shape))  # towards zero, as C++ does
    return x / by


def _avg_pool(rank: int) -> Any:
    def lower(
        cx: Context, self: Any, kernel_size: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> Any:  # fmt: skip
        axes = _axes(self.shape[-rank:], cx.out[0].shape[-rank:], kernel_size, stride, padding, 1)
        x = sum_windows(self.astype(accumulator(self.dtype)), axes)
        return _divide(x, _divisors(axes, count_include_pad, divisor_override))

    return lower


def _avg_pool_backward(rank: int) -> Any:
    def lower(
        cx: Context, grad_output: Any, self: Any, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool,
        count_include_pad: bool, divisor_override: int | None,
    ) -> Any:  # fmt: skip
        axes = _axes(self.shape[-rank:], grad_output.shape[-rank:], kernel_size, stride, padding, 1)
        g = grad_output.astype(accumulator(grad_output.dtype))
        return spread_windows(_divide(g, _divisors(axes, count_include_pad, divisor_override)), axes)

    return lower


def _adaptive_axes(size: Any, out: Any) -> tuple[Axis | Adaptive, ...]:
    return tuple(map(adaptive, size, out))


def _counts(axes: tuple[Axis | Adaptive, ...]) -> np.ndarray | int:
    total = np.ones((), np.int64)
    for a in axes:
        total = total[..., None] * (a.ends - a.starts if isinstance(a, Adaptive) else np.full(a.out, a.kernel))
    return total


def _adaptive_avg_pool(rank: int) -> Any:
    def lower(cx: Context, self: Any, output_size: Any) -> Any:
        out = cx.out[0].shape
        acc = accumulator(self.dtype)
        if 0 in out or 0 in self.shape:
            return jnp.zeros(out, acc)
        axes = _adaptive_axes(self.shape[-rank:], out[-rank:])
        return _divide(sum_windows(self.astype(acc), axes), _counts(axes))

    return lower


def _adaptive_avg_pool_backward(rank: int) -> Any:
    def lower(cx: Context, grad_output: Any, self: Any) -> Any:
        acc = accumulator(grad_output.dtype)
        if 0 in grad_output.shape or 0 in self.shape:
            return jnp.zeros(self.shape, acc)
        axes = _adaptive_axes(self.shape[-rank:], grad_output.shape[-rank:])
        return spread_windows(_divide(grad_output.astype(acc), _counts(axes)), axes)

    return lower


def _adaptive_max_pool(rank: int) -> Any:
    def lower(cx: Context, self: Any, output_size: Any) -> Any:
        out = cx.out[0].shape
        if 0 in out:
            return jnp.zeros(out, self.dtype), jnp.zeros(out, jnp.int64)
        return max_windows(self, _adaptive_axes(self.shape[-rank:], out[-rank:]))

    return lower


def _adaptive_max_pool_backward(rank: int) -> Any:
    def lower(cx: Context, grad_output: Any, self: Any, indices: Any) -> Any:
        g = grad_output.astype(accumulator(grad_output.dtype))
        if 0 in g.shape or 0 in self.shape:
            return jnp.zeros(self.shape, g.dtype)
        return place_maxima(g, indices, _adaptive_axes(self.shape[-rank:], g.shape[-rank:]))

    return lower


for _rank in (2, 3):
    rule(f"max_pool{_rank}d_with_indices.default", OpClass.WINDOW)(_max_pool(_rank))
    rule(f"max_pool{_rank}d_with_indices_backward.default", OpClass.WINDOW)(_max_pool_backward(_rank))
    rule(f"avg_pool{_rank}d.default", OpClass.WINDOW)(_avg_pool(_rank))
    rule(f"avg_pool{_rank}d_backward.default", OpClass.WINDOW)(_avg_pool_backward(_rank))
    rule(f"_adaptive_avg_pool{_rank}d.default", OpClass.WINDOW)(_adaptive_avg_pool(_rank))
    rule(f"_adaptive_avg_pool{_rank}d_backward.default", OpClass.WINDOW)(_adaptive_avg_pool_backward(_rank))
    rule(f"adaptive_max_pool{_rank}d.default", OpClass.WINDOW)(_adaptive_max_pool(_rank))
    rule(f"adaptive_max_pool{_rank}d_backward.default", OpClass.WINDOW)(_adaptive_max_pool_backward(_rank))
