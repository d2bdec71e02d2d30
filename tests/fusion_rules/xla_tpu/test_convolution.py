"""Gradients of convolutions' weights lie as the weights do, so that an optimizer's step copies neither; and windows
beside each other are products."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from fused_eager.fusion_rules import families
from fused_eager.fusion_rules.lower_conv import NATIVE, window
from fused_eager.fusion_rules.xla_tpu.convolution import PATCHES, patches_or_native

from .for_a_tpu import kernels_in, needs_its_compiler

families.load()
Shape = tuple[int, ...]


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


@pytest.mark.parametrize(("kernel", "out"), [((4,), (5,)), ((2, 3), (4, 5)), ((2, 1, 3), (2, 3, 2)), ((4, 4), (1, 1))])
def test_windows_beside_each_other_are_products_with_the_same_values(kernel: Shape, out: Shape) -> None:
    size = tuple(k * o for k, o in zip(kernel, out, strict=True))
    win = window(size, out, kernel, kernel, (0,), (1,), 1)
    draw = np.random.default_rng(0).normal
    x, w, y = (jnp.asarray(draw(size=s), "float32") for s in ((2, 3, *size), (6, 3, *kernel), (2, 6, *out)))
    assert patches_or_native(win) is PATCHES
    for product, a, b in (("forward", x, w), ("input_grad", y, w), ("weight_grad", x, y)):
        found, expected = (getattr(form, product)(win, a, b) for form in (PATCHES, NATIVE))
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "how",
    [
        ((9, 9), (2, 2), (4, 4), (4,), (0,), (1,), 1),  # a row and a column are left
        ((8, 8), (2, 2), (4, 4), (4,), (0,), (1,), 2),
        ((8, 8), (8, 8), (1, 1), (1,), (0,), (1,), 1),  # a product in XLA, too
        ((8, 8), (4, 4), (4, 4), (2,), (1,), (1,), 1),
    ],
)
def test_others_are_convolutions(how: Any) -> None:
    assert patches_or_native(window(*how)) is NATIVE


@needs_its_compiler
def test_of_patches_a_tpu_makes_a_product() -> None:
    program = """
import numpy as np
from fused_eager.compiling.cross import cost_of
from fused_eager.fusion_rules.lower_conv import NATIVE, window
from fused_eager.fusion_rules.xla_tpu.convolution import PATCHES
win = window((112, 112), (7, 7), (16, 16), (16,), (0,), (1,), 1)
x, g = (jax.ShapeDtypeStruct(s, np.float32, sharding=place) for s in ((16, 3, 112, 112), (16, 50, 512)))
for form in (PATCHES, NATIVE):
    def gradient(x, g):
        return form.weight_grad(win, x, g[:, 1:].reshape(16, 7, 7, 512).transpose(0, 3, 1, 2))
    with tracing_for(device):
        print(cost_of(jax.jit(gradient).lower(x, g).compile()).cycles)
"""
    products, native = map(float, kernels_in(program))
    assert products < 0.5 * native
