"""What XLA's compiler for TPUs refuses has no lowering there, and has one everywhere else."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import jax
import pytest
import torch
from fused_eager.fusion_rules import RULES
from fused_eager.fusion_rules.platforms import lowering_for
from fused_eager.fusion_rules.rule import OpClass
from fused_eager.fusion_rules.xla_tpu.refused import REFUSED

from fused_eager.compiling.compile import lower
from fused_eager.lowering.failed import NodeFailed
from fused_eager.targets.device import TargetDevice
from fused_eager.targets.target import Target
from tests.streams import recorded
from tests.targets.calls import call_of


@pytest.mark.parametrize("op", REFUSED)
def test_each_is_a_row_for_tpus_alone(op: str) -> None:
    row = RULES[f"aten.{op}"]
    assert row.own["tpu"] is not row.lower and row.here is not row.own["tpu"]
    with lowering_for("tpu"):
        assert row.here is row.own["tpu"]


PRODUCTS = [op for op, row in RULES.items() if row.cls is OpClass.CONTRACTION]
PRODUCTS += [f"aten.{op}.default" for op in ("_foreach_mm", "conv_tbc", "convolution")]


def test_whatever_multiplies_64_bit_integers_is_refused() -> None:
    """XLA ends the compilation of the whole region over one such product."""
    taken = []
    for op in PRODUCTS:
        with suppress(RuntimeError, IndexError, TypeError):  # ATen does not take them, either
            call_of(op, torch.int64, "cpu")
            taken.append(op.removeprefix("aten."))
    assert "vdot.default" in taken and "convolution.default" in taken and set(taken) <= set(REFUSED)


@pytest.mark.parametrize(("dtype", "refused"), [(torch.float32, False), (torch.float64, True)])
def test_an_inverse_is_refused_where_it_needs_what_is_not_there(dtype: torch.dtype, refused: bool) -> None:
    region = recorded(lambda: torch.linalg.inv_ex(torch.eye(3, dtype=dtype) * 2)[0])
    device = TargetDevice(Target.parse("v5e:1"))
    lower(region, True)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(TargetDevice, "xla", property(lambda self: jax.devices("cpu")[0]))
        m.setattr("fused_eager.compiling.compile.lowering_for", lambda platform: lowering_for("tpu"))
        if refused:
            with pytest.raises(NodeFailed, match="no LU decomposition of float64"):
                lower(region, True, device)
        else:
            lower(region, True, device)


@pytest.mark.parametrize(
    "program",
    [
        lambda: torch.ones(3, dtype=torch.complex128) + 1,  # of what it reads
        lambda: torch.complex(torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)),  # and makes
        lambda: torch.ones(3, dtype=torch.complex128).abs(),
    ],
)
def test_complex128_is_refused_whatever_the_op(program: Any) -> None:
    region = recorded(program)
    lower(region, True)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(TargetDevice, "xla", property(lambda self: jax.devices("cpu")[0]))
        m.setattr("fused_eager.compiling.compile.lowering_for", lambda platform: lowering_for("tpu"))
        with pytest.raises(NodeFailed, match="XLA has no complex128 on this platform"):
            lower(region, True, TargetDevice(Target.parse("v5e:1")))


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (lambda: torch.ones(2, 3, dtype=torch.int64) @ torch.ones(3, 4, dtype=torch.int64), "product of 64-bit"),
        (lambda: torch.ones(3, dtype=torch.int64).dot(torch.ones(3, dtype=torch.int64)), "product of 64-bit"),
        (lambda: torch.ones(3, dtype=torch.complex64) ** torch.ones(3, dtype=torch.complex64), "no complex128"),
        (lambda: torch.pow(2.0, torch.ones(3, dtype=torch.complex64)), "no complex128"),
        (lambda: torch.linspace(0, 7, 5, dtype=torch.int32), "takes no float64 apart"),
        (lambda: torch.fft.fft(torch.ones(4, dtype=torch.float64)).real, "no"),
    ],
)
def test_what_has_no_64_bit_form_is_refused(program: Any, why: str) -> None:
    region = recorded(program)
    lower(region, True)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(TargetDevice, "xla", property(lambda self: jax.devices("cpu")[0]))
        m.setattr("fused_eager.compiling.compile.lowering_for", lambda platform: lowering_for("tpu"))
        with pytest.raises(NodeFailed, match=why):
            lower(region, True, TargetDevice(Target.parse("v5e:1")))
