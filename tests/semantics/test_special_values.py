"""Special values in programs: NaN is not hidden by what is fused, subnormals are flushed, and only in regions."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from fused_eager import IslandRefused, current_mode, fused_eager
from fused_eager.log.events import LOG

NAN, INF = math.nan, math.inf
x = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0, -2.0, 3e38] * 16)


def masked_by_a_product() -> torch.Tensor:
    return x * (x > 5) * (x < 7).float() + (x == 0) * x


def gradient_through_a_mask() -> torch.Tensor:
    y = torch.zeros_like(x).requires_grad_()
    (y.nan_to_num() * x).sum().backward()
    z = x.clone().requires_grad_()
    (z.nan_to_num() * x.flip(0)).sum().backward()
    assert y.grad is not None and z.grad is not None
    return torch.cat([y.grad, z.grad])


def zero_by_a_number() -> torch.Tensor:
    return x * 0.0 + (x - x)


def dropped() -> torch.Tensor:
    y = x.clone().requires_grad_()
    torch.manual_seed(3)
    torch.nn.functional.dropout(y, 0.5).backward(x.flip(0))
    assert y.grad is not None
    return y.grad


@pytest.mark.parametrize("mode", ["strict", "debug", "fused"])
@pytest.mark.parametrize("program", [masked_by_a_product, gradient_through_a_mask, zero_by_a_number, dropped])
def test_nan_is_not_hidden(program: Callable[[], torch.Tensor], mode: str) -> None:
    want = program()
    with fused_eager(mode=mode, compile="wait", native="never", progress=False):
        got = program()
    assert torch.equal(want.isnan(), got.isnan())
    assert torch.equal(want.nan_to_num(), got.nan_to_num())


def no_loss_at_all() -> torch.Tensor:
    f, target = torch.nn.functional, torch.tensor([0, 1])
    sure = torch.tensor([[0.0, -INF], [-INF, 0.0]])
    losses = [
        f.nll_loss(sure[:n].clone(), target[:n], weight, reduction=reduction)
        for n in (1, 2)
        for weight in (None, torch.ones(2))
        for reduction in ("mean", "sum")
    ]
    one = f.nll_loss(sure[0], target[0], reduction="none")
    return torch.stack([*losses, one, f.cross_entropy(sure, target), *f.nll_loss(sure, target, reduction="none")])


@pytest.mark.parametrize("mode", ["strict", "fused"])
def test_no_loss_at_all_is_eagers_zero(mode: str) -> None:
    want = no_loss_at_all()
    with fused_eager(mode=mode, compile="wait", native="never", progress=False):
        got = no_loss_at_all()
    assert not got.any() and got.signbit().equal(want.signbit())


def gradients_of_an_infinite_weight(norm: str) -> torch.Tensor:
    y = torch.arange(12.0).reshape(2, 6).sin().requires_grad_()
    weight = torch.tensor([1.0, 2.0, INF, -1.0, 0.5, 3.0])
    if norm == "layer":
        torch.nn.functional.layer_norm(y, (6,), weight).sum().backward()
    else:
        torch.nn.functional.group_norm(y.unsqueeze(-1) * torch.ones(4), 1, weight).sum().backward()
    assert y.grad is not None
    return y.grad


@pytest.mark.parametrize("mode", ["strict", "fused"])
@pytest.mark.parametrize("norm", ["layer", "group"])
def test_an_infinite_weight_makes_no_infinity_of_nan(norm: str, mode: str) -> None:
    want = gradients_of_an_infinite_weight(norm)
    with fused_eager(mode=mode, compile="wait", native="never", progress=False):
        got = gradients_of_an_infinite_weight(norm)
    assert want.isnan().any() and got[want.isnan()].isnan().all()


def gradient_of_a_product(dim: int | None, values: list[float], incoming: float) -> torch.Tensor:
    y = torch.tensor([values, [2.0, 3.0, 4.0, 5.0]], requires_grad=True)
    z = (y * 1).prod() if dim is None else (y * 1).prod(dim)
    (z * 2).backward(torch.full_like(z, incoming))
    assert y.grad is not None
    return y.grad


@pytest.mark.parametrize(
    "options", [{}, {"compile": "wait", "native": "never"}, {"mode": "strict"}, {"mode": "debug"}], ids=str
)
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_the_gradient_of_a_product_is_eagers(dim: int | None, options: dict[str, object]) -> None:
    """Below any dispatch mode autograd multiplies the others; in eager it divides by each: inf / inf is NaN."""
    rows = [
        [1.0, INF, 2.0, 3.0],
        [0.0, NAN, 1.0, 2.0],
        [0.0, 1.0, INF, 2.0],
        [0.0, 0.0, 1.0, 2.0],
        [1.0, 2.0, 3.0, 4.0],
    ]
    for row in rows:
        for incoming in (1.0, NAN):
            want = gradient_of_a_product(dim, row, incoming)
            with fused_eager(progress=False, **options):
                got = [gradient_of_a_product(dim, row, incoming) for _ in range(2)]
            for g in got:
                torch.testing.assert_close(g, want, rtol=0, atol=0, equal_nan=True)


small, large = torch.full((64,), 1e-20), torch.full((64,), 1e30)


@pytest.mark.parametrize(
    "program",
    [
        lambda: small * 1e5 / small / small,  # 1e25, but small * small is 0
        lambda: small / (small / large),
        lambda: (large * large).sqrt(),
        lambda: (small * 1e22).exp() * (small * -5e21).exp(),
    ],
    ids=["quotients", "quotient of a quotient", "root of a square", "exponentials"],
)
def test_what_is_too_large_on_the_way_stays_infinite(program: Callable[[], torch.Tensor]) -> None:
    want = program()
    with fused_eager(compile="wait", native="never", progress=False):
        got = program()
    torch.testing.assert_close(got, want, equal_nan=True)


def _flushes(product: float) -> bool:
    return product == 0.0


@pytest.mark.parametrize("mode", ["strict", "fused"])
def test_subnormals_are_flushed_in_regions_alone(mode: str) -> None:
    """A region flushes them where a thread of XLA's computes it; the program's own thread never does."""
    tiny = torch.full((64,), 1e-39)
    small = np.full(64, 1e-39, np.float32)
    with fused_eager(mode=mode, compile="wait", native="never", progress=False):
        inside = (tiny * 0.5).tolist()[0]
        assert not _flushes(float((small * np.float32(0.5))[0]))  # the thread's own flags are left alone
    assert _flushes(inside) or inside == (tiny * 0.5).tolist()[0]
    assert not _flushes(float((small * np.float32(0.5))[0])) and not _flushes(float((tiny * 0.5)[0]))


def test_flushing_that_was_asked_for_lasts() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        tiny = torch.full((64,), 1.5e-38)
        with fused_eager(compile="wait", native="never", progress=False):
            assert _flushes((tiny * 0.5).tolist()[0])
        assert _flushes(float((tiny * 0.5)[0]))
    finally:
        torch.set_flush_denormal(False)


def _halves(tiny: torch.Tensor) -> list[bool]:
    """Whether some ways to come to a subnormal number keep it; in XLA's threads, if a region computes them."""
    rows = tiny.repeat(4096).reshape(64, -1)
    return [float(y.flatten()[-1]) != 0 for y in (rows * 0.5, rows.half().float() + rows / 2, (rows + 0).sub(0.0) / 2)]


