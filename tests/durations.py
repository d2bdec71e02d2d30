"""What the tests of each folder took, printed at the end: seconds in all processes together."""

from __future__ import annotations

from collections import Counter

from _pytest.terminal import TerminalReporter

SHOWN = 0.01  # of the whole; folders below it are added up


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """One line a folder, the longest first."""
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for report in (r for reports in terminalreporter.stats.values() for r in reports):
        if getattr(report, "when", None) in ("setup", "call", "teardown"):
            folder = report.nodeid.partition("::")[0].rpartition("/")[0]
            seconds[folder] += report.duration
            tests[folder] += report.when == "setup"
    whole = seconds.total()
    if len(seconds) < 2:
        return
    terminalreporter.section("time by folder, in all processes together")
    small = [folder for folder, took in seconds.items() if took < SHOWN * whole]
    for folder, took in seconds.most_common():
        if folder not in small:
            terminalreporter.write_line(f"{took:8.1f} s {took / whole:4.0%} {tests[folder]:6} tests  {folder}")
    if small:
        took = sum(seconds[folder] for folder in small)
        terminalreporter.write_line(
            f"{took:8.1f} s {took / whole:4.0%} {sum(tests[f] for f in small):6} tests  {len(small)} other folders"
        )
