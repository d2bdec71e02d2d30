"""Templates: two streams of the same ops that differ in how many rows they have, written down for one block of rows.

By their difference two streams say which of their values are by rows, and along which axes. A node that reads and makes
whole rows, or values that are the same ones in both, is written down for a block; any other is ATen's, and so is what
is heavy: products and convolutions do not gain by being cut up. Whether a block is then computed as all rows are is not
known here (`lengths`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fused_eager.fusion_rules.geometry import Geometry
from fused_eager.fusion_rules.rowwise import Rows
from fused_eager.fusion_rules.rule import AUTOTUNED, rule_for

from ..devices.home import Home, nbytes_of
from ..planning import plan
from ..planning.order import operands
from ..planning.plan import Plan, Work
from ..tracing.stream import Node, Result, Use
from .executable import Executable

LARGE = 4 << 20  # bytes of the largest value by rows from which on a stream can gain
BLOCK = 1 << 20  # bytes of its part in a block
SHORT = 64 << 10  # bytes of a row, which has more than one axis, at most


class Refused(Exception):
    """Why streams are not computed in blocks of rows."""


class Unlike(Refused):
    """Why two streams do not say how many rows they have; others of their kind may."""


@dataclass(frozen=True, slots=True)
class Grid(Rows):
    """Rows of which a block has as many axes as all of them, of two or more each: what has an axis of size 1 is often
    written down in another way. `blocks` are their sizes, of which `block` is the product.
    """

    blocks: tuple[int, ...] = ()

    def of_block(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a block of a value by rows."""
        axes, pairs, sizes = self.axes(shape), iter(zip(self.sizes, self.blocks, strict=True)), []
        for n in shape[:axes]:
            whole = part = 1
            while whole < n:  # an axis may be the product of several
                size, block = next(pairs)
                whole, part = whole * size, part * block
            sizes.append(part)
        return (*sizes, *shape[axes:])


def grid(sizes: tuple[int, ...], block: int) -> Grid:
    """Rows along axes of these sizes, in blocks of so many: a power of two."""
    return Grid(sizes, block, (*(2 for _ in sizes[1:]), block >> len(sizes) - 1))


# ---- views, values and nodes of a block --------------------------------------------------------------------------


def _view(rows: Rows, g: Geometry, row: int) -> Geometry | None:
    """A view, for a block; None if it is none of whole rows. `row` are the elements of a row of the value, 0 if it is
    the same for all rows.
    """
    axes = rows.axes(g.size)
    if not axes or (not row and any(g.stride[:axes])):
        return None if row else g
    step = g.stride[axes - 1]
    if step != row or g.offset >= max(row, 1):
        return None
    if any(n != 1 and g.stride[a] != step * math.prod(g.size[a + 1 : axes]) for a, n in enumerate(g.size[:axes])):
        return None
    size = rows.of_block(g.size)
    outer = [step * math.prod(size[a + 1 : axes]) for a in range(axes)]
    return g._replace(size=size, stride=(*outer, *g.stride[axes:]))


def _home(rows: Rows, home: Home) -> Home:
    return home[0], rows.of_block(home[1])


Parts = tuple[tuple[Use, ...], tuple[Result, ...]]


