"""Three of the training steps written by hand in JAX, each one function to be jitted whole: what a step should take.

Each is as people write it: parameters in dicts, `jax.value_and_grad`, the optimizer's update in the same function, the
state donated. What the steps compute is what benchmarks/workloads.py has torch compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Tree = Any


@dataclass(frozen=True)
class JaxStep:
    """`step(state, *batch)` gives the next state, the loss and the gradients; `state` and `batch` are shapes and dtypes
    alone."""

    step: Callable[..., tuple[Tree, jax.Array, Tree]]
    state: Tree
    batch: tuple[Tree, ...]


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _linear(inputs: int, outputs: int) -> dict[str, Any]:
    return {"w": _floats(inputs, outputs), "b": _floats(outputs)}


def _apply(p: Tree, x: jax.Array) -> jax.Array:
    return x @ p["w"] + p["b"]


def _adam(params: Tree, grads: Tree, moments: Tree, t: jax.Array, lr: Any, b1: float, b2: float, decay: float) -> Tree:
    """The parameters and the moments after a step of AdamW; only matrices decay."""
    first, second = moments
    first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, first, grads)
    second = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, second, grads)

    def moved(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        p = p * (1 - lr * decay) if decay and p.ndim > 1 else p
        return p - lr * (m / (1 - b1**t)) / (jnp.sqrt(v / (1 - b2**t)) + 1e-8)

    return jax.tree.map(moved, params, first, second), (first, second)


def _with_moments(params: Tree) -> dict[str, Any]:
    return {"params": params, "moments": (params, params), "t": _floats()}


def mlp(dim: int, batch: int) -> JaxStep:
    """Three square layers with GELU between them, mean squared error, Adam."""

    def loss_of(params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
        for i, layer in enumerate(params):
            x = _apply(layer, jax.nn.gelu(x, approximate=False) if i else x)
        return jnp.mean((x - y) ** 2)

    def step(state: Tree, x: jax.Array, y: jax.Array) -> tuple[Tree, jax.Array, Tree]:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], x, y)
        t = state["t"] + 1
        params, moments = _adam(state["params"], grads, state["moments"], t, 1e-4, 0.9, 0.999, 0.0)
        return {"params": params, "moments": moments, "t": t}, loss, grads

    return JaxStep(step, _with_moments([_linear(dim, dim)] * 3), (_floats(batch, dim), _floats(batch, dim)))


def gpt(layers: int, dim: int, seq: int, batch: int, vocab: int = 103, heads: int = 4, dropout: float = 0.1) -> JaxStep:
    """The step of examples/train_gpt.py: dropout, clipping of the gradients' norm, AdamW."""
    norm = {"scale": _floats(dim), "shift": _floats(dim)}
    block = {
        "norm1": norm, "norm2": norm, "qkv": _linear(dim, 3 * dim), "project": _linear(dim, dim),
        "up": _linear(dim, 4 * dim), "down": _linear(4 * dim, dim),
    }  # fmt: skip
    params = {"tokens": _floats(vocab, dim), "positions": _floats(seq, dim), "norm": norm, "blocks": [block] * layers}

    def normed(p: Tree, x: jax.Array) -> jax.Array:
        mean = x.mean(-1, keepdims=True)
        return (x - mean) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * p["scale"] + p["shift"]

    def dropped(key: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(key, 1 - dropout, x.shape), x / (1 - dropout), 0)

    def attention(p: Tree, x: jax.Array, key: jax.Array) -> jax.Array:
        q, k, v = _apply(p["qkv"], x).reshape(batch, seq, 3, heads, dim // heads).transpose(2, 0, 3, 1, 4)
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(dim // heads)
        scores = jnp.where(jnp.tril(jnp.ones((seq, seq), bool)), scores, -jnp.inf)
        mixed = jnp.einsum("bhqk,bhkd->bqhd", dropped(key, jax.nn.softmax(scores)), v)
        return _apply(p["project"], mixed.reshape(batch, seq, dim))

    def loss_of(params: Tree, ids: jax.Array, targets: jax.Array, key: jax.Array) -> jax.Array:
        keys = iter(jax.random.split(key, 1 + 3 * layers))
        x = dropped(next(keys), params["tokens"][ids] + params["positions"])
        for p in params["blocks"]:
            x = x + dropped(next(keys), attention(p, normed(p["norm1"], x), next(keys)))
            up = jax.nn.gelu(_apply(p["up"], normed(p["norm2"], x)), approximate=False)
            x = x + dropped(next(keys), _apply(p["down"], up))
        logits = jax.nn.log_softmax(normed(params["norm"], x) @ params["tokens"].T)
        return -jnp.take_along_axis(logits, targets[..., None], -1).mean()

    def step(state: Tree, ids: jax.Array, targets: jax.Array, key: jax.Array, lr: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], ids, targets, key)
        size = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / (size + 1e-6)), grads)
        t = state["t"] + 1
        params, moments = _adam(state["params"], grads, state["moments"], t, lr, 0.9, 0.95, 0.1)
        return {"params": params, "moments": moments, "t": t}, loss, grads

    ids = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    return JaxStep(step, _with_moments(params), (ids, ids, jax.ShapeDtypeStruct((2,), jnp.uint32), _floats()))


