"""A forecast as text, and as a page in the style of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from . import source
from .cures import Cure
from .forecast import LIMITS, Forecast
from .html import templates
from .source import short
from .text import amount, duration

ROWS, ROWS_OF_A_PAGE = 8, 200


def chip(made: Forecast) -> str:
    """What is known of the chip."""
    it = made.target.chip
    return f"{it.kind}: {it.flops / 1e12:.0f} Tflop/s in bfloat16, {amount(it.hbm)} at {it.bandwidth / 1e9:.0f} GB/s"


def notes(made: Forecast) -> list[str]:
    """What is not in the figures."""
    said = ["Time between launches is not in it, nor is what it has no figure for (unjudged instructions)."]
    if any(mode.cycles for mode in made.modes):
        said.append("Time is its analysis of operations and bytes; cycles are of the kernels that it counts them for.")
    if made.uncounted:
        said.append(
            "The compiler counts one pass through the matrix unit for each product. Those of float32 make more, in "
            f"every mode: {duration(made.uncounted)} that are not in it."
        )
    return said


def millions(cycles: float) -> str:
    """Cycles; a compiler that counts none has none."""
    return f"{cycles / 1e6:.3g} M" if cycles else "-"


def as_text(made: Forecast, found: Sequence[Cure], failed: Mapping[str, str]) -> str:
    """The forecast as text."""
    lines = [
        f"One step on one device of {made.target} ({chip(made)}), as XLA's compiler expects it.",
        *notes(made),
        "",
        f"{'mode':<8}{'time':>10}{'unjudged':>10}{'cycles':>10}{'without':>9}{'launches':>10}{'memory':>10}"
        f"{'of chip':>9}{'moved':>10}{'Gflop':>9}{'of peak':>9}",
    ]
    for mode in made.modes:
        lines.append(
            f"{mode.name:<8}{duration(mode.seconds):>10}{mode.unjudged:>10}{millions(mode.cycles):>10}"
            f"{mode.uncounted_kernels:>9}{mode.launches:>10}{amount(mode.memory):>10}"
            f"{mode.memory / made.target.chip.hbm:>9.0%}{amount(mode.bytes):>10}"
            f"{mode.flops / 1e9:>9.3g}{mode.share(made.target):>9.1%}  {LIMITS[mode.name]}"
        )
    for title, share in (("by line", made.lines), ("by module", made.modules)):
        total = sum(share.values()) or 1.0
        lines += ["", f"Where the time goes, fused, {title}:"]
        lines += [
            f"  {seconds / total:>5.0%} {duration(seconds):>9}  {short(name) if title == 'by line' else name}"
            for name, seconds in list(share.items())[:ROWS]
        ]
    lines += ["", "What would make it faster:" if found else "Nothing was found that would make it faster."]
    for cure in found:
        all_of_it = duration(made.mode("strict").seconds + made.uncounted)
        gain = f"{duration(cure.seconds)} of {all_of_it} one op at a time" if cure.seconds else ""
        lines.append(f"  {short(cure.line)}  {cure.fault}".rstrip())
        lines.append(f"      {cure.cure}{f': gains about {gain}' if gain else ''}")
    if failed:
        lines += ["", "What could not be compiled, and is left out of the figures:"]
        lines += [f"  {name}: {why}" for name, why in failed.items()]
    return "\n".join(lines)


def as_html(program: str, made: Forecast, found: Sequence[Cure], failed: Mapping[str, str]) -> str:
    """The forecast as one page that needs nothing else."""
    longest = max((mode.seconds for mode in made.modes), default=0.0) or 1.0
    shares = []
    for title, share in (("line", made.lines), ("module", made.modules)):
        total = sum(share.values()) or 1.0
        rows = [(name, seconds, f"{seconds / total:.1%}") for name, seconds in list(share.items())[:ROWS_OF_A_PAGE]]
        shares.append((title, rows))
    return templates().get_template("forecast.html.j2").render(
        program=program,
        target=str(made.target),
        chip=chip(made),
        notes=notes(made),
        modes=[
            (
                mode,
                LIMITS[mode.name],
                round(100 * mode.seconds / longest, 2),
                f"{mode.memory / made.target.chip.hbm:.1%}",
                f"{mode.share(made.target):.1%}",
                millions(mode.cycles),
            )
            for mode in made.modes
        ],
        cures=[(cure, source.text(cure.line)) for cure in found],
        shares=shares,
        failed=failed,
    )
