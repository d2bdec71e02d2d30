"""Ranks that are threads of one process: whose turn it is, and what becomes of those who wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from fused_eager.ranks.faults import CollectivesDiffer, RankLost
from fused_eager.ranks.turns import Rank, Turns, mine


class Own:
    """A value that each rank has for itself."""

    def __init__(self) -> None:
        self.value: Any = "outside"

    def begin(self, rank: int, size: int) -> None:
        self.value = rank

    def put_away(self) -> Any:
        return self.value

    def bring_back(self, kept: Any) -> None:
        self.value = kept


def run(program: Callable[[Turns, Rank], Any], size: int = 3, *owns: Own) -> Turns:
    turns = Turns(size, owns)

    def called(rank: int) -> None:
        at = mine()
        assert at == (turns, turns.ranks[rank])
        program(turns, turns.ranks[rank])

    done = threading.Thread(target=lambda: turns.run(called, lambda error: "a.py:7"), daemon=True)
    done.start()
    done.join(20)
    assert not done.is_alive(), "it hangs"
    return turns


def test_one_at_a_time_runs_and_has_what_is_its_own() -> None:
    own, running, seen, there = Own(), [0], [], set()

    def program(turns: Turns, me: Rank) -> None:
        for number in range(4):
            running[0] += 1
            assert running[0] == 1
            own.value = (me.number, number)
            running[0] -= 1
            there.add((me.number, number))
            turns.wait_until(me, lambda: len([1 for _, n in there if n == number]) == 3, "waits")  # noqa: B023
            assert own.value == (me.number, number)
            seen.append(own.value)

    turns = run(program, 3, own)
    assert turns.cause() is None and len(seen) == 12 and own.value == "outside"


def test_who_raises_is_named_to_all_that_wait() -> None:
    def program(turns: Turns, me: Rank) -> None:
        if me.number == 1:
            raise ValueError("a bad batch")
        turns.wait_until(me, lambda: False, "waits in all_reduce at a.py:9", lambda: [1])

    turns = run(program)
    cause = turns.cause()
    assert cause is not None and cause[0].number == 1 and isinstance(cause[1], ValueError)
    for rank in (0, 2):
        error = turns.ranks[rank].error
        assert isinstance(error, RankLost) and error.rank == 1 and error.line == "a.py:7"
        assert "rank 1 has raised ValueError: a bad batch" in str(error) and f"Rank {rank} waits in" in str(error)


@pytest.mark.parametrize("ends", [lambda: None, lambda: (_ for _ in ()).throw(SystemExit(0))])
def test_who_ends_early_is_named_while_another_one_still_runs(ends: Callable[[], Any]) -> None:
    def program(turns: Turns, me: Rank) -> None:
        if me.number == 2:
            list(ends() or ())
        elif me.number == 0:
            turns.wait_until(me, lambda: False, "waits", lambda: [2])
        else:
            turns.pass_on(me)

    turns = run(program)
    assert isinstance(turns.ranks[0].error, RankLost) and "rank 2 has come to the end" in str(turns.ranks[0].error)
    assert turns.ranks[1].error is None


def test_ranks_that_wait_for_one_another_are_all_told() -> None:
    turns = run(lambda turns, me: turns.wait_until(me, lambda: False, f"waits for {me.number + 1}"), 2)
    for rank in turns.ranks:
        assert isinstance(rank.error, CollectivesDiffer)
        assert "rank 0 waits for 1, rank 1 waits for 2" in str(rank.error)


def test_who_waits_for_something_else_lets_the_others_run() -> None:
    flag = threading.Event()

    def program(turns: Turns, me: Rank) -> None:
        if me.number == 0:
            with turns.blocking(me):
                assert flag.wait(10)
        else:
            time.sleep(0.01)
            flag.set()

    assert run(program).cause() is None


def test_a_new_default_group_has_dealt_with_what_was() -> None:
    there: set[int] = set()

    def program(turns: Turns, me: Rank) -> None:
        turns.begin_anew(me)
        with pytest.raises(CollectivesDiffer):
            turns.wait_until(me, lambda: False, "waits")
        with pytest.raises(CollectivesDiffer):
            turns.wait_until(me, lambda: False, "waits again")
        turns.begin_anew(me)
        there.add(me.number)
        turns.wait_until(me, lambda: len(there) == 3, "waits")

    turns = run(program)
    assert turns.cause() is None, turns.cause()
