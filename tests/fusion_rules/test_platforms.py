"""The platform column: who is asked first, what is refused, and that what is for any platform is right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import pytest
import torch
from fused_eager.fusion_rules import RULES, families, platforms
from fused_eager.fusion_rules.platforms import VARIANTS, Variants, current, lowering_for, variants
from fused_eager.fusion_rules.rule import OpClass, rule

from fused_eager import fused_eager
from fused_eager.lowering.rewrites import LAYOUTS, REWRITE, Nowhere
from fused_eager.lowering.xla_tpu.readers import Readers

from .errors import assert_same
from .harness import sweep

A = torch.ops.aten


@pytest.fixture
def own() -> Iterator[str]:
    """A name for a row or variants of the test's own."""
    yield "aten.of_this_test.default"
    RULES.pop("aten.of_this_test.default", None)
    for name in [n for n in VARIANTS if "of this test" in n or "test_platforms" in n]:
        del VARIANTS[name]


def test_a_platform_s_own_comes_before_the_one_for_any(own: str) -> None:
    size = Variants("a size of this test", any=1, cpu=2, tpu=3)
    assert current() == "cpu" and size.here == 2
    for platform, found in {"tpu": 3, "cuda": 1, "rocm": 1, "somebody's": 1, "any": 1, "cpu": 2}.items():
        with lowering_for(platform):
            assert size.here == found
    assert size.here == 2

    @variants
    def doubled(x: int) -> int:
        return 2 * x

    @doubled.on("gpu", "tpu")
    def tripled(x: int) -> int:
        return 3 * x

    assert doubled(5) == 10
    with lowering_for("cuda"):
        assert doubled(5) == 15


def test_what_is_entered_twice_or_for_no_platform_is_refused(own: str) -> None:
    size = Variants("a size of this test", any=1, cpu=2)
    with pytest.raises(ValueError, match="two lists of variants"):
        Variants("a size of this test", any=1)
    with pytest.raises(ValueError, match="no platform 'npu', only cpu, gpu, tpu"):
        size.on("npu")(3)
    with pytest.raises(ValueError, match="two variants for cpu"):
        size.on("cpu")(3)


def test_a_row_has_one_lowering_for_each_platform(own: str) -> None:
    name = own.removeprefix("aten.")
    with pytest.raises(ValueError, match="none for any platform"):
        rule(name, OpClass.POINTWISE, platform="tpu")(lambda cx: "tpu")
    rule(name, OpClass.POINTWISE)(lambda cx: "any")
    rule(name, OpClass.POINTWISE, platform="tpu")(lambda cx: "tpu")
    assert RULES[own].here(None) == "any"
    with lowering_for("tpu"):
        assert RULES[own].here(None) == "tpu"
    with pytest.raises(ValueError, match="two lowerings for tpu"):
        rule(name, OpClass.POINTWISE, platform="tpu")(lambda cx: "tpu")
    with pytest.raises(ValueError, match="two lowerings for any"):
        rule(name, OpClass.POINTWISE)(lambda cx: "any")
    with pytest.raises(ValueError, match="no platform 'npu'"):
        rule(name, OpClass.POINTWISE, platform="npu")(lambda cx: "npu")
    with pytest.raises(ValueError, match="differs in more than its lowering"):
        rule(name, OpClass.REDUCTION, platform="gpu")(lambda cx: "gpu")


def test_what_is_the_cpu_s_alone_is_off_elsewhere() -> None:
    assert REWRITE.here is not None and LAYOUTS.here is not Nowhere
    with lowering_for("gpu"):
        assert REWRITE.here is None and LAYOUTS.here is Nowhere
    with lowering_for("tpu"):
        assert REWRITE.here is None and LAYOUTS.here is Readers


# What has variants, and a few ops that lean on shared forms that have.
GENERIC = (
    *("nn.functional.conv2d", "nn.functional.conv_transpose2d", "cumsum", "cummax", "logcumsumexp", "sort", "topk"),
    *("median", "var", "argmax", "softmax", "log_softmax", "nn.functional.layer_norm", "nn.functional.batch_norm"),
    *("nn.functional.scaled_dot_product_attention", "cat", "addmm", "sin", "atan2", "rsqrt"),
)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", GENERIC)
def test_what_is_for_any_platform_agrees_with_eager(name: str) -> None:
    """Lowered as for a platform that nobody has written a variant for, and run on the CPU, whose plain sums of float32
    are not to be the matter here."""
    with lowering_for(platforms.ANY):
        mode = sweep([name], [torch.float64], limit=2)
    assert mode.checked and not mode.problems


def test_gradients_for_any_platform_agree_with_eager() -> None:
    x, w = torch.randn(3, 4, 9, 8), torch.randn(6, 2, 3, 3)
    dy = A.convolution(x, w, None, [2, 1], [1, 1], [1, 1], False, [0, 0], 2)
    with lowering_for(platforms.ANY):
        for mask in ([True, True, True], [False, True, False]):
            assert_same(A.convolution_backward.default, dy, x, w, [6], [2, 1], [1, 1], [1, 1], False, [0, 0], 2, mask)
        assert_same(A.conv_tbc.default, torch.randn(9, 2, 3), torch.randn(3, 3, 5), torch.randn(5), 1)
        half = torch.randn(2, 4, 6, 6).bfloat16()
        assert_same(A.convolution.default, half, torch.randn(4, 4, 3, 3).bfloat16(), torch.randn(4).bfloat16(),
                    [1, 1], [1, 1], [1, 1], False, [0, 0], 1)  # fmt: skip
        big = torch.randn(64, 300)
        assert_same(A.sort.stable, big, stable=True, dim=1, descending=True)


def test_a_region_is_lowered_for_the_platform_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: the device says which platform, and the rows of that region hear of it."""
    seen: list[str] = []
    sine = VARIANTS["trigonometry.sin"]

    def told(x: Any) -> Any:
        seen.append(current())
        return jax.numpy.sin(x)

    monkeypatch.setattr(sine, "own", {"cpu": told})
    with fused_eager(mode="strict", cache="off", compile="wait"):
        torch.testing.assert_close(torch.ones(7, 13).sin() + 0, torch.full((7, 13), 1.0).sin())
    assert seen == ["cpu"]


def test_what_torch_has_no_kernel_of_for_the_cpu_is_defined_by_its_row() -> None:
    """Else its rehearsal, which ATen runs on the CPU, would fail on every device."""
    families.load()
    has = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    known = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    lacking = []
    for name, row in RULES.items():
        packet, _, overload = name.removeprefix("aten.").rpartition(".")
        called = f"aten::{packet}" + (f".{overload}" if overload != "default" else "")
        if name.startswith("aten.") and called in known and not has(called, "CPU") and not row.defines:
            lacking.append(name)
    assert not lacking
    assert RULES["aten.mm.dtype"].defines
