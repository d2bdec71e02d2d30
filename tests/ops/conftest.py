"""The counts of the corpus, at the end of the run that made them."""

from __future__ import annotations

from typing import Any

from .corpus import Tally

TALLY = Tally()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how much was compared."""
    if TALLY.counts["cases"]:
        terminalreporter.write_line(f"op corpus: {TALLY}")
