"""What XLA's compiler expects of a product and of a pass over memory, beside the public figures of each chip: how far a
forecast may be trusted. `python -m tests.targets.peaks` prints the table that is in docs/targets.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fused_eager.compiling.cross import Cost, cost_of
from fused_eager.targets.target import CHIPS, Target
from fused_eager.targets.topology import devices
from fused_eager.xla import use_the_cpu_alone

N, GIB = 8192, 1 << 30


@dataclass(frozen=True)
class Peak:
    """Of one device: what was forecast, as a part of what is published for it."""

    generation: str
    bfloat16: float
    float32: float
    memory: float


def _cost(function: Callable[..., Any], shapes: Sequence[tuple[int, ...]], dtype: Any, on: Any) -> Cost:
    at = jax.sharding.SingleDeviceSharding(on)
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=at) for shape in shapes]
    return cost_of(jax.jit(function).lower(*arguments).compile())


def peaks() -> Iterator[Peak]:
    """Of each generation: a square product in bfloat16, one of float32 in full precision, and the sum of two arrays."""
    for name, chip in CHIPS.items():
        on = devices(Target.parse(f"{name}:{'x'.join(map(str, chip.host))}"))[0]
        product, wide, over = (
            _cost(jnp.matmul, [(N, N)] * 2, jnp.bfloat16, on),
            _cost(lambda a, b: jnp.matmul(a, b, precision="highest"), [(N, N)] * 2, jnp.float32, on),
            _cost(jnp.add, [(GIB // 2,)] * 2, jnp.bfloat16, on),
        )
        flops = 2 * N**3
        yield Peak(
            name,
            flops / product.seconds / chip.flops,
            flops / wide.seconds / chip.flops,
            3 * GIB / over.seconds / chip.bandwidth,
        )


if __name__ == "__main__":
    use_the_cpu_alone()
    print("| chip | product in bfloat16 | product in float32, full precision | a sum of two arrays of 1 GiB |")
    print("|---|---|---|---|")
    for row in peaks():
        print(f"| {row.generation} | {row.bfloat16:.0%} | {row.float32:.0%} | {row.memory:.0%} |")
