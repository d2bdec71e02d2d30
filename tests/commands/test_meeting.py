"""What the process that meets a program's regions says beside them."""

from __future__ import annotations

from fused_eager.commands.meeting import _islands
from fused_eager.log.events import LOG


def test_an_island_is_counted_whether_a_plan_has_it_or_it_was_run_at_once() -> None:
    for _ in range(2):  # at once: told each time
        LOG.emit("island", op="aten.first_of_a_test.default", reason="values", site="a.py:3")
    LOG.emit("island", op="aten.second_of_a_test.default", reason="none", site="a.py:4")  # planned: told once
    LOG.count("island aten.second_of_a_test.default", 5)
    counts, places = _islands()
    assert counts["aten.first_of_a_test.default"] == 2 and counts["aten.second_of_a_test.default"] == 5
    assert places["aten.second_of_a_test.default"] == "a.py:4" and not [op for op in counts if op.startswith("for ")]