def resnet18(pixels: int, batch: int, width: int = 64, classes: int = 1000) -> JaxStep:
    """ResNet-18 in training, images last in channels, SGD with momentum and weight decay."""

    def convolution(size: int, inputs: int, outputs: int) -> dict[str, Any]:
        return {"w": _floats(size, size, inputs, outputs), "scale": _floats(outputs), "shift": _floats(outputs)}

    stages, channels = [], width
    for stage in range(4):
        out = width << stage
        first = {"a": convolution(3, channels, out), "b": convolution(3, out, out)}
        if stage:
            first["shortcut"] = convolution(1, channels, out)
        stages += [first, {"a": convolution(3, out, out), "b": convolution(3, out, out)}]
        channels = out
    params = {"stem": convolution(7, 3, width), "blocks": stages, "head": _linear(channels, classes)}
    running = {"stem": _running(width), "blocks": [_running_of(b) for b in stages]}

    def convolved(p: Tree, seen: Tree, x: jax.Array, stride: int) -> tuple[jax.Array, Tree]:
        pad = (p["w"].shape[0] - 1) // 2
        x = lax.conv_general_dilated(
            x, p["w"], (stride, stride), ((pad, pad), (pad, pad)), dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        count = x.size // x.shape[-1]
        seen = {
            "mean": 0.9 * seen["mean"] + 0.1 * mean,
            "var": 0.9 * seen["var"] + 0.1 * var * count / (count - 1),
        }
        return (x - mean) * lax.rsqrt(var + 1e-5) * p["scale"] + p["shift"], seen

    def loss_of(params: Tree, running: Tree, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, Tree]:
        x, stem = convolved(params["stem"], running["stem"], images, 2)
        x = lax.reduce_window(
            jax.nn.relu(x), -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0))
        )
        seen = []
        for p, old in zip(params["blocks"], running["blocks"], strict=True):
            new = {}
            y, new["a"] = convolved(p["a"], old["a"], x, 2 if "shortcut" in p else 1)
            y, new["b"] = convolved(p["b"], old["b"], jax.nn.relu(y), 1)
            if "shortcut" in p:
                x, new["shortcut"] = convolved(p["shortcut"], old["shortcut"], x, 2)
            x = jax.nn.relu(x + y)
            seen.append(new)
        logits = jax.nn.log_softmax(_apply(params["head"], x.mean((1, 2))))
        return -jnp.take_along_axis(logits, labels[:, None], -1).mean(), {"stem": stem, "blocks": seen}

    def step(state: Tree, images: jax.Array, labels: jax.Array) -> tuple[Tree, jax.Array, Tree]:
        (loss, running), grads = jax.value_and_grad(loss_of, has_aux=True)(
            state["params"], state["running"], images, labels
        )
        momentum = jax.tree.map(lambda m, g, p: 0.9 * m + g + 1e-4 * p, state["momentum"], grads, state["params"])
        params = jax.tree.map(lambda p, m: p - 1e-3 * m, state["params"], momentum)
        return {"params": params, "running": running, "momentum": momentum}, loss, grads

    state = {"params": params, "running": running, "momentum": params}
    return JaxStep(step, state, (_floats(batch, pixels, pixels, 3), jax.ShapeDtypeStruct((batch,), jnp.int32)))


def _running(channels: int) -> dict[str, Any]:
    return {"mean": _floats(channels), "var": _floats(channels)}


def _running_of(block: Tree) -> dict[str, Any]:
    return {name: _running(part["scale"].shape[0]) for name, part in block.items()}
