"""The cycles that XLA's compiler for a TPU writes into a program's text, added up."""

from __future__ import annotations

from fused_eager.compiling.cycles import Cycles, cycles
from tests.fusion_rules.xla_tpu.for_a_tpu import kernels_in, needs_its_compiler

TEXT = """HloModule jit_f, entry_computation_layout={(f32[8])->f32[8]}

%body (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %a = f32[8]{0:T(128)} fusion(%p), kind=kLoop, calls=%c, backend_config={"estimated_cycles":"10"}
}

%one (p: f32[8]) -> f32[8] {
  ROOT %b = (f32[8]{0}, f32[8]{0}) fusion(%p), kind=kLoop, calls=%c, backend_config={"estimated_cycles":"7"}
}

%other (p: f32[8]) -> f32[8] {
  ROOT %b = f32[8]{0} copy(%p), backend_config={"estimated_cycles":"3"}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %s = f32[8]{0} sort(%x), dimensions={0}
  %w = f32[8]{0} while(%x), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %v = f32[8]{0} while(%x), condition=%cond, body=%body
  %i = f32[8]{0} conditional(%p, %x, %x), true_computation=%one, false_computation=%other
  %j = f32[8]{0} conditional(%n, %x, %x), branch_computations={%other, %one}
  %k = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call"
  %l = f32[8]{0} custom-call(%x), custom_call_target="AllocateBuffer"
  %m = f32[8]{0} call(%x), to_apply=%other
  ROOT %r = f32[8]{0} fusion(%s), kind=kLoop, calls=%body, backend_config={"estimated_cycles":"100"}
}
"""


def test_loops_branches_and_calls_are_followed() -> None:
    assert cycles(TEXT) == Cycles(50 + 10 + 7 + 7 + 3 + 100, 3)  # the sort, a loop without a count, a kernel
    assert cycles("") == cycles("HloModule x\n") == Cycles()


@needs_its_compiler
def test_each_pass_of_a_product_is_counted() -> None:
    """As the analysis of operations and bytes does not: float32 at full precision passes six times."""
    program = """
import numpy as np, jax.numpy as jnp
from fused_eager.compiling.cross import cost_of
def of(dtype, precision):
    form = jax.ShapeDtypeStruct((2048, 2048), dtype, sharding=place)
    with tracing_for(device):
        return cost_of(jax.jit(lambda x, y: jnp.matmul(x, y, precision=precision)).lower(form, form).compile())
half, exact = of(jnp.bfloat16, None), of(np.float32, "highest")
print(round(exact.cycles / half.cycles), exact.uncounted_kernels, half.seconds > 0)
"""
    found = kernels_in(program)
    assert 4 <= int(found[0]) <= 7 and found[1:] == ["0", "True"], found
