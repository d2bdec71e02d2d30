"""Cures: what in a program keeps a TPU from its speed, on which line, and what a change would gain.

Each finder looks at the ops of a step, one at a time, for one kind of fault. What it says would be gained is estimated
from sizes and from the times that the compiler gives the ops alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .forecast import PASSES, PRODUCTS, Alone, Forecast

LANES, ROWS = 128, {8: 8, 4: 8, 2: 16, 1: 32}  # a tile of a TPU's memory: lanes, and rows by the bytes of an element
NOTABLE = 0.01  # of a step's seconds
MANY = 1024  # numbers whose sum has more digits than bfloat16 keeps
_BATCHED = ("bmm", "baddbmm")
_COPIES = ("clone", "contiguous", "_to_copy")
_SUMS = ("sum", "mean", "logsumexp", "nll_loss_forward", "mse_loss", "linalg_vector_norm")
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int8": 1, "bool": 1}


@dataclass(frozen=True)
class Cure:
    """One thing to change: the line, what is wrong, what to do, and the seconds of a step that it gains (0: none of
    the device's, and the text tells what)."""

    kind: str
    line: str
    fault: str
    cure: str
    seconds: float


def narrow_heads(forecast: Forecast) -> Iterator[Cure]:
    """Attention whose heads do not fill the lanes."""
    for row in forecast.alone:
        width, heads = _narrow(row)
        if width:
            full = _full(width)
            fewer = max(heads * width // full, 1)
            yield Cure(
                "heads",
                row.op.line,
                f"{heads} heads of {width}: each product fills {width / full:.0%} of the matrix unit's {full} lanes",
                f"{fewer} head{'s' * (fewer > 1)} of {full} take the same weights",
                row.seconds * (1 - width / full),
            )


def _narrow(row: Alone) -> tuple[int, int]:
    """The width of an op's heads where it leaves lanes empty, else 0; and how many heads there are, of all sequences
    where the op does not tell them apart."""
    shapes = [shape for _, shape in row.reads]
    if "scaled_dot_product" in row.op.name or "flash_attention" in row.op.name:
        four = [shape for shape in shapes if len(shape) == 4]
        return (four[0][-1], four[0][1]) if four and four[0][-1] % LANES else (0, 0)
    if row.base in _BATCHED and len(shapes) >= 2 and shapes[-1][0] > 1:
        # Attention's products: heads of queries with keys, and then with values.
        (batch, _, inner), (_, _, outer) = shapes[-2:]
        width = min(inner, outer)
        return (width, batch) if width % LANES and 8 <= width < LANES else (0, 0)
    return 0, 0


def padded(forecast: Forecast) -> Iterator[Cure]:
    """Products with sizes that are padded by much: a little less takes less time, or more would take no more."""
    total = sum(row.seconds for row in forecast.alone)
    for row in forecast.alone:
        if row.base not in PRODUCTS or "conv" in row.op.name or _narrow(row)[0]:
            continue
        sizes = {(*shape[-2:], ROWS[_BYTES.get(dtype, 4)]) for dtype, shape in row.reads if len(shape) > 1}
        # XLA lays a matrix out by rows or by columns, whichever is less.
        laid = [min((rows * math.ceil(m / rows) * _full(n) / (m * n), m, n, rows),
                    (rows * math.ceil(n / rows) * _full(m) / (m * n), n, m, rows))
                for m, n, rows in sizes if m > 1 and n > 1]  # fmt: skip
        worst, m, n, tile = max(laid, default=(1.0, 0, 0, 8))
        if worst < 1.25:
            continue
        rows = tile * math.ceil(m / tile)
        fault = f"[{m}, {n}] lies in memory as [{rows}, {_full(n)}], {worst:.1f} times as large"
        fewer = _full(n) - LANES
        if n % LANES and fewer and (n - fewer) / n < 0.15:
            gained = row.seconds * (1 - fewer / _full(n))
            cure = f"{fewer} instead of {n}: multiples of {LANES} fill the tiles"
            yield Cure("padding", row.op.line, fault, cure, gained)
        elif row.seconds * (1 - 1 / worst) >= NOTABLE * total:
            most = f"{_full(n)} instead of {n}" if n % LANES else f"{rows} instead of {m}"
            yield Cure("padding", row.op.line, fault, f"{most} would take no more time", 0.0)


def _full(n: int) -> int:
    """A size with its padding."""
    return LANES * math.ceil(n / LANES)


def wide_products(forecast: Forecast) -> Iterator[Cure]:
    """Float32 products in full precision, which pass through a TPU's matrix unit several times."""
    rows = [row for row in forecast.alone if row.uncounted(forecast.target)]
    if rows:
        level = rows[0].key.parts["numerics"]["float32_matmul_precision"]
        yield Cure(
            "precision",
            max(rows, key=lambda row: row.uncounted(forecast.target)).op.line,
            f"{sum(row.runs for row in rows)} products of float32 pass through the matrix unit {PASSES[level]} times",
            "torch.set_float32_matmul_precision('medium'), or compute in bfloat16 under torch.autocast",
            forecast.uncounted,
        )


def lookups(forecast: Forecast) -> Iterator[Cure]:
    """Rows of a small table, which are fetched one by one where a product would have them all at once."""
    for row in forecast.alone:
        if row.base != "embedding":
            continue
        (dtype, (entries, width)), (_, ids) = row.reads[:2]
        passes = PASSES[row.key.parts["numerics"]["float32_matmul_precision"]] if dtype == "float32" else 1
        chip, count = forecast.target.chip, math.prod(ids)
        by_product = max(
            2 * passes * count * entries * width / chip.flops,
            (count + entries) * width * _BYTES.get(dtype, 4) / chip.bandwidth,
        )
        gained = row.runs * (row.cost.seconds - by_product)
        if gained > 0.3 * row.seconds:  # the estimate of a product is no better than that
            yield Cure(
                "lookup",
                row.op.line,
                f"{count} rows of a table of {entries} are fetched one by one",
                f"F.one_hot(ids, {entries}).to(table.dtype) @ table: a product of that size takes less",
                gained,
            )


def relayouts(forecast: Forecast) -> Iterator[Cure]:
    """Values that are copied into another order of their dimensions, twice or more on a line."""
    rows = [row for row in forecast.alone if row.base in _COPIES and _is_turned(row)]
    runs: dict[str, int] = defaultdict(int)
    for row in rows:
        runs[row.op.line] += row.runs
    for row in rows:
        if runs[row.op.line] > 1:
            yield Cure(
                "layout",
                row.op.line,
                f"values are copied into another order of their dimensions, {runs[row.op.line]} times in a step: "
                f"{list(row.reads[0][1])}",
                "keep one order: products and einsum take operands in any, so leave out contiguous()",
                row.seconds,
            )


def _is_turned(row: Alone) -> bool:
    read, made = row.form["reads"][0], row.form["makes"][0]
    strides = [stride for stride, size in zip(read.get("stride") or (), read["size"], strict=False) if size > 1]
    return "stride" not in made and 0 not in strides and list(strides) != sorted(strides, reverse=True)


def coarse_sums(forecast: Forecast) -> Iterator[Cure]:
    """A sum of many numbers that bfloat16 holds, of which its 8 bits keep two or three digits."""
    for row in forecast.alone:
        if row.base not in _SUMS or not row.reads:
            continue
        (dtype, shape), made = row.reads[0], row.form["makes"][0]
        if dtype == made["dtype"] == "bfloat16" and not math.prod(made["size"]) > 1 and math.prod(shape) >= MANY:
            yield Cure(
                "rounding",
                row.op.line,
                f"{row.base} of {math.prod(shape)} numbers is rounded to bfloat16: two or three digits are left of it",
                "sum in float32: .float() before it, or dtype=torch.float32",
                0.0,
            )


def islands(forecast: Forecast) -> Iterator[Cure]:
    """Ops that the host computes."""
    for op, times in sorted(forecast.islands.items(), key=lambda item: -item[1]):
        yield Cure(
            "island",
            forecast.places.get(op, ""),
            f"{op} has no lowering: its operands go to the host and back ({times} times in this run)",
            "another op that computes the same; `python -m fused_eager ops` lists what is lowered",
            0.0,
        )


def changing(forecast: Forecast) -> Iterator[Cure]:
    """Regions that come anew as the program goes on."""
    if forecast.late:
        first = forecast.late[0]
        yield Cure(
            "recompiles",
            first.ops[0].line,
            f"{len(forecast.late)} regions came in the third step or later with other shapes or numbers than before",
            "pad to a few sizes, and keep numbers that change in tensors",
            0.0,
        )


FINDERS: tuple[Callable[[Forecast], Iterator[Cure]], ...] = (
    narrow_heads, padded, wide_products, lookups, relayouts, coarse_sums, islands, changing,
)  # fmt: skip


def cures(forecast: Forecast) -> list[Cure]:
    """All that was found and is worth a word, most time to gain first; findings of one kind on one line are one."""
    merged: dict[tuple[str, str, str], list[Cure]] = defaultdict(list)
    for finder in FINDERS:
        for cure in finder(forecast):
            merged[cure.kind, cure.line, cure.fault if cure.kind == "island" else ""].append(cure)
    total = sum(row.seconds for row in forecast.alone) + forecast.uncounted
    found = []
    for (kind, line, _), group in merged.items():
        worst = max(group, key=lambda cure: cure.seconds)
        seconds = sum(cure.seconds for cure in group)
        if seconds >= NOTABLE * total or not worst.seconds:
            found.append(Cure(kind, line, worst.fault, worst.cure, seconds))
    return sorted(found, key=lambda cure: -cure.seconds)


