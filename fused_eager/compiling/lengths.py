"""Lengths: one executable for streams that differ in how many rows they have, where no row depends on another.

Lengths that keep changing would compile for ever. The known way out is to pad each to one of a few, its bucket, which
copies every input and computes what nobody asked for. Where rows do not depend on each other neither is needed: one
executable for a block of rows is called for one block after the other (`block_by_block`).

Two streams written down for a block are one (`template`). That each computes a block as it would compute all is proved,
not assumed: traced as they are, all of their primitives are such that compute a row from the same row
(`fusion_rules.rowwise`), and with the shapes of a block what they compute is, value for value, what the traced block
computes. A further stream has only to be the same when it is written down for a block.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fused_eager.fusion_rules import precision

from ..bounded import Bounded
from ..devices.home import Home, nbytes_of
from ..devices.host.device import INLINE
from ..log.events import LOG
from ..log.site import describe
from ..lowering.failed import NodeFailed
from ..planning.plan import Region, Work
from ..tracing.opinfo import OpInfo
from ..tracing.stream import Stream
from ..tracing.structure import Output
from ..tracing.trace import Step
from . import background, emit
from .block_by_block import BlockByBlock
from .caching import settings
from .compile import Computation, Executable, load_or_compile, trace
from .ready import Ready
from .template import LARGE, Refused, Template, Unlike, template

if TYPE_CHECKING:
    from ..lowering.straight_line import Program

Op = tuple[OpInfo, Hashable]  # an op, and the line from where it is called

_BEFORE: Bounded[Hashable, Work] = Bounded(64)  # the last stream of each kind
_FOUND: Bounded[Hashable, Template | str] = Bounded(256)  # and what has become of them: a text says why nothing has
_TRIED: Bounded[Hashable, int] = Bounded(256)  # how often two of a kind said nothing about it
TRIES = 4
_MAKING = "it is being compiled"
# The lines from which streams come that are run block by block, once they are recorded.
PLACES: Bounded[Hashable, bool] = Bounded(256)


def strays(
    stream: Stream,
    expected: Step | None,
    op: Op,
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[Output] | None = None,
) -> bool:
    """Whether a stream is to be given up at a call unlike any that came there before: the op is the one that was
    expected, on tensors of another length. Nobody knows whether that length will come again, and writing down what
    follows costs more than running it; not where it is so large that this is little beside it, and that it may be run
    block by block. Only in a loop that reads, for it goes on at the next read.

    Args:
        op: what is called, and where.
        tensors: its operands.
        outputs: what it returns, if that is known.
    """
    if expected is None or stream.config.waits or not stream.after_read:
        return False
    if op != (expected.info, expected.node.place):
        return False
    a: list[Home] = [(v.geometry.dtype, v.geometry.size) for v in expected.call.views]
    b: list[Home] = [(t.dtype, tuple(t.shape)) for t in tensors]
    if outputs is not None:
        a, b = a + _homes(expected.call.outputs), b + _homes(outputs)
    alike = [(dtype, len(size)) for dtype, size in a] == [(dtype, len(size)) for dtype, size in b]
    return alike and a != b and max(map(nbytes_of, b)) < LARGE


def _homes(outputs: Sequence[Output]) -> list[Home]:
    return [(o.spec.dtype, o.spec.shape) for o in outputs]


def find(skeleton: Hashable, work: Work, unstable: bool) -> Template | None:
    """What runs a large stream of any length; None if nothing does. If its lengths keep changing, it is made: at once
    where the program waits for what is compiled, else in the background."""
    if not is_large(work):
        return None
    config = work.config
    values = tuple([(dtype, len(shape)) for dtype, shape in work.homes.values()])
    flags = (config.check_bounds, config.max_region, work.switches, work.default)
    key = (work.nodes[0].place, skeleton, values, work.live, flags)
    if key not in _FOUND:
        before = _BEFORE.get(key)
        _BEFORE[key] = work
        if not unstable or before is None or before.homes == work.homes:
            return None
        _FOUND[key] = _MAKING
        if config.waits:
            _make(key, work, before)
        elif not background.add(lambda: _make(key, work, before)):
            _FOUND[key] = "the interpreter ends"
    found = _FOUND.get(key) if unstable else None
    return found if isinstance(found, Template) and found.fits(work) and found.is_worth(work) else None


def ready(found: Template, work: Work) -> Ready:
    """What runs a stream of a kind, which is long enough to gain."""
    return Ready(found.plan, found.executables_of(work.homes), True, found.number, varies=True)


def forget() -> None:
    """Let go of all executables."""
    _FOUND.clear()
    PLACES.clear()


def is_large(work: Work) -> bool:
    """Whether a stream could gain by being run in blocks."""
    return max(map(nbytes_of, work.homes.values()), default=0) >= LARGE


def _make(key: Hashable, work: Work, before: Work) -> None:
    """Find out what becomes of streams of a kind, and say so."""
    if background.is_closing():
        return
    refusal, rows = "", 0
    try:
        with precision.as_of(work.switches):
            _FOUND[key] = found = made(work, before)
        rows = found.block
        PLACES[work.nodes[0].place] = True
    except (Refused, NodeFailed) as refused:
        _TRIED[key] = tried = _TRIED.get(key, 0) + 1
        if isinstance(refused, Unlike) and tried < TRIES:  # found out again when the next one comes
            _FOUND.pop(key, None)
            return
        _FOUND[key] = refusal = str(refused)
    except Exception as error:
        _FOUND[key] = refusal = f"{type(error).__name__}: {error}"
    except BaseException:
        _FOUND.pop(key, None)
        raise
    _BEFORE.pop(key, None)
    LOG.emit("lengths", site=str(describe(work.nodes[0].place)), ops=len(work.nodes), rows=rows, why=refusal)


def made(work: Work, before: Work) -> Template:
    """Two streams of one kind, of different lengths, as one of any length.

    Raises:
        Refused: rows depend on each other, or that is not known.
        NodeFailed: a node has no lowering.
    """
    found = template(work, before)
    pairs: list[tuple[Region, Executable | None]] = []
    refusals = []
    for region in found.plan.regions:
        try:
            pairs.append((region, _executable(work, before, found, region)))
        except (Refused, NodeFailed) as refused:
            refusals.append(str(refused))
            pairs.append((replace(region, how="aten"), None))
    if not any(executable for _, executable in pairs):
        raise Refused("; ".join(sorted(set(refusals))) or "no tensor sees what it computes")
    if torch.get_default_dtype() is not work.default:
        raise Refused("the default dtype, which lowerings read, was changed meanwhile")
    plan = replace(found.plan, regions=tuple([region for region, _ in pairs]))
    executables = tuple([executable for _, executable in pairs])
    number = emit.planned(plan, work.nodes, work.homes, executables)
    return replace(found, plan=plan, executables=executables, number=number)


def _executable(work: Work, before: Work, of: Template, region: Region) -> Executable:
    """What runs a region block by block.

    Raises:
        Refused: nothing does.
        NodeFailed: one of its nodes has no lowering.
    """
    from ..lowering.straight_line import flatten  # and JAX with it

    if region.how != "xla":
        raise Refused(f"{work.nodes[region.nodes[0]].op} is not computed row by row")
    if len(region.nodes) < 2:
        raise Refused("one op alone gains nothing")
    if of.by_rows.isdisjoint(region.inputs) or not of.by_rows.issuperset(region.outputs):
        raise Refused("what it takes or hands out is not by rows")
    rows = Computation(of.nodes, region, of.homes)
    block = flatten(trace(rows, work.config.check_bounds))
    prove(work, of, region, block)
    prove(before, of, region, block)
    whole = load_or_compile(rows, settings(work.config, INLINE))
    if whole.checks:
        raise Refused(f"{whole.checks[0].error} may have to be raised")
    return replace(whole, call=BlockByBlock(of, region, whole), key="", is_shared=True)


def prove(work: Work, of: Template, region: Region, block: Program) -> None:
    """See that a region of a stream computes the rows of each block as the traced block does.

    Raises:
        Refused: it does not, or nobody knows.
    """
    from ..lowering.straight_line import Numbering, flatten
    from ..lowering.xla_cpu.row_blocks import cut

    rows = of.rows_of(work.homes)
    whole = flatten(trace(Computation(work.nodes, region, work.homes), work.config.check_bounds))
    found = cut(whole, rows)
    mixed = [*found.partial, *found.after]
    if mixed:
        raise Refused(f"rows depend on each other ({mixed[0].eqn.primitive.name})")
    sizes = [(whole.avals[v].shape, v in found.by_rows) for v in whole.inputs]
    if [rows.of_block(s) if by_rows else s for s, by_rows in sizes] != [block.avals[v].shape for v in block.inputs]:
        raise Refused("something else has as many rows")
    results = whole.outputs[: len(region.outputs)]
    if not {v for v in results if type(v) is int} <= found.by_rows:
        raise Refused("a result is not by rows")
    numbering, params = Numbering(), {id(step): params for step, params in found.inside}
    if numbering.of(whole, params)[: len(results)] != numbering.of(block, {})[: len(results)]:
        raise Refused("a block is not computed as all rows are")
