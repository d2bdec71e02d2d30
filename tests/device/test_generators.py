"""Generators and events that torch wants in C++: the compiled follower brings them, and the state is Python's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fused_eager import follower
from fused_eager.frontends.device.doors import set_options

from .compare import TPU

pytestmark = pytest.mark.skipif(not follower.is_open(), reason=follower.status())
LAST = torch.device("tpu", torch.tpu.device_count() - 1)  # type: ignore[attr-defined]


def seeded(device: Any = TPU) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(7)


DRAWS: dict[str, Callable[[Any, torch.Generator], torch.Tensor]] = {
    "rand": lambda d, g: torch.rand(5, generator=g, device=d),
    "randn": lambda d, g: torch.randn(5, generator=g, device=d),
    "randint": lambda d, g: torch.randint(0, 90, (5,), generator=g, device=d),
    "randperm": lambda d, g: torch.randperm(9, generator=g, device=d),
    "bernoulli": lambda d, g: torch.bernoulli(torch.full((20,), 0.5, device=d), generator=g),
    "multinomial": lambda d, g: torch.multinomial(torch.ones(20, device=d), 5, generator=g),
    "poisson": lambda d, g: torch.poisson(torch.full((20,), 4.0, device=d), generator=g),
    "uniform_": lambda d, g: torch.empty(5, device=d).uniform_(1, 2, generator=g),
    "init": lambda d, g: torch.nn.init.kaiming_uniform_(torch.empty(3, 3, device=d), generator=g),
}


@pytest.mark.parametrize("device", [TPU, LAST], ids=["first", "last"])
@pytest.mark.parametrize("draw", DRAWS)
def test_equal_seeds_draw_equal_numbers_and_the_devices_own_are_left_alone(draw: str, device: torch.device) -> None:
    before = torch.tpu.get_rng_state(device)  # type: ignore[attr-defined]
    one, other = seeded(device), seeded(device)
    first = DRAWS[draw](device, one)
    assert first.device == device and torch.equal(first, DRAWS[draw](device, other))
    assert not torch.equal(first, DRAWS[draw](device, one))  # it goes on
    assert torch.equal(torch.tpu.get_rng_state(device), before)  # type: ignore[attr-defined]


def test_what_it_draws_is_what_the_device_draws_with_that_seed() -> None:
    torch.manual_seed(7)
    assert torch.equal(torch.randn(4, device=TPU), torch.randn(4, device=TPU, generator=seeded()))


def test_its_state_is_taken_put_back_and_copied() -> None:
    g = seeded()
    assert g.device == TPU and g.initial_seed() == 7 and torch.Generator(device="tpu").initial_seed() == 67280421310721
    torch.rand(3, device=TPU, generator=g)
    state = g.get_state()
    others = [copy.deepcopy(g), pickle.loads(pickle.dumps(g))]
    want = torch.rand(3, device=TPU, generator=g)
    g.set_state(state)
    for again in (g, *others):
        assert torch.equal(torch.rand(3, device=TPU, generator=again), want)
    with pytest.raises(RuntimeError, match="CPU tensor of 16 bytes"):
        g.set_state(torch.zeros(3, dtype=torch.uint8))
    assert g.seed() == g.initial_seed() != 7


def test_one_of_another_device_is_refused() -> None:
    for draw in DRAWS.values():
        with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'tpu'"):
            draw("cpu", seeded())
        if LAST != TPU:
            with pytest.raises(RuntimeError, match="Expected a 'tpu:0' generator device but found"):
                draw(TPU, seeded(LAST))


@pytest.mark.parametrize("draw", DRAWS)
def test_it_may_draw_the_cpus_numbers(draw: str) -> None:
    set_options(rng="torch_cpu")
    try:
        there, here = seeded(), torch.Generator().manual_seed(7)
        for _ in range(2):
            torch.testing.assert_close(DRAWS[draw](TPU, there).cpu(), DRAWS[draw]("cpu", here))
        state, copied = there.get_state(), copy.deepcopy(there)
        want = DRAWS[draw](TPU, there)
        there.set_state(state)
        assert torch.equal(DRAWS[draw](TPU, there), want) and torch.equal(DRAWS[draw](TPU, copied), want)
    finally:
        set_options(rng="device")


def test_torchs_own_events() -> None:
    x = torch.rand(300, 300, device=TPU)
    first, last = (torch.Event("tpu", enable_timing=True) for _ in range(2))
    assert torch.Event("tpu").query()  # nobody has recorded it
    first.record()
    y = x @ x
    last.record()
    last.synchronize()
    assert first.query() and last.query() and first.elapsed_time(last) >= 0
    untimed = torch.Event("tpu")
    untimed.record()
    y.add_(1)
    untimed.wait()
    untimed.synchronize()
    assert untimed.query() and torch.equal(y, x @ x + 1)


def test_a_generator_of_a_device_that_is_not_there() -> None:
    with pytest.raises(RuntimeError, match="there is no device 99"):
        torch.Generator(device="tpu:99")


def test_each_device_has_its_own_where_none_is_named() -> None:
    found = torch.tpu.default_generators  # type: ignore[attr-defined]
    assert [g.device for g in found] == [torch.device("tpu", i) for i in range(len(found))]
    torch.manual_seed(7)
    want = [torch.rand(3, device=LAST), torch.rand(3, device=LAST)]
    found[-1].manual_seed(7)
    got = [torch.rand(3, device=LAST), torch.rand(3, device=LAST, generator=found[-1])]
    assert all(map(torch.equal, want, got)) and found[-1].get_offset() == 2
