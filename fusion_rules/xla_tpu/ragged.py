"""Attention over sequences of several lengths on TPUs: sequences are segments of JAX's own Pallas kernels.

Where each query sees its whole sequence, or what of it comes before, that is the kernel of `attention`; within a
window, or with fewer queries than keys, that of `windows`. The rest is computed as everywhere.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..lower_attention import Heads
from ..lower_ragged_attention import Ragged, attend_ragged, attend_ragged_backward
from . import attention, windows
from .kernels import exactly


def _kernel(call: Ragged, q: jax.Array, k: jax.Array, v: jax.Array, heads: Heads) -> Any:
    """The kernel that takes a call; None if none does."""
    if not attention.fits(q, k, v, None):
        return None
    segments = [jnp.where(x.real, x.of, none).astype(jnp.int32) for x, none in ((call.queries, -2), (call.keys, -3))]
    left, right = call.window
    if left is None and (right is None or (right == 0 and call.shift == 0)):
        return attention.Kernel(heads.queries, heads.keys, right is not None, heads.scale, segments)
    if call.shift is None:
        return None
    return windows.Kernel(heads.queries, heads.keys, windows.Band(left, right, call.shift), heads.scale, segments)


@attend_ragged.on("tpu")
def flash_ragged(call: Ragged, q: Any, k: Any, v: Any, scale: float | None) -> Any:
    """JAX's flash attention with a segment for each sequence, its splash attention for windows"""
    heads = Heads(q, k, None, False, scale)
    kernel = _kernel(call, q, k, v, heads)
    if kernel is None:
        return attend_ragged.any(call, q, k, v, scale)
    k, v = (x if kernel.grouped else heads.share(x) for x in (k, v))
    out, lse = exactly(kernel.forward, q.dtype, q, k, v)
    return jnp.where(call.sees[..., None], out, jnp.zeros((), out.dtype)), jnp.where(call.sees, lse, jnp.inf)


@attend_ragged_backward.on("tpu")
def flash_ragged_backward(
    call: Ragged, grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float | None
) -> Any:
    """The derivatives of JAX's flash and splash attention with segments"""
    heads = Heads(q, k, None, False, scale)
    kernel = _kernel(call, q, k, v, heads)
    if kernel is None:
        return attend_ragged_backward.any(call, grad, q, k, v, out, lse, scale)
    k, v = (x if kernel.grouped else heads.share(x) for x in (k, v))
    dq, *of_keys = exactly(kernel.backward, q.dtype, grad.astype(q.dtype), q, k, v, out, lse)
    return dq, *[x if kernel.grouped else heads.gather(x) for x in of_keys]
