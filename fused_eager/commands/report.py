"""The command `report`: an event log as text, a page, a trace, metrics or JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable
from typing import Any

from ..errors import FusedEagerError
from ..reporting.facts import Facts
from ..reporting.report import Report
from ..reporting.text import show


def _html(report: Report) -> str:
    return report.html()


def _perfetto(report: Report) -> str:
    from ..reporting.perfetto import trace

    return json.dumps(trace(report.processes))


def _prometheus(report: Report) -> str:
    from ..reporting.prometheus import metrics

    return metrics(report.facts)


def as_json(report: Report) -> str:
    """The facts and the advice as JSON: rows and sums as `Facts` names them."""
    facts = {row.name: _plain(getattr(report.facts, row.name)) for row in dataclasses.fields(Facts)}
    facts["processes"] = [p.start for p in report.processes]
    return json.dumps({"advice": _plain(list(report.advice)), "facts": facts}, indent=1)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {row.name: _plain(getattr(value, row.name)) for row in dataclasses.fields(value)}
    if isinstance(value, float) and math.isinf(value):
        return None  # JSON has no infinity
    if isinstance(value, dict):
        return {k if isinstance(k, str) else ".".join(map(str, k)): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(v) for v in (sorted(value) if isinstance(value, set) else value)]
    return value


FOR_OTHERS = ("html", "perfetto")  # not for eyes: a terminal would show thousands of lines that nobody can read

RENDERERS: dict[str, tuple[Callable[[Report], str], str]] = {
    "html": (_html, "one page that needs nothing else; open it in a browser"),
    "perfetto": (_perfetto, "a trace for ui.perfetto.dev or chrome://tracing"),
    "prometheus": (_prometheus, "metrics in Prometheus's text format, for a node exporter's textfile collector"),
    "json": (as_json, "all rows and sums"),
}


def main(argv: list[str], prog: str) -> int:
    """`report FILE...`: what a run did, and what to change."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=(main.__doc__ or "") + " FILE is what the option `report` wrote; the files of a job's other "
        "processes beside it are taken in.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="an event log")
    forms = parser.add_mutually_exclusive_group()
    for name, (_, help) in RENDERERS.items():
        forms.add_argument(f"--{name}", dest="form", action="store_const", const=name, help=help)
    parser.add_argument("-o", "--output", metavar="PATH", help="write there instead of to standard output")
    arguments = parser.parse_args(argv)
    form = arguments.form
    if form in FOR_OTHERS and not arguments.output and sys.stdout.isatty():
        print(f"{prog}: --{form} is not for a terminal; give -o FILE, or redirect it (> FILE)", file=sys.stderr)
        return 2
    try:
        report = Report.read(*arguments.files)
    except (FusedEagerError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    text = RENDERERS[form][0](report) if form else str(report)
    if not arguments.output:
        show(text)
        return 0
    try:
        with open(arguments.output, "w", encoding="utf-8") as file:
            file.write(text + ("" if text.endswith("\n") else "\n"))
    except OSError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    return 0
