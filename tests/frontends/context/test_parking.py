"""Contexts that are entered again and again: kept in between, and out of everybody's way."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fused_eager import current_mode, fused_eager, sync
from fused_eager.devices.buffer import sweep
from fused_eager.devices.host.buffers import TABLE
from fused_eager.frontends.context import bypass, guards, parking
from fused_eager.frontends.context.threads import current_door
from fused_eager.log.events import LOG
from fused_eager.quiet import stack

NAMES = ("numpy", "item", "tolist", "__repr__", "data_ptr")


@pytest.fixture(autouse=True)
def nothing_parked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    parking.clear()
    monkeypatch.setattr(parking, "AGAIN", 4)
    monkeypatch.setattr(parking, "GRACE", 1e6)  # the machine may be slow
    monkeypatch.setattr(parking.LOT, "came", type(parking.LOT.came)(parking.PLACES))
    yield
    parking.clear()
    assert not is_patched()


def is_patched() -> bool:
    patched = {type(vars(torch.Tensor).get(name)).__name__ for name in ("numpy", "tolist")}
    assert len(patched) == 1
    return patched == {"StandIn"}


def loop(times: int, body: Callable[[], Any] = lambda: None, **options: Any) -> list[Any]:
    """So many contexts, entered on one line."""
    made = []
    for _ in range(times):
        with fused_eager(**options):
            made.append((current_door(), body()))
    return made


def test_from_the_fourth_on_the_door_is_the_same() -> None:
    doors = [door for door, _ in loop(8)]
    assert len(set(map(id, doors[: parking.AGAIN]))) == parking.AGAIN
    assert len(set(map(id, doors[parking.AGAIN - 1 :]))) == 1
    assert current_mode() == "off" and current_door() is None and not stack()


def test_one_that_is_entered_now_and_then_is_taken_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "GRACE", -1.0)
    doors = [door for door, _ in loop(8)]
    assert len(set(map(id, doors))) == 8 and not is_patched()


def test_after_a_while_everything_is_taken_down(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: getattr(torch.Tensor, name) for name in NAMES}
    loop(parking.AGAIN)
    assert is_patched()
    monkeypatch.setattr(parking, "GRACE", 0.01)
    until = time.monotonic() + 20.0
    while is_patched() and time.monotonic() < until:
        time.sleep(0.01)
    assert {name: getattr(torch.Tensor, name) for name in NAMES} == before and not guards._users


def test_in_between_tensors_and_readers_are_as_ever() -> None:
    left = set(TABLE)  # by other tests
    def body() -> torch.Tensor:
        return torch.arange(6.0) * 2 + 1

    made = loop(parking.AGAIN + 2, body)
    assert is_patched(), "what follows is about the time in between"
    for _, x in made:
        assert x.tolist() == x.numpy().tolist() == [1, 3, 5, 7, 9, 11]
        x += 1
        assert float(x[0]) == 2.0 and "2." in repr(x)
    sweep(TABLE)
    assert set(TABLE) <= left and not stack()
    w = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([w], lr=1.0)
    (w * 3).sum().backward()
    optimizer.step()
    assert w.tolist() == [-2.0, -2.0]
    assert torch.quantile(torch.arange(5.0), torch.tensor(0.5)).item() == 2.0


def test_other_options_and_other_places_have_doors_of_their_own() -> None:
    doors = {id(door) for door, _ in loop(6)[-2:]}
    others = {id(door) for door, _ in loop(6, max_pending=77)[-2:]}
    assert len(doors) == len(others) == 1 and doors != others
    with fused_eager():
        assert id(current_door()) not in doors | others


def test_a_body_that_raises_and_a_context_inside() -> None:
    for i in range(8):
        try:
            with fused_eager():
                x = torch.ones(3) * i
                with fused_eager(mode="strict"):
                    assert current_mode() == "strict"
                    y = x + 1
                assert current_mode() == "fused"
                if i % 2:
                    raise ValueError("of the program")
        except ValueError:
            pass
        assert y.tolist() == [i + 1.0] * 3 and current_mode() == "off"


def test_decorated_functions_generators_and_threads() -> None:
    @fused_eager
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def pieces() -> Iterator[float]:
        for i in range(8):
            with fused_eager():
                yield (torch.ones(2) * i).sum().item()

    seen: list[list[float]] = []

    def work() -> None:
        seen.append([double(torch.full((2,), float(i))).sum().item() for i in range(8)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert list(pieces()) == [2.0 * i for i in range(8)]
    for thread in threads:
        thread.join()
    assert seen == [[4.0 * i for i in range(8)]] * 4
    assert current_mode() == "off"


def test_a_thread_that_ends_leaves_nothing_behind() -> None:
    thread = threading.Thread(target=loop, args=(6,))
    thread.start()
    thread.join()
    gc.collect()
    assert is_patched()
    parking.clear()
    assert not is_patched() and not guards._users


def test_a_thread_that_was_started_inside_is_in_none_between() -> None:
    go, seen = threading.Event(), []

    def later() -> None:
        go.wait()
        seen.append(current_mode())

    def body() -> threading.Thread:
        thread = threading.Thread(target=later)
        thread.start()
        return thread

    started = [thread for _, thread in loop(6, body)]
    go.set()
    for thread in started:
        thread.join()
    assert len(seen) == 6


@pytest.mark.filterwarnings("ignore:os.fork")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_finds_nothing_parked() -> None:
    loop(6)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, b"patched" if is_patched() else b"clean")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 10) == b"clean"


def test_a_thread_that_rests_rests_on_in_the_next_context(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(8):
        with fused_eager(native="measured", compile="auto"):
            door = current_door()
            assert door is not None
            resting = door.stream.policy.backoff.left
            if resting:
                assert door.bypassed and not stack()
            x = torch.ones(3) + 1
            door.stream.policy.backoff.rest(lambda: False)
        assert x.tolist() == [2.0] * 3
    assert resting


def test_what_is_told_of_a_failed_op_belongs_to_the_context_that_ran_it() -> None:
    x = torch.arange(4.0)
    for i in range(8):
        with fused_eager():
            y = x[torch.tensor([i % 4])]
            sync()
        assert y.item() == i % 4
    with pytest.raises(IndexError), fused_eager():
        x[torch.tensor([7])]
    assert current_mode() == "off" and not LOG.budgets


def test_what_was_found_at_a_turn_holds_in_the_contexts_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would in one context around all of them; and no longer than it would."""
    ways = []
    for i in range(12):
        with fused_eager(native="measured"):
            door = current_door()
            assert door is not None
            ways.append(door.bypassed)
            assert (door in stack()) is not door.bypassed
            if i == 5:
                door.begin_bypass("read", time.perf_counter() + 1e6)
            if i == 8:
                door.come_back()
                assert door in stack()
            assert (torch.ones(2) + 1).tolist() == [2.0] * 2
        assert not stack()
    assert ways == [6 <= i <= 8 for i in range(12)]


def test_an_op_that_is_taken_apart_leaves_the_door_where_it_is() -> None:
    """Its parts are called with the mode entered once more."""
    for _ in range(6):
        with fused_eager():
            door = current_door()
            assert door is not None
            with door:
                pass
            assert door in stack()
            door.begin_bypass("read", 0.0)
            door.come_back()
            assert (torch.ones(2) + 1).tolist() == [2.0] * 2
        assert not stack() and not door.old_dispatch_mode_flags


@pytest.mark.parametrize("before", [0, 6])
def test_an_entry_that_fails_leaves_nothing_behind(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise ValueError("as the context is entered")

    def enter() -> None:
        with fused_eager():
            pass

    for _ in range(before):
        enter()
    users = guards._users
    with monkeypatch.context() as patch:
        patch.setattr(bypass, "enter", fail)
        with pytest.raises(ValueError, match="as the context is entered"):
            enter()
    assert current_mode() == "off" and not stack() and guards._users == max(users - 1, 0)
    enter()
    assert current_mode() == "off" and not stack()
