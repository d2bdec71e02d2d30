"""Verifying: a fraction of the regions is run again through ATen, on the same inputs, and the values are compared.

What is too much of a difference? Rounding errors of a long region may be larger than any fixed tolerance, so where
values differ by more than torch's tolerance for one op, ATen runs the region again with each result disturbed in its
last digit (stochastic arithmetic): what such a run changes as much is rounding, all else is a mistake. After a
mistake the first op that goes wrong is looked for and told, and ATen's values are used.
"""

from __future__ import annotations

import os
import random
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fused_eager.fusion_rules.geometry import Geometry
from fused_eager.fusion_rules.lowering import map_leaves

from ..compiling.key import Computation
from ..devices.home import Home
from ..errors import WrongResult
from ..log.events import LOG
from ..log.reasons import Reason
from ..log.site import describe
from ..planning.plan import Region
from ..quiet import as_eager
from ..tracing.stream import Hole, Node, Ref, place_of, places, targets_of
from .island import as_home, run_node, view

Values = dict[int, Any]
RunRegion = Callable[[Computation, Sequence[torch.Tensor]], Sequence[Any]]  # how a region is run: inputs -> outputs

TRIALS = 3  # disturbed runs
FACTOR = 16.0  # how much larger than what they change a difference may be
_dice = random.Random(0)  # its own: the program's random numbers are not touched


@dataclass(frozen=True, slots=True)
class Finding:
    """A mistake: the node, its first wrong value, and whether it is wrong by itself or only inside the region."""

    node: int
    vid: int
    difference: str
    alone: bool


def is_due(share: float) -> bool:
    """Whether to verify the next region, of which the fraction `share` is to be verified."""
    return share > 0 and _dice.random() < share


def keep(region: Region, values: Values) -> Values:
    """Copies of a region's inputs, taken before it runs: it may reuse their memory."""
    return {v: as_home(values[v]).clone() for v in region.inputs}


def verify(computation: Computation, kept: Values, outputs: Sequence[Any], run: RunRegion) -> Sequence[Any]:
    """Compare a region's outputs with ATen's.

    Returns:
        The outputs, or ATen's where they differ by more than rounding; then a `WrongResult` has been warned of.
    """
    region = computation.region
    try:
        truth = _by_aten(computation, kept)
    except Exception:
        return outputs  # ATen refuses the values: the region's own checks say so at the next sync
    LOG.count("verified region")
    made = dict(zip(region.outputs, map(as_home, outputs), strict=True))
    views = _views(computation)
    if not any(_off(truth[v], made[v], views.get(v)) for v in region.outputs):
        return outputs
    disturbed = [_by_aten(computation, kept, disturb=True) for _ in range(TRIALS)]
    wrong = [v for v in region.outputs if _differs(v, truth, made, disturbed, views)]
    if not wrong:
        return outputs
    _tell(computation, kept, _find(computation, kept, truth, disturbed, views, wrong, made, run))
    return [truth[v] for v in region.outputs]


def _by_aten(computation: Computation, kept: Values, disturb: bool = False) -> Values:
    values = dict(kept)
    with as_eager():
        for node in computation.chosen:
            run_node(node, values)
            if disturb:
                for r in node.results:
                    values[r.vid] = _disturb(as_home(values[r.vid]))
    return values


_noise = torch.Generator()


def _disturb(t: torch.Tensor) -> torch.Tensor:
    """Each number as it could have been rounded."""
    if not (t.is_floating_point() or t.is_complex()) or t.dtype.itemsize == 1:
        return t
    steps = torch.randint(-1, 2, t.shape, generator=_noise).to(t.dtype)
    return t * (1 + torch.finfo(t.dtype).eps * steps)


def _views(computation: Computation) -> dict[int, Geometry]:
    """The values whose homes have gaps that nobody has written: only what the op wrote of them can be compared."""
    gaps: dict[int, Geometry] = {}
    for node in computation.chosen:
        for r, place in zip(node.results, places(node), strict=True):
            count = 1
            for n in r.home[1]:
                count *= n
            if (r.base is None and count != r.spec.numel) or r.base in gaps:
                gaps[r.vid] = place
    return gaps