@pytest.mark.parametrize("options", [{"mode": "strict"}, {"mode": "debug"}, {"native": "never"}, {}], ids=str)
def test_subnormals_are_kept_where_they_are_asked_for(options: dict[str, str]) -> None:
    """In the context's thread, from the call on to the one that takes it back, or to the context's end."""
    tiny = torch.full((64,), 1.5e-38)
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot")
    try:
        with fused_eager(compile="wait", progress=False, **options):
            pending = tiny + 0
            assert torch.set_flush_denormal(False)
            assert all(_halves(pending)) and current_mode() == "off"
            with fused_eager(mode="strict"):
                assert all(_halves(tiny))
            seen: list[bool] = []
            thread = threading.Thread(target=lambda: seen.extend(_halves(tiny)))
            thread.start()
            thread.join()
            assert all(seen) and seen
            assert torch.set_flush_denormal(True) and current_mode() != "off"
            assert not any(_halves(pending))
            assert torch.set_flush_denormal(False)
            assert all(_halves(tiny))
        with fused_eager(compile="wait", progress=False, **options):
            assert current_mode() != "off"
        assert all(_halves(tiny))
    finally:
        torch.set_flush_denormal(False)


def test_asking_for_subnormals_is_told_and_may_be_refused() -> None:
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot")
    LOG.clear()
    with fused_eager(progress=False):
        torch.set_flush_denormal(False)
        torch.set_flush_denormal(False)
    (told,) = LOG.of("island")
    assert "subnormal" in told.data["reason"] and __file__ in told.data["site"]
    with fused_eager(islands="refuse"), pytest.raises(IslandRefused, match="subnormal"):
        torch.set_flush_denormal(False)
    with fused_eager(), pytest.raises(RuntimeError, match="expects a bool"):
        torch.set_flush_denormal(0)  # type: ignore[arg-type]