def _parts(node: Node, rows: Rows, by_rows: frozenset[int], homes: Mapping[int, Home]) -> Parts | None:
    """What a node reads and makes, for a block; None if that is not whole rows, or what there is but one of."""

    def view(vid: int, g: Geometry) -> Geometry | None:
        dtype, shape = homes[vid]
        if vid not in by_rows:
            return _view(rows, g, 0)
        return _view(rows, g, math.prod(shape) // rows.count) if dtype.itemsize == g.dtype.itemsize else None

    uses, results = [], []
    for use in node.uses:
        g = view(use.vid, use.geometry)
        if g is None or use.start is not None:
            return None
        uses.append(use._replace(geometry=g))
    for made in node.results:
        g, seen = view(made.vid, made.geometry), made.spec
        outside = view(made.vid, Geometry(seen.shape, seen.strides, 0, seen.dtype))
        like_base = made.base is None or (made.base in by_rows) is (made.vid in by_rows)
        if g is None or outside is None or not like_base:
            return None
        spec = replace(seen, shape=outside.size, strides=outside.stride)
        home = _home(rows, made.home) if made.vid in by_rows else made.home
        results.append(made._replace(home=home, geometry=g, spec=spec))
    return tuple(uses), tuple(results)


def _is_same(a: Any, b: Any) -> bool:
    """Whether two arguments are, for any op: 1, 1.0 and True are not, and neither are 0.0 and -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_is_same(v, b[k]) for k, v in a.items())
    return repr(a) == repr(b) if isinstance(a, (float, complex)) else bool(a == b)


def _is_called_alike(node: Node, other: Node) -> bool:
    """Whether two nodes of one op have the same arguments, but for tensors and hoisted numbers."""
    return (
        node.targets == other.targets
        and [type(s) for s in node.scalars] == [type(s) for s in other.scalars]
        and _is_same(node.args, other.args)
        and _is_same(node.kwargs, other.kwargs)
    )


# ---- templates ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class Template:
    """Streams of any length as one.

    The values `by_rows`, and the nodes but for `islands`, are those of a block; `loose` are values that differ in
    another way, which only islands know. The first `axes` axes of the value `counted` count the rows, of which the
    longest has `row` bytes.
    """

    nodes: list[Node]
    islands: frozenset[int]
    homes: dict[int, Home]
    by_rows: frozenset[int]
    loose: frozenset[int]
    counted: int
    axes: int
    row: int
    block: int
    plan: Plan
    executables: tuple[Executable | None, ...] = ()
    number: int = 0  # names the plan in events

    def rows_of(self, homes: Mapping[int, Home]) -> Grid:
        """The rows of a stream with these values."""
        return grid(homes[self.counted][1][: self.axes], self.block)

    def executables_of(self, homes: Mapping[int, Home]) -> tuple[Executable | None, ...]:
        """What runs the regions of a stream with these values."""
        count, found = self.rows_of(homes).count, []
        for region, shared in zip(self.plan.regions, self.executables, strict=True):
            outputs = [homes[v] for v in region.outputs]
            if shared is not None:
                needs = shared.needs + sum(nbytes_of(home) for home in outputs)
                shared = replace(shared, call=functools.partial(shared.call, count, outputs), needs=needs)
            found.append(shared)
        return tuple(found)

    def is_worth(self, work: Work) -> bool:
        """Whether a stream is long enough to gain."""
        count = self.rows_of(work.homes).count
        return count >= self.block and count * self.row >= LARGE

    def fits(self, work: Work) -> bool:
        """Whether a stream with the same ops is one of these."""
        homes = work.homes
        if homes.keys() != self.homes.keys() or len(homes[self.counted][1]) < self.axes:
            return False
        rows = self.rows_of(homes)
        if min(rows.sizes) < 2:
            return False
        for vid in homes.keys() - self.loose:
            home = homes[vid]
            if vid in self.by_rows:
                if not rows.axes(home[1]):
                    return False
                home = _home(rows, home)
            if home != self.homes[vid]:
                return False
        pairs = enumerate(zip(work.nodes, self.nodes, strict=True))
        return all(self._is_one(i in self.islands, node, own, rows, homes) for i, (node, own) in pairs)

    def _is_one(self, island: bool, node: Node, own: Node, rows: Rows, homes: Mapping[int, Home]) -> bool:
        if island:  # run as it is: only what it reads and makes has to be the same
            made = [r.vid for r in own.results]
            return operands(node) == operands(own) and [r.vid for r in node.results] == made
        return _is_called_alike(node, own) and _parts(node, rows, self.by_rows, homes) == (own.uses, own.results)


def template(now: Work, before: Work) -> Template:
    """Two streams of the same ops as one.

    Raises:
        Unlike: they differ in more than the number of their rows, or not in that.
        Refused: their rows are too long.
    """
    homes, old = now.homes, before.homes
    if homes.keys() != old.keys():
        raise Unlike("their values are not the same ones")
    least = {v: _least(old[v], homes[v]) for v in homes if homes[v] != old[v]}
    if not least or any(0 in homes[v][1] for v in least):
        raise Unlike("nothing changes its length, or becomes nothing")
    counted, rows = _rows(homes, least)
    if min(rows.sizes) < 2:
        raise Unlike("one of the lengths is 1")
    by_rows = frozenset(v for v in least if rows.axes(homes[v][1]) >= least[v])
    loose = frozenset(least) - by_rows
    row = max((nbytes_of(homes[v]) // rows.count for v in by_rows), default=BLOCK)
    if row << len(rows.sizes) > BLOCK:
        raise Refused(f"a row has {row} bytes")
    rows = grid(rows.sizes, 1 << (BLOCK // row).bit_length() - 1)
    nodes, islands = list(now.nodes), {}
    for i, (node, old_node) in enumerate(zip(now.nodes, before.nodes, strict=True)):
        is_for_aten = not _is_called_alike(node, old_node) or _is_for_aten(node, by_rows, loose)
        parts = None if is_for_aten else _parts(node, rows, by_rows, homes)
        if parts is None:
            islands[i] = "it is not computed row by row"
        else:
            nodes[i] = node.with_parts(*parts)
    blocks = {v: _home(rows, home) if v in by_rows else home for v, home in homes.items()}
    most, room = now.config.max_region, now.device.housekeeping.room
    made = plan.make_plan(nodes, now.live, frozenset(), blocks, islands, most, now.reason, room=room)
    alone = frozenset(islands)
    found = Template(nodes, alone, blocks, by_rows, loose, counted, len(rows.sizes), row, rows.block, made)
    if not (found.fits(now) and found.fits(before)):
        raise Unlike("they differ in more than the number of their rows")
    return found


def _least(old: Home, now: Home) -> int:
    """How many first axes of a value at least count what its streams differ in."""
    if old[0] is not now[0] or len(old[1]) != len(now[1]):
        raise Unlike("a value has another dtype, or another number of axes")
    return max(i for i, (a, b) in enumerate(zip(old[1], now[1], strict=True)) if a != b) + 1


def _rows(homes: Mapping[int, Home], least: Mapping[int, int]) -> tuple[int, Rows]:
    """A value whose first axes count the rows of as many of those that change as there can be, and these rows: short
    ones."""
    candidates: dict[tuple[int, ...], int] = {}
    for v, axes in least.items():
        candidates.setdefault(homes[v][1][:axes], v)

    def alike(sizes: tuple[int, ...]) -> int:
        return sum(Rows(sizes, 1).axes(homes[v][1]) >= axes for v, axes in least.items())

    sizes = max(candidates, key=lambda sizes: (alike(sizes), math.prod(sizes), -candidates[sizes]))
    counted = candidates[sizes]
    (dtype, shape), axes = homes[counted], len(sizes)
    while axes < len(shape) - 1 and math.prod(shape[axes:]) * dtype.itemsize > SHORT:
        axes += 1
    return counted, Rows(shape[:axes], 1)


def _is_for_aten(node: Node, by_rows: frozenset[int], loose: frozenset[int]) -> bool:
    """Whether a node is heavy, knows a loose value, or makes of rows what there is but one of, as a sum does."""
    read, made = set(operands(node)), {r.vid for r in node.results}
    found = rule_for(node.twin)
    heavy = found is not None and found.cls in AUTOTUNED
    return heavy or not loose.isdisjoint(read | made) or (not by_rows.isdisjoint(read) and not by_rows.issuperset(made))