def _off(want: Any, got: Any, gaps: Geometry | None) -> str:
    """How two values differ by more than torch's tolerance for one op; "" if they do not."""
    a, b = as_home(want), as_home(got)
    if gaps is not None:
        a, b = view(a, gaps), view(b, gaps)
    if not (a.is_floating_point() or a.is_complex()):
        return "" if torch.equal(a, b) else f"{int((a != b).sum())} of {a.numel()} elements differ"
    if a.dtype.itemsize == 1:
        a, b = a.float(), b.float()
    rtol, atol = torch.testing._comparison.default_tolerances(a.dtype)
    bad = ~torch.isclose(b, a, rtol=rtol, atol=atol, equal_nan=True)
    if not bad.any():
        return ""
    largest = float((a - b).abs()[bad].nan_to_num().max())
    return f"{int(bad.sum())} of {a.numel()} elements differ, by up to {largest:.3g}"


def _spread(want: Any, other: Any, gaps: Geometry | None) -> float:
    """The largest difference of two values; infinite where one is finite and the other is not."""
    a, b = as_home(want), as_home(other)
    if gaps is not None:
        a, b = view(a, gaps), view(b, gaps)
    if not a.numel():
        return 0.0
    a, b = (x.to(torch.complex128 if x.is_complex() else torch.float64) for x in (a, b))
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0, (a - b).abs()).nan_to_num(nan=torch.inf).max())


def _differs(v: int, truth: Values, made: Values, disturbed: list[Values], gaps: Mapping[int, Geometry]) -> str:
    """How a value differs from ATen's by more than rounding; "" if it does not."""
    found = _off(truth[v], made[v], gaps.get(v))
    if not found:
        return ""
    noise = max(_spread(truth[v], d[v], gaps.get(v)) for d in disturbed)
    return "" if _spread(truth[v], made[v], gaps.get(v)) <= FACTOR * noise else found


def _find(
    computation: Computation,
    kept: Values,
    truth: Values,
    disturbed: list[Values],
    gaps: Mapping[int, Geometry],
    wrong: list[int],
    made: Values,
    run: RunRegion,
) -> Finding:
    """The first op that goes wrong: by itself on ATen's operands, else inside the region, else what made the output."""
    region = computation.region
    for i, node in zip(region.nodes, computation.chosen, strict=True):
        results = tuple(r.vid for r in node.results)
        bases = [r.base for r in node.results if r.base is not None]
        operands = tuple(dict.fromkeys([*(u.vid for u in node.uses), *bases]))
        one = replace(computation, region=Region((i,), operands, results, (), "xla", Reason("mode.single")))
        alone = dict(zip(results, run(one, [as_home(truth[v]) for v in operands]), strict=True))
        near = [_by_aten(one, {v: _disturb(as_home(truth[v])) for v in operands}, True) for _ in range(TRIALS)]
        for v in results:
            found = _differs(v, truth, alone, near, gaps)
            if found:
                return Finding(i, v, found, True)
    everything = tuple(r.vid for node in computation.chosen for r in node.results)
    watched = replace(computation, region=replace(region, outputs=everything, donated=()))
    inside = dict(zip(everything, run(watched, [kept[v] for v in region.inputs]), strict=True))
    for values, among in ((inside, everything), (made, tuple(wrong))):
        for i, node in zip(region.nodes, computation.chosen, strict=True):
            for r in node.results:
                found = _differs(r.vid, truth, values, disturbed, gaps) if r.vid in among else ""
                if found:
                    return Finding(i, r.vid, found, False)
    raise AssertionError("a value that differs was made by no node of the region")


# ---- telling -------------------------------------------------------------------------------------------------------


def _tell(computation: Computation, kept: Values, finding: Finding) -> None:
    node, region = computation.nodes[finding.node], computation.region
    path = _write_script(computation, kept, finding)
    specs = ", ".join(str(kept[v].dtype).removeprefix("torch.") + str(list(kept[v].shape)) for v in region.inputs)
    how = "by itself" if finding.alone else f"only when fused with the other {len(region.nodes) - 1} ops of its region"
    place = describe(node.place)
    told = {"op": str(node.op), "site": str(place), "difference": finding.difference, "alone": finding.alone}
    LOG.emit("mismatch", **told, script=path)
    warnings.warn(
        f"{node.op} at {place} goes wrong {how}: {finding.difference}. ATen's values are used. "
        f"The region's inputs are {specs}. To see it again: python {path}",
        WrongResult,
        stacklevel=2,
    )


