"""Quotients and roots that XLA's algebra does not rewrite on a TPU, though no barrier keeps it from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from fused_eager.fusion_rules import families
from fused_eager.fusion_rules.axes import quotient
from fused_eager.fusion_rules.elementwise import divide, hidden
from fused_eager.fusion_rules.lower_elementary import _exp, _sqrt
from fused_eager.fusion_rules.platforms import lowering_for

from .for_a_tpu import kernels_in, needs_its_compiler

families.load()
F = np.float32
MANY = np.array([1.0, 49.0, 0.0, np.inf, -np.inf, np.nan, 3e38, 1e-38], F)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (lambda x, a, b: divide(divide(x, a), b), (MANY, F(1e30), F(1e30))),  # x / (a * b): 0
        (lambda x, a, b: divide(x, divide(a, b)), (MANY, F(1e-30), F(1e30))),
        (lambda x, a: divide(x, a), (MANY, F(1e38))),  # 1 / a is 0
        (lambda x, a: divide(x, a), (MANY, F(49.0))),  # 49 * (1 / 49) < 1
        (lambda x: quotient(x, 49), (MANY,)),
        (lambda x: quotient(x, F(1e38)), (MANY,)),
        (lambda x: _sqrt(x * x), (MANY,)),  # abs(x), where the square is infinite
        (lambda x: _exp(x) * _exp(-x), (np.array([0.0, 100.0, -100.0, np.inf, np.nan], F),)),  # 1
    ],
)
def test_what_is_hidden_is_not_rewritten(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    everywhere = jax.jit(function)(*arguments)
    with lowering_for("tpu"):
        traced = jax.jit(lambda *given: function(*given)).trace(*arguments)
        there = jax.jit(lambda *given: function(*given))(*arguments)
    assert "optimization_barrier" not in str(traced.jaxpr)
    np.testing.assert_array_equal(there, everywhere)


def test_what_has_no_nan_is_left_behind_a_barrier() -> None:
    with lowering_for("tpu"):
        for values in (np.arange(3), np.array([1j, 2 + 1j], np.complex64)):
            assert "optimization_barrier" in str(jax.make_jaxpr(hidden)(values))
            np.testing.assert_array_equal(jax.jit(lambda x: hidden(x))(values), values)


@needs_its_compiler
def test_an_optimizer_s_step_is_one_loop() -> None:
    """Where nothing is rewritten, by the TPU's own compiler either."""
    program = """
import numpy as np
from fused_eager.fusion_rules.elementwise import divide
from fused_eager.fusion_rules.lower_elementary import _sqrt
many = jax.ShapeDtypeStruct((1024, 1024), np.float32, sharding=place)
one = jax.ShapeDtypeStruct((), np.float32, sharding=place)
def step(p, m, v, first, second):
    return p - divide(divide(m, first), divide(_sqrt(v * v), second) + 1e-8)
with tracing_for(device):
    text = jax.jit(step).lower(many, many, many, one, one).compile().as_text()
entry = text[text.index("ENTRY"):]
print(*(entry.count(f" {op}(") for op in ("fusion", "sqrt", "divide")), text.count(" sqrt("), text.count(" abs("))
"""
    assert kernels_in(program) == ["1", "0", "0", "1", "0"]
