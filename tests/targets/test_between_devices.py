"""The collectives among the chips of one process compile for a TPU, and are those of its links."""

from __future__ import annotations

import pytest

from fused_eager.targets import topology

from .test_cross import child

PROGRAM = """
import json, jax, torch
from fused_eager.frontends.collectives import across
from fused_eager.fusion_rules.spec import JAX_DTYPE
from fused_eager.targets.target import Target
from fused_eager.targets.topology import devices
from fused_eager.xla import enable_x64

chips = devices(Target.parse("v5e:2x2"))
NAMES = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all")
REDUCED = ("SUM", "AVG", "MIN", "MAX")
found = {}
for program, kinds in ((across.summed, REDUCED), (across.scattered, REDUCED), (across.gathered, ("",)),
                       (across.exchanged, ("",))):
    for kind in kinds:
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool):
            if kind and not across.reduces(kind, dtype, program is across.scattered, on_a_tpu=True):
                continue
            with enable_x64(True):
                given = jax.ShapeDtypeStruct((4, 64, 128), JAX_DTYPE[dtype], sharding=across.laid_over(chips))
                text = across.compiled(program, kind, chips).lower(given).compile().as_text()
            found[f"{program.__name__} {kind} {dtype}"] = [name for name in NAMES if name in text]
print(json.dumps(found))
"""


@pytest.mark.skipif(bool(topology.obstacle()), reason=topology.obstacle() or "it is there")
def test_each_collective_is_one_over_the_links() -> None:
    found, told = child(PROGRAM, "")
    assert told == "" and all(found.values())
    assert found["summed AVG torch.bfloat16"] == found["summed SUM torch.int64"] == ["all-reduce"]
    assert found["gathered  torch.float64"] == ["all-gather"] and found["exchanged  torch.bool"] == ["all-to-all"]
    assert not [name for name in found if name.startswith("s") and "float64" in name]
    assert len(found) == 12 + 6 + 6 + 6