def _write_script(computation: Computation, kept: Values, finding: Finding) -> str:
    folder = tempfile.mkdtemp(prefix="fused-eager-mismatch-")
    torch.save({v: kept[v] for v in computation.region.inputs}, os.path.join(folder, "inputs.pt"))
    path = os.path.join(folder, "mismatch.py")
    with open(path, "w", encoding="utf-8") as file:
        file.write(script(computation, finding.vid))
    return path


def script(computation: Computation, vid: int) -> str:
    """A program that computes one value of a region from its inputs (`inputs.pt` beside it), by eager and fused."""
    wanted, chosen = {vid}, []
    for node in reversed(computation.chosen):
        if any(r.vid in wanted for r in node.results):
            chosen.append(node)
            wanted.update([u.vid for u in node.uses] + [r.base for r in node.results if r.base is not None])
    lines = [line for node in reversed(chosen) for line in _as_source(node, computation.homes)]
    inputs = [v for v in computation.region.inputs if v in wanted]
    load = 'saved = torch.load(os.path.join(os.path.dirname(os.path.abspath(__file__)), "inputs.pt"))'
    return "\n".join([
        "import os", "", "import torch", "from torch import device, inf, nan  # noqa: F401", "",
        "from fused_eager import fused_eager", "", "", f"def program({', '.join(f'v{v}' for v in inputs)}):",
        *(f"    {line}" for line in lines), f"    return v{vid}", "", "", load,
        f"inputs = [saved[v] for v in {inputs}]", "want = program(*inputs)",
        "with fused_eager():", "    got = program(*inputs)", "print(want)", "print(got)",
        "torch.testing.assert_close(got, want, equal_nan=True)", "",
    ])  # fmt: skip


def _as_source(node: Node, homes: Mapping[int, Home]) -> list[str]:
    """The lines that run a node on `v<number>` variables, each a tensor over the whole of a value's memory."""
    split = len(node.results) - len(node.targets)
    writes = dict(zip(node.targets, node.results[split:], strict=True))
    targets = targets_of(node)
    lines, copies, operands = [], {}, []
    for position, use in enumerate(node.uses):
        result = writes.get(position)
        vid, g = targets[position] if result is not None else (use.vid, place_of(node, use))
        if result is not None:
            if vid not in copies:
                copies[vid] = f"v{result.vid}"
                lines.append(f"v{result.vid} = v{vid}.clone()")
            elif copies[vid] != f"v{result.vid}":
                lines.append(f"v{result.vid} = {copies[vid]}")
        name = f"v{vid}" if result is None else f"v{result.vid}"
        where = f"{g.offset}, {tuple(g.size)}, {tuple(g.stride)}"
        if homes[use.vid][0] == g.dtype:
            text = f"{name}.as_strided({tuple(g.size)}, {tuple(g.stride)}, {g.offset})"
        else:
            text = f"torch.empty(0, dtype={g.dtype}).set_({name}.untyped_storage(), {where})"
        text += (".conj()" if g.conj else "") + ("._neg_view()" if g.neg else "")
        operands.append(text)

    def fill(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return _Source(operands[leaf.index])
        return node.scalars[leaf.index] if isinstance(leaf, Hole) else leaf

    given = [repr(map_leaves(fill, a)) for a in node.args]
    given += [f"{k}={map_leaves(fill, v)!r}" for k, v in node.kwargs.items()]
    call = f"torch.ops.{node.op}({', '.join(given)})"
    fresh = [f"v{r.vid}" for r in node.results[:split]]
    if not fresh:
        return [*lines, call]
    if len(fresh) == 1 and len(node.results) == 1:
        return [*lines, f"{fresh[0]} = {call}"]
    flat = f"[t for t in torch.utils._pytree.tree_leaves({call}) if isinstance(t, torch.Tensor)][:{len(fresh)}]"
    return [*lines, f"{', '.join(fresh)}, = {flat}"]


class _Source(str):
    """Source text that prints as itself."""

    def __repr__(self) -> str:
        return str(self)


__all__ = ["is_due", "keep", "script", "verify"]
