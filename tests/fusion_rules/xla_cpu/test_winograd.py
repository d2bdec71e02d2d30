"""3x3 convolutions in fewer products: the parts they are worked on in, their rounding, and what is not finite."""

from __future__ import annotations

import math
import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from fused_eager.fusion_rules.convolution import Native, Window
from fused_eager.fusion_rules.lower_conv import window
from fused_eager.fusion_rules.xla_cpu import conv_choice, turning, winograd
from fused_eager.fusion_rules.xla_cpu.winograd import Steps, Winograd
from torch import nn

from fused_eager import fused_eager
from fused_eager.xla import enable_x64

A = torch.ops.aten


def three(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, padding: tuple[int, int]) -> tuple[Any, Any]:
    """A convolution and both its gradients, Winograd's and ATen's."""
    rest = ([1, 1], padding, [1, 1], False, [0, 0], 1)
    y = A.convolution(x, w, None, *rest)
    dx, dw, _ = A.convolution_backward(dy, x, w, None, *rest, [True, True, False])
    win = window(x.shape[2:], y.shape[2:], (3, 3), (1, 1), padding, (1, 1), 1)
    with enable_x64(True):
        found = compiled(win, winograd.STEP_BYTES)(x.numpy(), w.numpy(), dy.numpy())
        return [np.asarray(t) for t in found], [y.numpy(), dx.numpy(), dw.numpy()]


@cache
def compiled(win: Window, step_bytes: int) -> Any:
    """All three, of images, weights and gradients: they take a second to compile."""
    form = Winograd()

    @jax.jit
    def run(x: Any, w: Any, dy: Any) -> Any:
        return form.forward(win, x, w), form.input_grad(win, dy, w), form.weight_grad(win, x, dy)

    return run


def operands(n: int, channels: tuple[int, int], size: tuple[int, int], padding: tuple[int, int], dtype: Any) -> Any:
    out = [s + 2 * p - 2 for s, p in zip(size, padding, strict=True)]
    a, b = channels
    return tuple(torch.randn(shape, dtype=dtype) for shape in ((n, a, *size), (b, a, 3, 3), (n, b, *out)))


