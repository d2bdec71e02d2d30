"""Latencies: for how many cycles a core waits for what a JAX primitive computes, in a vectorised loop of XLA:CPU.

Rough figures, for they decide only where one loop becomes two (`fused_eager.lowering.xla_cpu.stages`): those of the
instructions that XLA's own polynomials consist of (Agner Fog, Instruction tables), checked against chains of each on a
Zen 4.
"""

from __future__ import annotations

from typing import Any

import numpy as np

CHEAP = 4  # an addition, a product, a comparison
FREE = frozenset({"broadcast_in_dim", "reshape", "squeeze", "bitcast_convert_type", "optimization_barrier", "copy",
                  "copy_p", "stop_gradient", "real", "imag"})  # fmt: skip

# Functions that XLA:CPU calls number by number. What is in a loop with one of them is not vectorised either.
CALLED = frozenset(["acos", "asin", "atan", "atan2", "cbrt", "cos", "digamma", "lgamma", "pow", "rem", "sin", "tan"])
_LONG = {
    12: "div integer_pow",
    18: "sqrt rsqrt",
    80: "erf erf_inv erfc exp exp2 logistic tanh",
    90: "log",
    100: "acosh asinh atanh cosh expm1 log1p sinh",
    200: "bessel_i0e bessel_i1e",
    1000: " ".join(CALLED),
}
_OF = {name: cycles for cycles, names in _LONG.items() for name in names.split()}
# Others: of the real and the imaginary part, one after the other.
_OF_COMPLEX = {"abs": 60, "div": 40, "integer_pow": 24, "mul": 12, "square": 12}


def latency(eqn: Any) -> int:
    """Cycles from what an elementwise equation takes to what it gives."""
    name = eqn.primitive.name
    if name in FREE:
        return 0
    if any(np.issubdtype(v.aval.dtype, np.complexfloating) for v in eqn.invars):
        return _OF_COMPLEX.get(name) or (2 * _OF[name] if name in _OF else CHEAP)
    return _OF.get(name, CHEAP)
