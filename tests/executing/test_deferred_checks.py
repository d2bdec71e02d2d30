"""Verifying: a failed check undoes what depended on it and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from fused_eager import LostValue, fused_eager, sync
from fused_eager.executing.deferred_checks import AHEAD, DEFERRED, DeferredChecks, Launch, untold
from tests.streams import flush_now, stable_shapes


@pytest.fixture(autouse=True)
def compiled_at_sight() -> Iterator[None]:
    with stable_shapes():
        yield


def pick(table: torch.Tensor, *ids: int) -> torch.Tensor:
    return torch.nn.functional.embedding(torch.tensor(ids), table)


def test_a_good_check_is_silent() -> None:
    table = torch.arange(20.0).view(10, 2)
    with fused_eager():
        assert pick(table, 0, 9, 5).tolist() == [[0.0, 1.0], [18.0, 19.0], [10.0, 11.0]]


def test_a_bad_index_raises_at_the_sync_and_names_the_line() -> None:
    table = torch.ones(10, 2)
    with fused_eager():
        bad = pick(table, 0, 10)
        with pytest.raises(IndexError, match=r"\(raised by aten\.embedding\.default at .*test_def.*\.py:\d+\)"):
            bad.tolist()
        with pytest.raises(LostValue):
            bad.tolist()


def test_the_first_of_several_failures_is_told() -> None:
    table = torch.ones(10, 2)
    with fused_eager():
        first = torch.nn.functional.embedding(torch.tensor([77]), table)
        second = torch.nn.functional.embedding(torch.tensor([88]), table)
        with pytest.raises(IndexError) as told:
            (first + second).tolist()
        line = int(str(told.value).rstrip(")").rsplit(":", 1)[1])
        assert line == test_the_first_of_several_failures_is_told.__code__.co_firstlineno + 3
        del first, second


def test_later_flushes_that_used_the_value_are_undone_and_others_are_not() -> None:
    table, x = torch.ones(10, 2), torch.ones(2)
    with fused_eager():
        bad = pick(table, 30)
        flush_now()
        derived, other = bad * 2, x * 3
        flush_now()
        further, further_other = derived + 1, other + 1
        flush_now()
        with pytest.raises(IndexError):
            further.tolist()
        for lost in (bad, derived, further):
            with pytest.raises(LostValue, match="out of range"):
                lost.tolist()
        assert other.tolist() == [3.0, 3.0] and further_other.tolist() == [4.0, 4.0]


def test_a_tensor_that_was_updated_with_it_returns_to_its_value() -> None:
    table, kept = torch.ones(10, 2), torch.full((1, 2), 5.0)
    with fused_eager():
        on_device = torch.ones(1, 2) * 7
        flush_now()
        step = pick(table, 30)
        kept.add_(step)
        on_device.add_(step)
        flush_now()
        with pytest.raises(IndexError):
            step.tolist()
        assert kept.tolist() == [[5.0, 5.0]] and on_device.tolist() == [[7.0, 7.0]]
    assert kept.tolist() == [[5.0, 5.0]] and on_device.tolist() == [[7.0, 7.0]]


def test_the_next_ops_work() -> None:
    table = torch.ones(10, 2)
    with fused_eager():
        bad = pick(table, 30)
        with pytest.raises(IndexError):
            bad.tolist()
        assert pick(table, 3).tolist() == [[1.0, 1.0]]


def test_without_bounds_nothing_is_checked() -> None:
    table = torch.ones(10, 2)
    with fused_eager(check_bounds=False):
        pick(table, 30).sum()
        assert not DEFERRED.runs


class Token:
    """Something that finishes when it is told to, or waited for."""

    def __init__(self) -> None:
        self.ready = False

    def is_ready(self) -> bool:
        return self.ready

    def block_until_ready(self) -> None:
        self.ready = True


def test_what_runs_ahead_is_bounded() -> None:
    backlog, tokens = DeferredChecks(), []
    for i in range(AHEAD + 10):
        launch = backlog.launch()
        launch.tokens.append(Token())  # type: ignore[arg-type]
        launch.reading[i] = None
        tokens.append(launch.tokens[0])
    assert len(backlog.launches) == AHEAD
    assert [t.ready for t in tokens] == [True] * 10 + [False] * AHEAD  # type: ignore[attr-defined]
    assert not backlog.is_reading(9) and backlog.is_reading(10)


def test_finished_launches_are_forgotten() -> None:
    backlog = DeferredChecks()
    first = backlog.launch()
    first.tokens.append(Token())  # type: ignore[arg-type]
    first.reading[1] = None
    backlog.launch()
    assert backlog.is_reading(1)
    first.tokens[0].ready = True  # type: ignore[attr-defined]
    backlog.launch()
    assert not backlog.is_reading(1)


def test_a_launch_is_done_when_all_of_it_is() -> None:
    launch = Launch([Token(), Token()])  # type: ignore[list-item]
    assert not launch.is_done()
    launch.tokens[0].ready = True  # type: ignore[attr-defined]
    assert not launch.is_done()
    launch.wait()
    assert launch.is_done()


# ---- what is pending when a failure is found -----------------------------------------------------------------------


def spoiled() -> torch.Tensor:
    """A tensor of twos after a write out of range, which nobody has noticed yet."""
    x = torch.full((3000,), 2.0)
    sync()
    x.index_fill_(0, torch.tensor([5000]), 3.0)
    return x


def test_what_is_pending_and_depends_on_a_failure_is_never_computed() -> None:
    with fused_eager(mode="fused"):
        other = torch.full((3000,), 5.0)
        x = spoiled()
        flush_now()  # the failure is there, and nobody has looked yet
        y = x * 10
        x.mul_(2)
        other.add_(1)
        z = other * 2
        with pytest.raises(IndexError, match="5000"):
            sync()
        assert set(x.tolist()) == {2.0} and set(other.tolist()) == {6.0} and set(z.tolist()) == {12.0}
        with pytest.raises(LostValue):
            y.tolist()
        x.add_(1)
    assert set(x.tolist()) == {3.0}


def test_what_overwrites_a_failure_is_taken_back_with_it() -> None:
    with fused_eager(mode="fused"):
        x = spoiled()
        flush_now()
        x.fill_(7)
        with pytest.raises(IndexError, match="5000"):
            sync()
        assert set(x.tolist()) == {2.0}
        x.fill_(7)
        assert set(x.tolist()) == {7.0}


def test_an_op_whose_call_has_raised_is_not_made_up_for() -> None:
    with fused_eager(mode="strict"):
        x = torch.full((3000,), 2.0)
        sync()
        with pytest.raises(IndexError, match="5000"):
            x.index_fill_(0, torch.tensor([5000]), 3.0)
            for _ in range(20):
                x.mul_(2)
        assert set(x.tolist()) == {2.0}


def test_a_call_that_raises_another_op_s_error_has_not_happened() -> None:
    with fused_eager(mode="strict"):
        w = torch.zeros(3000)
        x = spoiled()
        done = raised = 0
        for _ in range(20):
            try:
                w.add_(1)
                done += 1
            except IndexError:
                raised += 1
        assert raised == 1 and set(w.tolist()) == {float(done)} == {19.0}
        assert set(x.tolist()) == {2.0}


def test_what_nobody_has_been_told_of_is_found_once() -> None:
    table = torch.ones(10, 2)
    with fused_eager():
        bad = pick(table, 10)
        flush_now()
        DEFERRED.owed.append((0, ValueError("of a thread that has ended")))
        DEFERRED.runs[-1].thread = 0
        first = untold()
        assert isinstance(first, ValueError)
        with pytest.raises(LostValue):
            bad.tolist()
        del bad, first
    assert untold() is None


def test_what_a_thread_is_owed_is_found_at_the_end_while_it_still_is_there() -> None:
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        assert other.ident is not None
        DEFERRED.owed.append((other.ident, ValueError("of that thread")))
        assert isinstance(untold(), ValueError)
    finally:
        DEFERRED.owed.clear()
        stop.set()
        other.join()