@pytest.mark.parametrize(("n", "size", "padding", "step_bytes"), [
    (6, (8, 8), (1, 1), 40_000), (5, (7, 10), (0, 0), 8 << 20), (5, (7, 10), (2, 0), 1), (6, (8, 7), (1, 3), 20_000),
    (1, (12, 5), (1, 1), 8 << 20), (1, (12, 5), (0, 2), 1), (3, (3, 3), (0, 0), 8 << 20), (3, (3, 4), (3, 4), 1),
], ids=str)  # fmt: skip
@pytest.mark.thinned(4)
def test_in_parts(
    n: int, size: tuple[int, int], padding: tuple[int, int], step_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images at a time, or rows of one, with tiles that reach beyond what there is."""
    monkeypatch.setattr(winograd, "STEP_BYTES", step_bytes)
    found, expected = three(*operands(n, (4, 18), size, padding, torch.float64), padding)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


def test_steps() -> None:
    """All that fits, and at least as many as are asked for; rows of one image where not even one fits."""
    row = 16 * 4 * 100  # bytes of one row of 4 tiles with 100 bytes a pixel
    for rows, least, k, r in ((24, 1, 6, 4), (24, 2, 3, 4), (20, 1, 3, 4), (4, 1, 1, 4), (3, 1, 1, 2), (1, 1, 1, 1),
                              (0, 1, 1, 1)):  # fmt: skip
        steps = Steps.of(6, (8, 8), 100, rows * row, least)
        assert (steps.k, steps.r) == (k, r), rows
        assert 6 * 4 % (steps.k * steps.r) == 0


@pytest.mark.parametrize("channels", [(64, 64), (48, 160)], ids=str)
def test_rounding_is_that_of_a_sum(channels: tuple[int, int]) -> None:
    """Errors are about as large as ATen's."""
    args = operands(4, channels, (16, 16), (1, 1), torch.float32)
    found, expected = three(*args, (1, 1))
    _, exact = three(*(t.double() for t in args), (1, 1))
    for a, b, c in zip(found, expected, exact, strict=True):
        ours, theirs = (float(np.sqrt(((t - c) ** 2).mean())) for t in (a, b))
        assert a.dtype == np.float32
        assert 0 < ours < max(3 * theirs, 1e-6 * float(c.std()))


@pytest.mark.parametrize("value", [-math.inf, math.nan])
@pytest.mark.parametrize("where", ["input", "gradient"])
def test_what_is_not_finite_stays_in_its_windows(where: str, value: float) -> None:
    x, w, dy = operands(2, (5, 18), (9, 8), (1, 1), torch.float32)
    (x if where == "input" else dy)[1, 3, 1, 2] = value
    found, expected = three(x, w, dy, (1, 1))
    assert sum(not np.isfinite(b).all() for b in expected) == 2
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_weights_that_are_not_finite_are_left_to_xla() -> None:
    """Which multiplies the zeros around an image by them, and ATen does not."""
    x, w, dy = operands(2, (5, 18), (9, 8), (1, 1), torch.float32)
    w[1, 3, 1, 2] = math.inf
    win = window(x.shape[2:], dy.shape[2:], (3, 3), (1, 1), (1, 1), (1, 1), 1)
    x, w, dy = (jnp.asarray(t.numpy()) for t in (x, w, dy))
    for product, a, b in (("forward", x, w), ("input_grad", dy, w)):
        found, expected = (jax.jit(partial(getattr(form, product), win))(a, b) for form in (Winograd(), Native(True)))
        assert not jnp.isfinite(expected).all() and jnp.isfinite(expected).any()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_sums_that_overflow_only_on_the_way() -> None:
    x, w, dy = operands(2, (5, 18), (8, 8), (1, 1), torch.float32)
    x, dy, w = x.sign() * 2.5e38, dy.sign() * 2.5e38, w * 1e-4
    found, expected = three(x, w, dy, (1, 1))
    assert np.isfinite(expected[0]).all() and np.isfinite(expected[1]).all()
    for a, b in zip(found[:2], expected[:2], strict=True):
        np.testing.assert_allclose(a / 1e38, b / 1e38, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("transposed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_net_of_them_trains_as_eager_does(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the rows that choose them, whichever way images lie."""
    monkeypatch.setattr(conv_choice, "threads", lambda: 1)
    used: list[str] = []

    class Watched(Winograd):
        def __getattribute__(self, name: str) -> Any:
            used.append(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(conv_choice, "Winograd", Watched)
    make = nn.ConvTranspose2d if transposed else nn.Conv2d

    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = [make(40, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(), make(48, 56, 3, bias=False), nn.ReLU()]
        net, x = nn.Sequential(*layers, nn.MaxPool2d(2)), torch.randn(4, 40, 14, 15, requires_grad=True)
        net(x).square().mean().backward()
        with torch.no_grad():
            y = net.eval()(x)
        return [y, x.grad, *[p.grad for p in net.parameters()], *net.buffers()]

    expected = run()
    with fused_eager(mode="fused"):
        found = run()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    assert {"forward", "input_grad", "weight_grad"} <= set(used)


def test_nothing_is_turned_between_two() -> None:
    """What is computed of one convolution for the next is computed by pixels, once."""
    x, w = jnp.ones((4, 32, 12, 12)), jnp.ones((32, 32, 3, 3))
    win = window((12, 12), (12, 12), (3, 3), (1, 1), (1, 1), (1, 1), 1)

    def program(x: Any, w: Any) -> Any:
        y = Winograd().forward(win, turning.by_pixels(x), w)
        return Winograd().forward(win, jnp.maximum(y * 2 + 1, 0), w)

    text = jax.jit(program).lower(x, w).compile().as_text()
    between = [line for line in text.splitlines() if re.search(r"= f32\S* maximum\(", line)]
    by_pixels = r"f32\[4,32,12,12\]\{1,3,2,0\}|f32\[4,12,12,32\]\{3,2,1,0\}"
    assert len(between) == 1 and re.search(by_pixels, between[0]), between


def test_weights_do_not_wait_from_the_beginning_on() -> None:
    """A net of eight layers takes no more memory at once than one of two, whose weights would be fewer."""
    win = window((8, 8), (8, 8), (3, 3), (1, 1), (1, 1), (1, 1), 1)

    def net(x: jax.Array, *weights: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.maximum(Winograd().forward(win, x, w), 0)
        return x

    x, w = np.ones((16, 64, 8, 8), np.float32), np.ones((64, 64, 3, 3), np.float32)
    two, eight = (
        jax.jit(net).lower(x, *[w] * layers).compile().memory_analysis().temp_size_in_bytes for layers in (2, 8)
    )
    assert eight < two + w.nbytes
