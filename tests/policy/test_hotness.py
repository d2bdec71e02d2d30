"""Hotness: changing shapes do not compile for ever, and settled ones are compiled again."""

from __future__ import annotations

import pytest
import torch

from fused_eager import fused_eager, sync
from fused_eager.compiling import background
from fused_eager.policy.hotness import (
    BACKOFF,
    BEGUN,
    LONGEST,
    PATIENCE,
    SIGHTINGS,
    SINGLES,
    VARIANTS,
    Backoff,
    Skeletons,
)
from tests.streams import events, open_stream, stable_shapes


def test_the_first_variants_are_compiled_at_sight() -> None:
    s = Skeletons()
    assert [s.is_hot("a", i) for i in range(VARIANTS + 2)] == [True] * VARIANTS + [False] * 2
    assert s.is_hot("b", 0), "another skeleton is another matter"


def test_a_further_variant_is_compiled_when_it_keeps_coming() -> None:
    s = Skeletons()
    for i in range(VARIANTS):
        s.is_hot("a", i)
    assert [s.is_hot("a", 99) for _ in range(SIGHTINGS)] == [False] * (SIGHTINGS - 1) + [True]


def test_it_is_compiled_once_running_it_natively_has_taken_as_long() -> None:
    s, asked = Skeletons(), 0
    for i in range(VARIANTS):
        s.is_hot("a", i)
        s.compiled("a", 2.0)
    while not s.is_hot("a", 99, "shapes"):
        s.ran("shapes", 0.125)
        asked += 1
    assert asked == 16
    assert not s.is_hot("a", 98), "every variant pays for itself"


def test_shapes_of_a_device_that_come_once_each_are_not_compiled_but_for_the_first() -> None:
    s = Skeletons()
    assert [s.is_hot("a", i, i, "line") for i in range(40)] == [True] + [False] * 39
    assert [s.is_hot("a", i, i, "line") for i in range(5, 10)] == [True] * 3 + [False] * 2, "these come twice"
    assert len(s.of("a").signatures) == VARIANTS


@pytest.mark.parametrize("recurs", ["by another ending", "as it is"])
def test_another_shape_of_what_came_again_is_compiled_at_sight(recurs: str) -> None:
    s = Skeletons()
    assert s.is_hot("a", ("first", 0), "first", "line")
    if recurs == "as it is":
        s.of("a").recurs = True  # as loading says of what it finds again
    else:
        assert s.is_hot("a", ("first", 1), "first", "line"), "a loop's second round"
    assert s.is_hot("a", ("last", 1), "last", "line"), "the last batch of an epoch"


def test_other_ops_from_a_line_whose_streams_do_not_come_again_have_to_come_twice() -> None:
    s = Skeletons()
    assert [s.is_hot(ops, 0, ops, "line") for ops in "abcd"] == [True] * BEGUN + [False] * (4 - BEGUN)
    assert s.is_hot("e", 0, "e", "another line") and s.is_hot("d", 0, "d", "line")
    s.on("line").recurs = True
    assert s.is_hot("f", 0, "f", "line"), "what begins there comes again"


def test_sightings_are_forgotten_in_the_end() -> None:
    s = Skeletons()
    for i in range(20_000):
        s.is_hot("a", i)
    assert len(s.sightings) <= 10_000 and len(s.variants) == 1


def test_skeletons_are_forgotten_in_the_end() -> None:
    s = Skeletons()
    for i in range(20_000):
        s.is_hot(i, 0)
    assert len(s.variants) <= 10_000


def test_shapes_that_come_once_each_are_noticed() -> None:
    s = Skeletons()
    assert [s.came_once("a") for _ in range(SINGLES + 2)] == [False] * SINGLES + [True] * 2
    s.is_hot("a", 0)
    assert not s.came_once("a"), "one came again: the count starts anew"


def test_a_backoff_can_last_until_something_happens() -> None:
    backoff, over = Backoff(), False
    backoff.rest(lambda: over)
    for _ in range(3):
        backoff.pass_sync()
        assert backoff.left and backoff.code == "region.new"
    over = True
    backoff.wake()
    assert backoff.left, "it ends where a stream would begin, at a sync point"
    backoff.pass_sync()
    assert not backoff.left
    backoff.rest(lambda: over)
    backoff.wake()
    assert not backoff.left, "without sync points it ends at once"


