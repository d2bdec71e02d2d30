"""A rank's run without its peers, played through once more with what its collectives take."""

from __future__ import annotations

import pytest

from fused_eager.reporting.scaling import WORD, Predicted, Rehearsal, Scaling, Sent, predict
from fused_eager.targets.links import Link

LINK = Link("test", 0.0, 1.0, "made up")  # a byte in a second: an all_reduce of 3 bytes on 2 ranks takes 3 s


def run(*sent: tuple[int, float, float], ends: tuple[float, ...] = (0.0, 10.0)) -> Rehearsal:
    return Rehearsal(2, list(ends), [Sent("allreduce_", n, 2, start, use) for n, start, use in sent], 1 << 20)


@pytest.mark.parametrize(
    ("sent", "waiting"),
    [
        ([], 0),
        ([(3, 2.0, 2.0)], 3),  # waited for at once
        ([(3, 2.0, 9.0)], 0),  # computed meanwhile
        ([(3, 2.0, 4.0)], 1),
        ([(3, 2.0, 4.0), (3, 3.0, 9.0)], 1),  # the second is there at 8, and the rank at 10
        ([(3, 2.0, 9.0), (3, 2.0, 9.0), (3, 2.0, 9.0)], 2),  # one after the other, till 11
        ([(3, 8.0, 12.0)], 0),  # used in the next step, which is none of these
    ],
)
def test_a_rank_waits_for_what_does_not_overlap(sent: list[tuple[int, float, float]], waiting: float) -> None:
    found = predict(run(*sent), LINK)
    assert (found.compute, found.waiting, found.seconds) == (10, waiting, 10 + waiting)
    assert found.sending == sum(n for n, _, _ in sent)


def test_a_step_that_uses_what_the_one_before_has_sent() -> None:
    sent = [(3, 9.0, 11.0), (3, 19.0, 21.0), (3, 29.0, 31.0)]
    found = predict(run(*sent, ends=(0.0, 10.0, 20.0, 30.0)), LINK)
    assert found.waiting == 1
    assert found.collectives == 1


def test_computing_that_takes_longer_hides_more() -> None:
    slow = predict(run((3, 2.0, 4.0)), LINK, compute=2.0)
    assert (slow.compute, slow.waiting) == (20, 0)
    fast = predict(run((3, 2.0, 4.0)), LINK, compute=0.1)
    assert fast.waiting == pytest.approx(2.8)


def row(ranks: int, seconds: float) -> Predicted:
    return Predicted(ranks, seconds, seconds / 2, 0.0, seconds / 2, 1.0, 4.0, 1 << 20)


def test_every_number_says_that_it_is_predicted() -> None:
    made = Scaling(LINK, [row(8, 1.0), row(64, 2.0)], divided=False)
    text = made.as_text()
    rows = [line for line in text.splitlines() if line.lstrip().startswith(("8 ", "64 ")) and "#" not in line]
    assert len(rows) == 2 and all(WORD in line for line in rows)
    assert text.startswith(WORD) and "weak scaling" in text and "50%" in text
    assert made.as_json()["predicted"] and all(each["predicted"] for each in made.as_json()["rows"])


def test_strong_scaling_counts_the_work_of_a_rank() -> None:
    made = Scaling(LINK, [row(8, 1.0), row(64, 0.25)], divided=True)
    assert made.efficiency(made.rows[1]) == pytest.approx(0.5)
    assert "strong scaling" in made.as_text()
