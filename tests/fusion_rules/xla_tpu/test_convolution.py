"""Gradients of convolutions' weights lie as the weights do, so that an optimizer's step copies neither."""

from __future__ import annotations

from fused_eager.fusion_rules import families

from .for_a_tpu import kernels_in, needs_its_compiler

families.load()


@needs_its_compiler
def test_a_step_copies_no_weights() -> None:
    program = """
import numpy as np, re
from jax import lax
from fused_eager.fusion_rules.lower_conv import as_weights_lie
form = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32, sharding=place)
def conv(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), ((1, 1), (1, 1)), dimension_numbers=("NCHW", "OIHW", "NCHW"))
def step(lies):
    def run(w, m, x, g):
        y, vjp = jax.vjp(conv, x, w)
        dx, dw = vjp(g)
        m = m * 0.9 + lies(dw)
        return w - 1e-3 * m, m, y, dx
    return run
def copies(lies):
    with tracing_for(device):
        made = jax.jit(step(lies), donate_argnums=(0, 1)).lower(*[form(512, 512, 3, 3)] * 2, *[form(16, 512, 2, 2)] * 2)
        text = made.compile().as_text()
    entry = text[text.index("ENTRY"):]
    return len(re.findall(r"= f32.512,512,3,3.\\S* copy[(]", entry))
print(copies(as_weights_lie), copies(lambda g: g))
"""
    found = kernels_in(program)
    assert found[0] == "0" and int(found[1]) > 0, found
