"""Ranks run several collectives as one program where all of them are about to run the same one, and nowhere else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch import distributed

from fused_eager.errors import FusedEagerError
from fused_eager.ranks import agreement
from fused_eager.ranks.agreement import Agreement
from fused_eager.ranks.channel import Channel


class Beat:
    """As much of a heartbeat as an agreement asks for."""

    def __init__(self, store: Any, rank: int):
        self.rank, self.fault, self.channel = rank, None, Channel(store, 5.0)

    def error_of(self, where: str) -> None:
        """No rank is lost."""


@pytest.fixture
def store() -> Any:
    return distributed.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)


def found(store: Any, *ranks: Callable[[Agreement], Any], devices: str = "cpu:0,1") -> list[Any]:
    """What each rank comes to, all at a time."""
    said: list[Any] = [None] * len(ranks)
    beats: list[Any] = [Beat(store, rank) for rank in range(len(ranks))]

    def run(rank: int) -> None:
        said[rank] = ranks[rank](Agreement(beats[rank], devices, rank, len(ranks)))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank waits for what will not come"
    return said


def test_all_are_about_to_run_the_same(store: Any) -> None:
    def rank(of: Agreement) -> Any:
        return [of.reached("a", 3), of.reached("b", 1), of.number]

    assert found(store, rank, rank, rank) == [[True, True, 4]] * 3


def test_one_that_differs_has_all_run_them_one_by_one_for_that_time(store: Any) -> None:
    def rank(mine: str) -> Callable[[Agreement], Any]:
        return lambda of: [of.reached(mine, 2), of.reached("b", 2), of.number]

    assert found(store, rank("a"), rank("other"), rank("a")) == [[False, True, 4]] * 3


def test_one_that_cuts_them_in_other_places_meets_the_others_again(store: Any) -> None:
    def whole(of: Agreement) -> Any:
        return [of.reached("a", 3), of.reached("b", 2)]

    def parts(of: Agreement) -> Any:  # a value is read after the first, and after the second
        return [of.reached("a1", 1), of.reached("a2", 1), of.reached("a3", 1),
                of.reached("b", 2)]  # fmt: skip

    assert found(store, whole, parts) == [[False, True], [False, False, False, True]]


def test_nobody_waits_for_one_that_runs_them_alone(store: Any) -> None:
    def alone(of: Agreement) -> Any:
        of.alone(3)
        return of.reached("b", 2)

    def whole(of: Agreement) -> Any:
        return [of.reached("a", 2), of.reached("a", 1), of.reached("b", 2)]

    assert found(store, alone, whole) == [True, [False, False, True]]


def test_what_nobody_asks_for_any_more_is_taken_away(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "KEPT", 4)

    def rank(of: Agreement) -> Any:
        assert all(of.reached("a", 2) for _ in range(10))
        return [bool(of.beat.channel.get(f"{of.name}/{number}/{of.rank}")) for number in (0, 2, 12, 14, 18)]

    assert found(store, rank, rank) == [[False, False, False, True, True]] * 2


def test_nothing_is_launched_where_it_is_not_known_what_the_others_do(store: Any) -> None:
    def rank(of: Agreement) -> Any:
        of.beat.channel.close()
        with pytest.raises(FusedEagerError, match="rank 0 is about to run a region with collectives inside: the job"):
            of.reached("a", 2)
        return True

    assert found(store, rank) == [True]
