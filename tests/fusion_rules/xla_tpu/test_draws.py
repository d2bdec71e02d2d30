"""A mask of dropout is drawn once on a TPU, however many loops read it."""

from __future__ import annotations

from fused_eager.fusion_rules import families

from .for_a_tpu import kernels_in, needs_its_compiler

families.load()


@needs_its_compiler
def test_a_mask_that_two_loops_read_is_drawn_once() -> None:
    program = """
import numpy as np
from fused_eager.fusion_rules.lower_random import computed_once, _key
many = jax.ShapeDtypeStruct((1024, 1024), np.float32, sharding=place)
seed = jax.ShapeDtypeStruct((), np.int64, sharding=place)
def passes(x, w, seed, held):
    drawn = jax.random.uniform(_key(seed, seed), x.shape, np.float32) >= 0.1
    mask = held(drawn)
    y = jax.numpy.where(mask, x, 0) @ w
    return y, jax.numpy.where(mask, y @ w.T, 0).sum(0)
def rounds(held):
    with jax.enable_x64(True), tracing_for(device):
        text = jax.jit(lambda *given: passes(*given, held)).lower(many, many, seed).compile().as_text()
    return sum("u32[1024,1024]" in line and " xor(" in line for line in text.splitlines())
print(rounds(lambda mask: mask) // rounds(computed_once))
"""
    assert kernels_in(program) == ["2"]