def test_a_backoff_begins_after_unstable_streams_in_a_row() -> None:
    backoff = Backoff()
    for _ in range(PATIENCE - 1):
        backoff.saw(hot=False)
    assert backoff.left == 0
    backoff.saw(hot=True)
    for _ in range(PATIENCE - 1):
        backoff.saw(hot=False)
    assert backoff.left == 0, "a hot one in between starts the count again"
    backoff.saw(hot=False)
    assert backoff.left == BACKOFF


def test_a_stream_is_given_up_at_an_op_of_a_new_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "is_quick", lambda ops, seconds: False)
    background.wait()
    recorded: list[int] = []
    wanted = {n: float((torch.zeros(n, 4) + 3).cos().sum()) for n in range(5, 10 + BACKOFF)}
    with stable_shapes(), events("flush") as seen, fused_eager(compile="auto", native="never"):

        def round_of(n: int) -> float:
            y = torch.full((4,), 2.0) + 1
            rows = torch.zeros(n, 4)
            result = float((rows + y).cos().sum())
            recorded.append(sum(e.data["ops"] for e in seen))
            seen.clear()
            return result

        for n in (5, 6, 7, 8):
            assert round_of(n) == pytest.approx(wanted[n])
        assert recorded == [6, 3, 3, 3], "given up at the first op of another length"
        backoff = open_stream().policy.backoff
        assert backoff.left == BACKOFF - 1 and backoff.code == "region.unstable"
        while backoff.left:
            n = 9 + backoff.left
            assert round_of(n) == wanted[n] and recorded[-1] == 0
        for _ in range(2):
            round_of(9)
        assert recorded[-2:] == [3, 0], "a look"


def test_where_nothing_is_read_a_new_length_is_written_down() -> None:
    """What would be given up there would stay so for as long as the program runs."""
    with stable_shapes(), events("flush") as seen, fused_eager(compile="auto", native="never"):
        for n in (5, 5, 6, 7):
            ((torch.zeros(n, 4) + 2).cos() * 3).sum()
            sync()
    assert [e.data["ops"] for e in seen] == [5] * 4


def test_large_lengths_are_written_down() -> None:
    with stable_shapes(), events("flush") as seen, fused_eager(compile="auto", native="never"):
        for n in (1_100_000, 1_200_000):
            float((torch.ones(n) + 1).sum())
    assert [e.data["ops"] for e in seen] == [3, 3]


def test_a_stream_that_has_settled_stands_for_its_backoff() -> None:
    backoff = Backoff()
    for _ in range(PATIENCE):
        backoff.saw(False, "same")
    assert backoff.weight == 1
    while backoff.left:
        backoff.pass_sync()
    backoff.saw(False, "same")
    assert backoff.weight == 1 + BACKOFF
    backoff.saw(False, "other")
    assert backoff.weight == 1


def test_backoffs_grow_up_to_a_limit_and_start_small_again() -> None:
    backoff, lengths = Backoff(), []
    for _ in range(PATIENCE - 1):
        backoff.saw(hot=False)
    for _ in range(12):
        backoff.saw(hot=False)
        lengths.append(backoff.left)
        for _ in range(backoff.left):
            backoff.pass_sync()
        assert backoff.left == 0
    assert lengths[:3] == [BACKOFF, 2 * BACKOFF, 4 * BACKOFF] and lengths[-1] == LONGEST
    backoff.saw(hot=True)
    for _ in range(PATIENCE):
        backoff.saw(hot=False)
    assert backoff.left == BACKOFF


def test_countdown_stops_at_zero() -> None:
    backoff = Backoff()
    backoff.pass_sync()
    assert backoff.left == 0


def test_growing_shapes_stop_compiling_and_stay_right() -> None:
    with stable_shapes(), events("compile") as seen, fused_eager():
        for n in range(2, 40):
            x = torch.arange(float(n))
            assert ((x * 3 + 1).cos() - 7).sum().item() == ((torch.arange(float(n)) * 3 + 1).cos() - 7).sum()
    assert len(seen) <= 3 * VARIANTS


def test_a_shape_that_settles_is_compiled() -> None:
    def work(n: int) -> float:
        return float(((torch.empty(n).fill_(2.0) * 3).tanh() + 5).sum())

    with stable_shapes(), fused_eager():
        for n in range(2, 12):
            work(n)
        with events("compile") as seen:
            for _ in range(400 * BACKOFF):
                work(50)
                if seen:
                    break
        assert seen, "the shape never changes again, and is still not compiled"
