"""Platforms: Pallas kernels inside a program are compiled for the platform that the program is lowered for.

On a TPU that is Mosaic, on a GPU Triton. A CPU has no compiler for them: there Pallas interprets them, which XLA
compiles like any other loop. The choice is made where the region is lowered (`lax.platform_dependent`), so one trace
serves all platforms, and nothing needs to be said where the kernel is written.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from fused_eager.fusion_rules.xla_tpu.kernel_costs import KERNEL as _KERNEL
from fused_eager.fusion_rules.xla_tpu.kernel_costs import estimated


def prepared(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program with each Pallas kernel by platform; itself if it holds none."""
    if not _holds_kernel(closed.jaxpr):
        return closed
    interpreted = closed.replace(jaxpr=_interpreted(closed.jaxpr))

    def choose(*arrays: Any) -> Any:
        compiled = jaxpr_as_fun(estimated(closed))
        return jax.lax.platform_dependent(*arrays, cpu=jaxpr_as_fun(interpreted), default=compiled)

    return jax.make_jaxpr(choose)(*[jax.ShapeDtypeStruct(v.shape, v.dtype, weak_type=v.weak_type)
                                    for v in closed.in_avals])


def lowering_rules() -> tuple[tuple[Any, Any], ...]:
    """For `jax.export`: how kernels are lowered where a program is for several platforms at once. JAX lowers each
    branch of a program for all of them then, and has no kernels for a CPU: there they are interpreted."""
    if "jax._src.pallas.pallas_call" not in sys.modules:
        return ()  # the program holds none
    from jax._src.effects import no_effects
    from jax._src.interpreters import mlir
    from jax._src.pallas.pallas_call import _pallas_call_lowering as usual
    from jax._src.pallas.pallas_call import pallas_call_p

    def lowered(ctx: Any, *operands: Any, interpret: Any, **params: Any) -> Any:
        if interpret:
            return usual(ctx, *operands, interpret=interpret, **params)
        rules = {"cpu": functools.partial(usual, interpret=True)}
        others = functools.partial(usual, interpret=False)
        return mlir.lower_per_platform(ctx, _KERNEL, rules, others, no_effects, *operands, **params)

    return ((pallas_call_p, lowered),)


def kernels(closed: ClosedJaxpr) -> int:
    """How many Pallas kernels a traced program holds."""
    return _count(closed.jaxpr)


def _count(jaxpr: Jaxpr) -> int:
    return sum((e.primitive.name == _KERNEL) + sum(_count(_open(j)) for j in _inner(e.params)) for e in jaxpr.eqns)


def _holds_kernel(jaxpr: Jaxpr) -> bool:
    return any(e.primitive.name == _KERNEL or any(_holds_kernel(_open(j)) for j in _inner(e.params))
               for e in jaxpr.eqns)


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, (Jaxpr, ClosedJaxpr))


def _open(x: Any) -> Jaxpr:
    return x.jaxpr if isinstance(x, ClosedJaxpr) else x


def _inner(params: dict[str, Any]) -> list[Any]:
    """The functions in an equation's parameters."""
    found = []
    for value in params.values():
        for x in value if isinstance(value, (tuple, list)) else (value,):
            if _is_jaxpr(x):
                found.append(x)
    return found


def _interpreted(jaxpr: Jaxpr) -> Jaxpr:
    return jaxpr.replace(eqns=[_equation(e) for e in jaxpr.eqns])


def _equation(eqn: Any) -> Any:
    if eqn.primitive.name == _KERNEL:
        return _as_loops(eqn) if isinstance(eqn.params["interpret"], bool) else eqn
    if not _inner(eqn.params):
        return eqn
    return eqn.replace(params={name: _value(value) for name, value in eqn.params.items()})


def _as_loops(eqn: Any) -> Any:
    """A kernel as what its interpretation computes. JAX would make that where the region is lowered, whose numbers may
    have 64 bits where those of the kernel have not."""
    from jax._src.pallas.hlo_interpreter import pallas_call_hlo_interpret as interpret

    params = {name: value for name, value in eqn.params.items() if name != "interpret"}
    forms = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    made = jax.make_jaxpr(jax.jit(functools.partial(interpret, **params)))(*forms)
    if made.consts or len(made.jaxpr.eqns) != 1:
        return eqn.replace(params={**eqn.params, "interpret": True})
    return made.jaxpr.eqns[0].replace(invars=eqn.invars, outvars=eqn.outvars)


def _value(value: Any) -> Any:
    if isinstance(value, (tuple, list)) and any(map(_is_jaxpr, value)):
        return type(value)(_value(x) for x in value)
    if isinstance(value, ClosedJaxpr):
        return value.replace(jaxpr=_interpreted(value.jaxpr))
    return _interpreted(value) if isinstance(value, Jaxpr) else value
