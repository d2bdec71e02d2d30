"""Every form of convolution against ATen, and the rows that choose between them."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest
import torch
from fused_eager.fusion_rules.convolution import Native
from fused_eager.fusion_rules.lower import lower
from fused_eager.fusion_rules.lower_conv import window
from fused_eager.fusion_rules.lowering import NoLowering
from fused_eager.fusion_rules.spec import spec_of
from fused_eager.fusion_rules.xla_cpu import conv_choice
from fused_eager.fusion_rules.xla_cpu.conv_choice import choose
from fused_eager.fusion_rules.xla_cpu.conv_forms import Depthwise, Patches, Pointwise, Split
from fused_eager.fusion_rules.xla_cpu.winograd import Winograd

from fused_eager.xla import enable_x64

from .errors import assert_same, lowered
from .harness import sweep, to_jax, to_torch

A = torch.ops.aten
CPU = torch.device("cpu")
# size, kernel, stride, padding, dilation, channels in, channels out, groups
GEOMETRIES: dict[str, tuple[Any, ...]] = {
    "plain": ((6, 7), (3, 3), (1, 1), (1, 1), (1, 1), 4, 6, 1),
    "kernel beyond input": ((2, 2), (3, 3), (1, 1), (1, 1), (1, 1), 4, 6, 1),
    "strided, ragged": ((9, 8), (3, 2), (2, 3), (1, 0), (1, 1), 4, 6, 1),
    "dilated": ((9, 9), (3, 3), (1, 2), (2, 2), (2, 3), 4, 6, 1),
    "wide padding": ((3, 4), (3, 3), (1, 1), (3, 4), (1, 1), 2, 2, 1),
    "groups": ((6, 6), (3, 3), (2, 1), (1, 1), (1, 1), 6, 4, 2),
    "depthwise": ((7, 6), (3, 3), (2, 2), (1, 1), (1, 1), 3, 6, 3),
    "one by one": ((12, 12), (1, 1), (2, 1), (0, 1), (1, 1), 4, 6, 1),
    "line": ((11,), (4,), (3,), (2,), (1,), 4, 6, 1),
    "long line": ((90,), (60,), (1,), (0,), (1,), 2, 3, 1),
    "volume": ((4, 5, 4), (2, 3, 2), (1, 2, 1), (1, 1, 0), (1, 1, 2), 2, 4, 1),
    "many taps": ((5, 6, 5), (4, 4, 4), (1, 1, 1), (1, 2, 1), (1, 1, 1), 2, 4, 2),
}
FORMS = {"native": Native(False), "explicit": Native(True), "split": Split(Native(True)), "patches": Patches(),
         "pointwise": Pointwise(), "depthwise": Depthwise(), "winograd": Winograd()}


def suits(form: str, kernel: Any, stride: Any, dilation: Any, channels: int, groups: int) -> bool:
    return {
        "winograd": kernel == (3, 3) and {*stride, *dilation, groups} == {1},
        "pointwise": set(kernel) == {1} and groups == 1,
        "depthwise": channels == groups,
        "split": groups > 1,
        "native": len(kernel) == 2,
    }.get(form, True)


PAIRS = [(g, f) for g, (_, k, s, _, d, c, _, n) in GEOMETRIES.items() for f in FORMS if suits(f, k, s, d, c, n)]


@pytest.mark.thinned(6)
@pytest.mark.parametrize(("geometry", "form"), PAIRS)
def test_forms(geometry: str, form: str) -> None:
    size, kernel, stride, padding, dilation, channels, out, groups = GEOMETRIES[geometry]
    x = torch.randn(2, channels, *size, dtype=torch.float64)
    w = torch.randn(out, channels // groups, *kernel, dtype=torch.float64)
    rest = (stride, padding, dilation, False, [0] * len(size), groups)
    y = A.convolution(x, w, None, *rest)
    dy = torch.randn_like(y)
    dx, dw, _ = A.convolution_backward(dy, x, w, None, *rest, [True, True, False])
    win = window(size, y.shape[2:], kernel, stride, padding, dilation, groups)
    run = FORMS[form]

    @jax.jit
    def all_three(x: Any, w: Any, dy: Any) -> Any:
        return run.forward(win, x, w), run.input_grad(win, dy, w), run.weight_grad(win, x, dy)

    with enable_x64(True):
        got = all_three(x.numpy(), w.numpy(), dy.numpy())
    for result, want in zip(got, (y, dx, dw), strict=True):
        np.testing.assert_allclose(np.asarray(result), want.numpy(), rtol=1e-9, atol=1e-9)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("geometry", "extra"), [
    ("plain", 0), ("kernel beyond input", 0), ("strided, ragged", 0), ("strided, ragged", 1), ("dilated", 1),
    ("groups", 1), ("depthwise", 1), ("one by one", 1), ("line", 1), ("volume", 0)])  # fmt: skip
def test_transposed_rows(geometry: str, extra: int) -> None:
    size, kernel, stride, padding, dilation, channels, out, groups = GEOMETRIES[geometry]
    x = torch.randn(2, out, *size, dtype=torch.float64)
    w = torch.randn(out, channels // groups, *kernel, dtype=torch.float64)
    output_padding = [extra if max(s, d) > 1 else 0 for s, d in zip(stride, dilation, strict=True)]
    rest = (stride, padding, dilation, True, output_padding, groups)
    bias = torch.randn(channels, dtype=torch.float64)
    assert_same(A.convolution.default, x, w, bias, *rest)
    dy = torch.randn_like(A.convolution(x, w, bias, *rest))
    like = list(A.convolution_backward(dy, x, w, [channels], *rest, [True, True, True]))
    got = lowered(A.convolution_backward.default, like, dy, x, w, [channels], *rest, [True, True, True])
    for a, b in zip(got, like, strict=True):
        torch.testing.assert_close(a, b, check_stride=False)


@pytest.mark.parametrize("mask", [[True, False, False], [False, True, True], [False, False, True]])
def test_only_the_gradients_asked_for(mask: list[bool]) -> None:
    x, w = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    dy = torch.randn(2, 4, 5, 5)
    want = [t for t, m in zip(A.convolution_backward(dy, x, w, [4], *rest, mask), mask, strict=True) if m]
    got = lowered(A.convolution_backward.default, want, dy, x, w, [4], *rest, mask)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, check_stride=False)


def test_empty_batch() -> None:
    x, w = torch.randn(0, 3, 5, 5), torch.randn(4, 3, 3, 3)
    assert_same(A.convolution.default, x, w, torch.randn(4), [1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def test_integers_and_complex() -> None:
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    x, w = torch.randint(-9, 9, (2, 3, 5, 5)), torch.randint(-9, 9, (4, 3, 3, 3))
    assert_same(A.convolution.default, x, w, None, *rest)
    z, v = torch.randn(2, 3, 5, 5, dtype=torch.complex128), torch.randn(4, 3, 3, 3, dtype=torch.complex128)
    with pytest.raises(NoLowering):
        lowered(A.convolution_backward.default, [z, v], z, z, v, None, *rest, [True, True, False])
    parts = [torch.nn.functional.conv2d(a, b, None, 1, 1) for a, b in (
        (z.real, v.real), (z.imag, v.imag), (z.real, v.imag), (z.imag, v.real))]  # fmt: skip
    want = torch.complex(parts[0] - parts[1], parts[2] + parts[3])
    torch.testing.assert_close(lowered(A.convolution.default, want, z, v, None, *rest)[0], want)


def test_half_types_accumulate_in_float32() -> None:
    x, w = torch.ones(1, 600, 4, 4).bfloat16(), torch.ones(1, 600, 3, 3).bfloat16()
    rest = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    for dtype in (torch.bfloat16, torch.float16):
        args = (x.to(dtype), w.to(dtype), None, *rest)
        assert_same(A.convolution.default, *args)


@pytest.mark.parametrize(("shape", "weight", "product", "form"), [
    ((16, 512, 2, 2), (512, 512, 3, 3), "forward", Patches),
    ((16, 512, 2, 2), (512, 512, 3, 3), "input_grad", Patches),
    ((16, 64, 16, 16), (64, 64, 3, 3), "forward", Winograd),
    ((16, 64, 16, 16), (32, 64, 3, 3), "input_grad", Winograd),
    ((16, 64, 16, 16), (16, 64, 3, 3), "weight_grad", Native),
    ((3, 64, 13, 13), (64, 64, 3, 3), "weight_grad", Winograd),
    ((3, 64, 12, 12), (64, 64, 3, 3), "weight_grad", Native),
    ((16, 64, 16, 16), (64, 64, 5, 5), "forward", Native),
    ((8, 256, 28, 28), (64, 256, 1, 1), "forward", Pointwise),
    ((8, 64, 14, 14), (64, 1, 3, 3), "weight_grad", Depthwise),
    ((8, 64, 14, 14), (64, 16, 3, 3), "forward", Patches),
    ((256, 64, 56, 56), (64, 16, 3, 3), "forward", Split),
])  # fmt: skip
def test_choice(shape: Any, weight: Any, product: str, form: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Geometries whose best form was measured: a change here wants a measurement."""
    monkeypatch.setattr(conv_choice, "threads", lambda: 1)
    padding = (weight[2] // 2,) * 2
    win = window(shape[2:], shape[2:], weight[2:], (1, 1), padding, (1, 1), shape[1] // weight[1])
    channels = shape[1], weight[0]
    assert isinstance(choose(product, win, shape[0], channels, np.dtype(np.float32)), form)
    monkeypatch.setattr(conv_choice, "threads", lambda: 2)  # XLA shares out a convolution, no loop inside of another
    several = Native if form is Winograd else form
    assert isinstance(choose(product, win, shape[0], channels, np.dtype(np.float32)), several)


def test_conv_tbc() -> None:
    assert_same(A.conv_tbc.default, torch.randn(9, 2, 3).double(), torch.randn(3, 3, 5).double(),
                torch.randn(5).double(), 1)  # fmt: skip


@pytest.mark.parametrize("name", ["nn.functional.conv1d", "nn.functional.conv_transpose2d"])
def test_sweep(name: str) -> None:
    mode = sweep([name], [torch.float64], limit=2)
    assert mode.checked and not mode.problems


def gradients(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, transposed: bool = False) -> tuple[str, Any, Any]:
    """What XLA makes of both gradients of a 3x3 convolution for `y * y - 1`, their values, and ATen's."""
    rest = (None, [1, 1], [1, 1], [1, 1], transposed, [0, 0], 1, [True, True, False])
    expected = A.convolution_backward(y * y - 1, x, w, *rest)[:2]
    out = tuple(spec_of(t) for t in expected)

    def program(y: Any, x: Any, w: Any) -> Any:
        return lower(A.convolution_backward.default, [y * y - 1, x, w, *rest], {}, out)[0]

    compiled = jax.jit(program).lower(*map(to_jax, (y, x, w))).compile()
    return compiled.as_text(), compiled(*map(to_jax, (y, x, w))), expected


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [(7, 9), (12, 16)], ids=str)
@pytest.mark.parametrize("channels", [17, 48])
def test_a_gradient_is_computed_before_it_is_turned(channels: int, size: tuple[int, int], transposed: bool) -> None:
    """Not in the order that a convolution wants, once for each of its products."""
    y, x = torch.randn(3, channels, *size), torch.randn(3, 20, *size)
    w = torch.randn(20, channels, 3, 3) if transposed else torch.randn(channels, 20, 3, 3)
    text, found, expected = gradients(y, x, w, transposed)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(to_torch(a, b), b, rtol=1e-4, atol=1e-3)
    loops = [loop for loop in text.split("\n\n") if re.search(r"= f32\S* multiply\(", loop)]
    assert loops and not any(" transpose(" in loop for loop in loops)


def test_a_gradient_of_few_channels_or_pixels_is_left_as_it_is() -> None:
    for shape in ((3, 8, 12, 16), (3, 48, 3, 5)):
        y = torch.randn(shape)
        text, found, expected = gradients(y, torch.randn(3, 8, *shape[2:]), torch.randn(shape[1], 8, 3, 3))
        assert " while(" not in text
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(to_torch(a, b), b, rtol=1e-4, atol=1e-3)
