"""Cures: what in a program keeps a TPU from its speed, on which line, and what a change would gain, says the compiler.

Each finder looks at the ops of a step, one at a time, for one kind of fault.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fused_eager.cache import Key

from .forecast import Alone, Forecast

LANES, ROWS = 128, {4: 8, 2: 16, 1: 32}  # a tile of a TPU's memory: lanes, and rows by the bytes of an element
NOTABLE = 0.01  # of a step's seconds
_PRODUCTS = ("addmm", "mm", "bmm", "baddbmm", "addmv", "mv", "convolution", "linear", "matmul")
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int8": 1, "bool": 1}


@dataclass(frozen=True)
class Cure:
    """One thing to change: the line, what is wrong, what to do, and the seconds of a step that it would gain (0: round
    trips to the host, or compilations, of which the text tells the number)."""

    kind: str
    line: str
    fault: str
    cure: str
    seconds: float


# What the compiler says of a step's seconds in an op if torch's switch for float32 products were another.
WhatIf = Callable[[Sequence[Alone], str], Mapping[Key, float]]


def base(op: str) -> str:
    """An op without its namespace, its overload, and the mark of writing in place."""
    return op.replace("::", ".").split(".")[1].rstrip("_")


def _shapes(row: Alone) -> list[tuple[str, tuple[int, ...]]]:
    return [(read["dtype"], tuple(read["size"])) for read in row.form["reads"]]


def narrow_heads(forecast: Forecast, what_if: WhatIf) -> Iterator[Cure]:
    """Attention whose heads do not fill the lanes."""
    for row in forecast.alone:
        if "scaled_dot_product" not in row.op.name and "flash_attention" not in row.op.name:
            continue
        shapes = [shape for _, shape in _shapes(row) if len(shape) == 4]
        if shapes and shapes[0][-1] % LANES:
            heads, width = shapes[0][1], shapes[0][-1]
            full = LANES * math.ceil(width / LANES)
            fewer = max(heads * width // full, 1)
            yield Cure(
                "heads",
                row.op.line,
                f"{heads} heads of {width}: each product fills {width / full:.0%} of the matrix unit's {full} lanes",
                f"{fewer} head{'s' * (fewer > 1)} of {full} take the same weights",
                row.seconds * (1 - width / full),
            )


def padded(forecast: Forecast, what_if: WhatIf) -> Iterator[Cure]:
    """Products with sizes that are padded by much."""
    for row in forecast.alone:
        if base(row.op.name) not in _PRODUCTS or "conv" in row.op.name:
            continue
        worst, fault, to = 1.25, "", ""
        for dtype, shape in _shapes(row):
            if len(shape) < 2:
                continue
            n, tile = shape[-1], LANES
            to_n = tile * math.ceil(n / tile)
            m = shape[-2]
            rows = ROWS.get(_BYTES.get(dtype, 4), 8)
            to_m = rows * math.ceil(m / rows)
            ratio = to_n * to_m / max(n * m, 1)
            if ratio > worst and n > 1 and m > 1:
                worst, fault = ratio, f"[{m}, {n}] lies in memory as [{to_m}, {to_n}], {ratio:.1f} times as large"
                to = f"sizes that are multiples of {LANES}: {n} -> {to_n}" if to_n != n else f"{m} -> {to_m}"
        if fault:
            yield Cure("padding", row.op.line, fault, to, row.seconds * (1 - 1 / worst))


def wide_products(forecast: Forecast, what_if: WhatIf) -> Iterator[Cure]:
    """Float32 products in full precision, which a TPU computes in six passes of bfloat16."""
    rows = [
        row
        for row in forecast.alone
        if (base(row.op.name) in _PRODUCTS or "scaled_dot_product" in row.op.name)
        and all(dtype == "float32" for dtype, _ in _shapes(row)[:2])
        and row.key.parts["numerics"]["float32_matmul_precision"] == "highest"
    ]
    if not rows:
        return
    after = what_if(rows, "medium")
    gained = sum(row.runs * max(row.cost.seconds - after.get(row.key, row.cost.seconds), 0.0) for row in rows)
    worst = max(rows, key=lambda row: row.seconds)
    if not gained:  # small ones take no longer
        return
    yield Cure(
        "precision",
        worst.op.line,
        f"{sum(row.runs for row in rows)} products of float32 in full precision",
        "torch.set_float32_matmul_precision('medium'), or compute in bfloat16 under torch.autocast",
        gained,
    )


def islands(forecast: Forecast, what_if: WhatIf) -> Iterator[Cure]:
    """Ops that the host computes."""
    for op, times in sorted(forecast.islands.items(), key=lambda item: -item[1]):
        yield Cure(
            "island", "", f"{op} has no lowering: its operands go to the host and back ({times} times in this run)",
            "another op that computes the same; `python -m fused_eager ops` lists what is lowered", 0.0,
        )  # fmt: skip


def changing(forecast: Forecast, what_if: WhatIf) -> Iterator[Cure]:
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


FINDERS: tuple[Callable[[Forecast, WhatIf], Iterator[Cure]], ...] = (
    narrow_heads, padded, wide_products, islands, changing,
)  # fmt: skip


def cures(forecast: Forecast, what_if: WhatIf) -> list[Cure]:
    """All that was found and is worth a word, most time to gain first; findings of one kind on one line are one."""
    merged: dict[tuple[str, str, str], list[Cure]] = defaultdict(list)
    for finder in FINDERS:
        for cure in finder(forecast, what_if):
            merged[cure.kind, cure.line, cure.fault if cure.kind == "island" else ""].append(cure)
    total = sum(row.seconds for row in forecast.alone)
    found = []
    for (kind, line, _), group in merged.items():
        worst = max(group, key=lambda cure: cure.seconds)
        seconds = sum(cure.seconds for cure in group)
        if seconds >= NOTABLE * total or not worst.seconds:
            found.append(Cure(kind, line, worst.fault, worst.cure, seconds))
    return sorted(found, key=lambda cure: -cure.seconds)


