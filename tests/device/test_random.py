"""Random numbers of the device: one seed, one sequence, whatever the mode and wherever streams are cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fused_eager.fusion_rules import lower_random

from fused_eager.frontends.device.doors import set_options

from .compare import TPU

DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "uniform": lambda x: x.clone().uniform_(-1, 3),
    "normal": lambda x: x.clone().normal_(1, 2),
    "rand": lambda x: torch.rand(x.shape, device=x.device),
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(3, 9, x.shape, device=x.device),
    "randperm": lambda x: torch.randperm(x.numel(), device=x.device),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "exponential": lambda x: x.clone().exponential_(2),
    "dropout": lambda x: F.dropout(torch.ones_like(x), 0.25),
    "multinomial": lambda x: torch.multinomial(torch.ones(8, device=x.device), 4),
    "with replacement": lambda x: torch.multinomial(torch.ones(8, device=x.device), 20, replacement=True),
    "poisson": lambda x: torch.poisson(torch.full_like(x, 4.0)),
    "complex": lambda x: torch.randn(x.shape, dtype=torch.complex64, device=x.device),
    "half": lambda x: torch.rand(x.shape, dtype=torch.bfloat16, device=x.device),
}


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    mode = torch.tpu.get_eager_mode()
    yield
    torch.tpu.set_eager_mode(mode)
    set_options(rng="device")


@pytest.mark.parametrize("name", DRAWS)
def test_a_seed_gives_the_same_numbers_in_every_mode(name: str) -> None:
    found = []
    for mode in torch.tpu.EagerMode:
        torch.tpu.set_eager_mode(mode)
        torch.manual_seed(7)
        x = torch.zeros(6, 7, device=TPU)
        found.append([DRAWS[name](x).cpu() for _ in range(2)])
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], again, strict=True))
    assert not torch.equal(*found[0]), "two draws are two"


def test_the_numbers_are_spread_as_they_should_be() -> None:
    torch.manual_seed(0)
    n = 40_000
    u, g = torch.rand(n, device=TPU), torch.randn(n, device=TPU)
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean().item() - 0.5) < 0.01 and abs(u.var().item() - 1 / 12) < 0.005
    assert abs(g.mean().item()) < 0.03 and abs(g.std().item() - 1) < 0.03
    counts = torch.bincount(torch.randint(0, 10, (n,), device=TPU), minlength=10)
    assert (counts - n / 10).abs().max() < 300
    kept = F.dropout(torch.ones(n, device=TPU), 0.25)
    assert kept.unique().tolist() == pytest.approx([0, 4 / 3]) and abs(kept.mean().item() - 1) < 0.02
    drawn = torch.multinomial(torch.tensor([1.0, 3.0], device=TPU), n, replacement=True).float().mean().item()
    assert abs(drawn - 0.75) < 0.02
    assert sorted(torch.randperm(100, device=TPU).tolist()) == list(range(100))
    once = torch.multinomial(torch.ones(3, 9, device=TPU), 9)
    assert all(sorted(row) == list(range(9)) for row in once.tolist())


def test_the_state_is_kept_and_set_again() -> None:
    torch.tpu.manual_seed(3)
    torch.rand(2, device=TPU)
    state = torch.tpu.get_rng_state()
    first = torch.rand(5, device=TPU)
    torch.tpu.set_rng_state(state)
    assert torch.equal(first, torch.rand(5, device=TPU))
    with torch.random.fork_rng(devices=[0], device_type="tpu"):
        torch.rand(9, device=TPU)
    after = torch.rand(5, device=TPU)
    torch.tpu.set_rng_state(state)
    torch.rand(5, device=TPU)
    assert torch.equal(after, torch.rand(5, device=TPU))
    with pytest.raises(RuntimeError, match="16 bytes"):
        torch.tpu.set_rng_state(torch.zeros(3))


def test_a_checkpoint_draws_again_what_it_drew() -> None:
    x = torch.ones(50, device=TPU, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(lambda v: F.dropout(v, 0.5), x, use_reentrant=False)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, y.detach())


def test_the_programs_own_generator_is_the_hosts() -> None:
    here = torch.rand(4, generator=torch.Generator().manual_seed(5))
    there = torch.zeros(4, device=TPU).uniform_(generator=torch.Generator().manual_seed(5))
    assert torch.equal(here, there.cpu())


@pytest.mark.parametrize("name", ["uniform", "normal", "randint", "bernoulli", "dropout", "randperm"])
def test_a_device_can_draw_what_the_cpu_draws(name: str) -> None:
    set_options(rng="torch_cpu")
    torch.manual_seed(11)
    there = DRAWS[name](torch.zeros(6, 7, device=TPU)).cpu()
    torch.manual_seed(11)
    assert torch.equal(there, DRAWS[name](torch.zeros(6, 7)))


def test_the_state_of_a_device_that_draws_what_the_cpu_draws_is_the_cpus() -> None:
    set_options(rng="torch_cpu")
    torch.tpu.manual_seed(3)
    states = torch.tpu.get_rng_state(), torch.tpu.get_rng_state_all()
    first = torch.rand(5, device=TPU)
    torch.tpu.set_rng_state(states[0])
    assert torch.equal(first, torch.rand(5, device=TPU)) and torch.tpu.initial_seed() == 3
    torch.tpu.set_rng_state_all(states[1])
    assert torch.equal(first, torch.rand(5, device=TPU))
    torch.tpu.manual_seed(3)
    assert torch.equal(first, torch.rand(5, device=TPU))


RANGES = [(-(2**63), None), (-(2**62) - 5, 2**62 + 9), (-(2**63) + 3, 2**62), (0, None)]


@pytest.mark.parametrize(("low", "high"), RANGES)
def test_whole_numbers_of_ranges_that_63_bits_do_not_tell_apart(low: int, high: int | None) -> None:
    """Each quarter of the range gets its share, and nothing lies outside."""
    t = torch.empty(4000, dtype=torch.int64, device="tpu").random_(low, high).cpu()
    top = 2**63 - 1 if high is None else high - 1
    assert int(t.min()) >= low and int(t.max()) <= top
    shares = [float(((t.double() - low) / (top - low) < q).double().mean()) for q in (0.25, 0.5, 0.75)]
    span = top - low + 1
    modulo = (2**64 - span) % span / span  # so much of the range comes twice, as in ATen
    expected = [min(q, modulo) / (1 + modulo) + q / (1 + modulo) for q in (0.25, 0.5, 0.75)]
    assert shares == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize(
    "draw",
    [
        lambda d: torch.randint(6, (3,), device=d, dtype=torch.complex64),
        lambda d: torch.rand(3, device=d, dtype=torch.int32),
        lambda d: torch.rand(5, 0, device=d, dtype=torch.int32),
        lambda d: torch.zeros(3, dtype=torch.uint8, device=d).random_(0, 500),
        lambda d: torch.zeros(3, device=d).random_(5, 5),
        lambda d: torch.zeros(3, dtype=torch.complex64, device=d).exponential_(),
        lambda d: torch.zeros(3, device=d).exponential_(-1),
        lambda d: torch.zeros(3, dtype=torch.int32, device=d).log_normal_(),
        lambda d: torch.zeros(3, dtype=torch.int32, device=d).cauchy_(),
        lambda d: torch.zeros(3, device=d).normal_(0, -1),
        lambda d: torch.zeros(3, device=d).uniform_(2, 1),
        lambda d: torch.zeros(3, device=d).geometric_(1.5),
        lambda d: torch.zeros(3, device=d).bernoulli_(-0.5),
        lambda d: torch.empty_strided((2, 3), (1,), device=d),
    ],
)
def test_what_eager_does_not_draw_raises_eager_s_words(draw: Any) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)) as eager:
        draw("cpu")
    with pytest.raises(type(eager.value)) as ours:
        draw("tpu")
    assert str(ours.value) == str(eager.value)


def _refused(call: Callable[[], torch.Tensor]) -> str:
    with pytest.raises(RuntimeError) as caught:
        call().tolist()
    return str(caught.value).partition(" (raised by")[0]


_WEIGHTS = {
    "negative": torch.tensor([-1.0, 2.0]),
    "not a number": torch.tensor([1.0, float("nan")]),
    "infinite": torch.tensor([1.0, float("inf")]),
    "all zero": torch.zeros(2, 3),
    "whole numbers": torch.tensor([1, 2]),
    "three dimensions": torch.ones(1, 2, 2),
}
REFUSED: dict[str, Callable[[torch.device], torch.Tensor]] = {
    **{f"multinomial {k}": lambda d, w=w: torch.multinomial(w.to(d), 1) for k, w in _WEIGHTS.items()},
    **{
        f"several with replacement {k}": lambda d, w=w: torch.multinomial(w.to(d), 5, replacement=True)
        for k, w in _WEIGHTS.items()
    },
    "multinomial of none": lambda d: torch.multinomial(torch.ones(3, device=d), 0),
    "multinomial of too many": lambda d: torch.multinomial(torch.ones(3, device=d), 4),
    "more numbers than the dtype has": lambda d: torch.randperm(300, dtype=torch.uint8, device=d),
    "more numbers than the dtype tells apart": lambda d: torch.randperm(5000, dtype=torch.float16, device=d),
    "dropout of more than all": lambda d: torch.native_dropout(torch.ones(2, device=d), 1.5, True)[0],
    "bernoulli above 1": lambda d: torch.bernoulli(torch.tensor([0.5, 1.5], device=d)),
    "bernoulli below 0": lambda d: torch.bernoulli(torch.tensor([0.5, -0.5], device=d)),
    "bernoulli not a number": lambda d: torch.bernoulli(torch.tensor([float("nan")], device=d)),
    "bernoulli of whole numbers": lambda d: torch.bernoulli(torch.tensor([0, 1], device=d)),
    "bernoulli_ of a tensor": lambda d: torch.empty(2, device=d).bernoulli_(torch.tensor([0.5, 1.5], device=d)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_refuses_to_draw_from_is_refused(name: str) -> None:
    assert _refused(lambda: REFUSED[name](TPU)) == _refused(lambda: REFUSED[name](torch.device("cpu")))


@pytest.mark.parametrize("replacement", [True, False])
def test_what_weighs_nothing_is_never_drawn(replacement: bool) -> None:
    weights = torch.zeros(50_000)
    weights[::1000] = torch.rand(50) + 0.1
    p = weights.to(TPU)
    for n in (1, 40):
        drawn = torch.multinomial(p.expand(8, -1), n, replacement=replacement)
        assert (p[drawn] > 0).all(), "also where running sums are rounded and many random numbers are drawn"


def test_exponential_numbers_are_never_zero() -> None:
    for dtype in (torch.float32, torch.float64):
        q = torch.empty(2_000_000, dtype=dtype, device=TPU).exponential_(2)
        assert 0 < q.min().item() < 1e-5 and abs(q.mean().item() - 0.5) < 0.002 and torch.isfinite(q).all().item()


def test_a_sampling_loop_has_no_islands() -> None:
    set_options(islands="refuse")
    try:
        token = torch.zeros(2, 1, dtype=torch.int64, device=TPU)
        for _ in range(3):
            logits = torch.nn.functional.one_hot(token[:, 0], 9).float()
            token = torch.multinomial(logits.softmax(-1), 1)
        assert token.shape == (2, 1) and ((token >= 0) & (token < 9)).all().item()
    finally:
        set_options(islands="allow")


def test_a_draw_of_a_new_shape_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower_random, "_jax", None)  # with which the host draws the same: to see what comes out, say
    drawn = torch.randn(3, 17, device=TPU), torch.rand(3, 17, device=TPU), torch.randint(9, (3, 17), device=TPU)
    assert all(t.cpu().unique().numel() > 1 for t in drawn)


def test_dropout_leaves_strides_as_they_are() -> None:
    image = torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last)
    for x in (torch.ones(2, 3).t(), image, torch.ones(3).expand(2, 3)):
        got = torch.nn.functional.dropout(x.to("tpu"), 0.5)
        assert got.stride() == torch.empty_like(x).stride() and set(got.unique().tolist()) <= {0.0, 2.0}
