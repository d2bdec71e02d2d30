"""The pages of the documentation that are made from tables: `python -m fused_eager.reporting.pages` writes them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fused_eager.fusion_rules import RULES
from fused_eager.fusion_rules.platforms import VARIANTS
from fused_eager.fusion_rules.rule import OpClass, Rule

from ..compiling import executable
from ..compiling.xla_cpu import finishing  # noqa: F401  (the variants of XLA:CPU)
from ..config import OPTIONS, as_option
from ..log.reasons import CODES
from ..lowering import rewrites
from .schema import COMMON, FORMER, KINDS, VERSION, Field

_FAMILIES = {
    "sync": "The program waits",
    "cut": "The stream is cut, nobody waits",
    "mode": "The mode",
    "region": "A region ends before its stream does",
}


def reasons() -> str:
    """`docs/reasons.md`: one entry per reason code."""
    lines = [
        "# Reasons",
        "",
        "Every cut, wait and island has a coded reason; the report names it with your line. This page is made from the",
        "table in `fused_eager/log/reasons.py` (`python -m fused_eager.reporting.pages` writes it).",
    ]
    family = ""
    for code in CODES.values():
        start = code.name.partition(".")[0]
        if start != family:
            family = start
            lines += ["", f"## {_FAMILIES[start]}"]
        lines += ["", f"### {code.name}", "", f"{code.meaning[0].upper()}{code.meaning[1:]}. Cure: {code.hint}.", ""]
        lines += ["```python", code.example, "```", "", "becomes", "", "```python", code.cured, "```"]
    return "\n".join(lines) + "\n"


def _table(fields: Sequence[Field]) -> list[str]:
    rows = [f"| `{f.name}` | {f.type} | {f.meaning} |" for f in fields]
    return ["| field | type | meaning |", "|---|---|---|", *rows]


def event_log() -> str:
    """`docs/event_log.md`: the format of the file that the option `report` names."""
    lines = [
        f"# The event log, version {VERSION}",
        "",
        "What `FUSED_EAGER_REPORT=run.jsonl`, or `fused_eager(report=\"run.jsonl\")`, writes: JSON lines (UTF-8, one",
        "object per line), one file per process, while the program runs. `python -m fused_eager report run.jsonl`",
        "reads it. This page is made from the table in `fused_eager/reporting/schema.py`.",
        "",
        "## Files",
        "",
        "The first process of a job writes the file itself. In a distributed job (`RANK` is set) rank 0 does, and the",
        "others write `run.jsonl.rank1`, `run.jsonl.rank2`, ... beside it; a process that finds the file taken by one",
        "that still lives writes `run.jsonl.pid1234`. A reader takes in all files of one `job`.",
        "",
        "Lines are written twice a second, and at once where a compilation or a context begins or ends: a process that",
        "is killed loses half a second at most, and may leave one torn line at the end. A forked child writes nothing",
        "into its parent's file.",
        "",
        "## What is measured, and what is not",
        "",
        "XLA runs asynchronously, so the time of a call says nothing about the work behind it. `flush` has the host's",
        "time to plan and launch; `sync` has the time that the program stood still; `run` has the time of a region",
        "alone, from a few samples in which the runtime waits before and after each region (the 2nd, 4th, 8th, 16th",
        "and every 32nd flush of a plan). `recording` is timed after such flushes only. Everything else is counted.",
        "Shares of lines and modules in a region's time are by number of ops: an estimate.",
        "",
        "A gradient's op is told with the line of the forward op that it belongs to, found by autograd's sequence",
        "number. Where the forward op was a view, which is not recorded, its neighbours' line is taken if they agree,",
        "else the line of `backward()`.",
        "",
        "Readers skip kinds and fields that they do not know; the version grows when a field changes its meaning or",
        "goes, or a kind its name. In version 1 "
        + ", ".join(f"`{now}` was `{former}`" for former, now in FORMER.items())
        + ": such logs are read as well.",
        "",
        "## Every line",
        "",
        *_table(COMMON),
    ]
    for kind in KINDS.values():
        lines += ["", f"## {kind.name}", "", kind.meaning]
        if kind.fields:
            lines += ["", *_table(kind.fields)]
    return "\n".join(lines) + "\n"


def options() -> str:
    """`docs/options.md`: one entry per option."""
    lines = [
        "# Options",
        "",
        "Each option is an argument of `fused_eager(...)` and an environment variable. An argument comes first, then",
        "the variable, then the default. `python -m fused_eager run --option NAME=VALUE script.py` sets one for a",
        "program, and `python -m fused_eager config` prints all with the values that they have here, and where those",
        "come from. `python -m fused_eager.reporting.pages` makes this page from the table in `fused_eager/config.py`.",
    ]
    for name, option in OPTIONS.items():
        lines += ["", f"## {name}", "", f"{option.help}.", ""]
        lines += ["| | |", "|---|---|", f"| environment | `{option.env}` |", f"| values | {option.kind.words} |"]
        lines += [f"| default | `{as_option(option.default)}` |"]
    return "\n".join(lines) + "\n"


def _is_of_a_program(row: Rule) -> bool:
    """Whether a program has entered a row, for a JAX function of its own."""
    return row.defines and row.cls is OpClass.COMPOSITE


def platforms() -> str:
    """`docs/platforms.md`: what is lowered otherwise on one platform than on another."""
    own_rows = {name: row for name, row in RULES.items() if not _is_of_a_program(row)}
    lines = [
        "# Platforms",
        "",
        "A lowering is written once, for any platform that XLA compiles for. Where one platform has a better way, it",
        "has a *variant*. There is one rule of precedence: a platform's own variant comes before the one for any.",
        "This page is made from the tables in `fusion_rules`, `lowering` and `compiling`",
        "(`python -m fused_eager.reporting.pages` writes it).",
        "",
        "## Rows",
        "",
        f"{len(own_rows)} ops have a row; all but these are lowered alike everywhere.",
        "",
        "| op | platform | lowered by |",
        "|---|---|---|",
    ]
    for name, row in sorted(own_rows.items()):
        lines += [f"| `{name}` | {platform} | {_first_line(own)} |" for platform, own in sorted(row.own.items())]
    lines += ["", "## What rows share, and steps of compiling", "", "| what | platform | variant |", "|---|---|---|"]
    compiled = (executable.get_ready, executable.made_in_subprocess, executable.finalize)
    shared = {**VARIANTS, **{v.name: v for v in (rewrites.LAYOUTS, rewrites.REWRITE, *compiled)}}
    for name, each in sorted(shared.items()):
        lines += [f"| `{name}` | any | {_first_line(each.any)} |"]
        lines += [f"| | {p} | {each.why or _first_line(own)} |" for p, own in sorted(each.own.items())]
    return "\n".join(lines) + "\n"


def _first_line(of: Any) -> str:
    """What a variant is, in a line: its docstring's first sentence, or its value."""
    if not callable(of):
        return "nothing" if of is None else f"`{of}`"
    text = " ".join((of.__doc__ or "").split("\n\n")[0].split())
    module = of.__module__.removeprefix("fused_eager.")
    plain = text and not of.__module__.startswith("jax")
    return text.partition(". ")[0].rstrip(".") if plain else f"`{module}.{of.__name__}`"


PAGES: dict[str, Callable[[], str]] = {
    "reasons.md": reasons,
    "event_log.md": event_log,
    "options.md": options,
    "platforms.md": platforms,
}


def main(folder: Path) -> int:
    """Write the pages into `folder`."""
    for name, make in PAGES.items():
        (folder / name).write_text(make())
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs")))
