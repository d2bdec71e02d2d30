"""Planning: which pending nodes share a region, in what order regions run, and what each takes in and hands out.

A plan speaks of positions only (node indices and value numbers), so it can be printed, hashed and compared without
touching a tensor, and one plan serves every round of a loop.

Nodes are put on levels: an XLA node joins the earliest level at which its operands exist, an island opens a level
for those that need it. So work that does not depend on an island is not cut by it, and regions cannot wait for each
other in a circle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from fused_eager.fusion_rules.regions import Candidate, refuse
from fused_eager.fusion_rules.rule import OpClass, rule_for

from ..devices.device import Device
from ..devices.home import Home
from ..devices.host.device import HOST
from ..errors import ValidationError
from ..log.reasons import Reason
from ..log.site import describe
from ..tracing.stream import Node
from . import donation, repeats, temporaries
from .order import canonical, operands

if TYPE_CHECKING:
    from fused_eager.fusion_rules import precision

    from ..config import Config

# Their checks are known of before they are lowered.
_CHECKED = (OpClass.GATHER, OpClass.SCATTER)
# Further calls, by structure number, whose lowering turned out to ask for checks.
CHECKING: set[int] = set()


@dataclass(frozen=True, slots=True)
class Region:
    """Nodes that run as one, in canonical order where XLA runs them; `in_program_order` is how the user wrote them.

    `inputs`, `outputs` are value numbers; `donated` are positions among the inputs, the k-th of which makes room for
    the k-th output. With `continues`, it was cut off from what is before it, which belongs to the same piece of work.
    """

    nodes: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    donated: tuple[int, ...]
    how: str  # "xla" or "aten"
    ended_by: Reason
    continues: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Regions in the order in which they run; `drops[i]` are the values nobody needs after region i. Those in `shared`
    the program sees, and a region that follows reads them while it does."""

    regions: tuple[Region, ...]
    drops: tuple[tuple[int, ...], ...]
    shared: frozenset[int] = frozenset()

    def __str__(self) -> str:
        lines = []
        for i, r in enumerate(self.regions):
            lines.append(
                f"region {i} [{r.how}] {len(r.nodes)} ops, {len(r.inputs)} in, {len(r.outputs)} out, "
                f"{len(r.donated)} donated; ended by {r.ended_by}"
            )
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Work:
    """A stream and how it ends, in plain values: what planning and compiling need, in whatever thread."""

    nodes: list[Node]
    homes: dict[int, Home]
    live: frozenset[int]
    donatable: frozenset[int]
    config: Config
    reason: Reason
    switches: precision.Switches
    default: torch.dtype
    device: Device = HOST
    urgent: frozenset[int] = frozenset()
    cuts: bool = False


def collective(node: Node) -> str:
    """The devices of the ranks with which a node computes, by name; "" if it computes alone."""
    return node.args[3] if node.twin is not None and node.twin.name() == _COLLECTIVE else ""


_COLLECTIVE = "fused_eager::collective"


def make_plan(
    nodes: Sequence[Node],
    live: frozenset[int],
    donatable: frozenset[int],
    homes: Mapping[int, Home],
    islands: Mapping[int, str],
    max_region: int,
    end: Reason,
    everything: bool = False,
    kept: Mapping[int, int] | None = None,
    room: int | None = None,
    urgent: frozenset[int] = frozenset(),
    layered_from: int = repeats.LEAST,
    cuts: bool = False,
) -> Plan:
    """Plan a stream.

    Args:
        nodes: the stream.
        live: values that some tensor still sees after the stream; they are outputs, everything else may vanish.
        donatable: inputs whose memory nobody needs after its last use here.
        homes: dtype and shape of every value.
        islands: node index to the reason why ATen has to run it.
        max_region: nodes that one region may hold.
        end: why the stream ends here.
        everything: run nodes that nothing depends on too, as eager does: they may raise.
        kept: of a stream that makes checks, the donatable inputs that tensors go back to if one fails, each with the
            last value that was written over it.
        room: bytes that the temporaries of a region may take at once; None: any.
        urgent: values that somebody waits for: what makes them runs first, and the rest while they are in use.
        layered_from: nodes from which a region is cut into its equal layers.
        cuts: each collective is a region of its own, in program order.
    """
    needed = list(range(len(nodes))) if everything else _needed(nodes, live)
    groups: list[Group] = []
    for part in _at_collectives(nodes, needed) if cuts else _in_turn(nodes, needed, urgent):
        members = set(part)
        handed_out = live.union(v for i in needed if i not in members for v in operands(nodes[i]))
        groups += _group(nodes, part, handed_out, homes, islands, max_region, end, room, layered_from)
    return _connect(nodes, groups, live, donatable, homes, kept or {})


def in_program_order(nodes: Sequence[Node], region: Region) -> Region:
    """The same region as a person reads it: nodes, inputs and outputs as the program came to them."""
    members = tuple(sorted(region.nodes))
    taken, handed = set(region.inputs), set(region.outputs)
    given = {region.inputs[p] for p in region.donated}
    inputs = tuple(dict.fromkeys(v for i in members for v in operands(nodes[i]) if v in taken))
    outputs = tuple(r.vid for i in members for r in nodes[i].results if r.vid in handed)
    donated = tuple(p for p, v in enumerate(inputs) if v in given)
    return replace(region, nodes=members, inputs=inputs, outputs=outputs, donated=donated)


def may_check(node: Node) -> bool:
    """Whether a node's lowering may ask for a run-time check."""
    rule = rule_for(node.twin)
    return node.signature[0] in CHECKING or (rule is not None and rule.cls in _CHECKED)  # type: ignore[index]


def _may_raise(node: Node) -> bool:
    """Whether eager may refuse a node's values, so that it has to run though nobody reads its results.

    Told by the op alone, not by what this process has seen of it: every process has to make the same plan. Of an op
    without a row nothing is known.
    """
    rule = rule_for(node.twin)
    return rule is None or rule.may_raise


def _needed(nodes: Sequence[Node], live: frozenset[int]) -> list[int]:
    """The nodes that a live value or an error depends on, in program order."""
    wanted = set(live)
    kept = []
    for i in range(len(nodes) - 1, -1, -1):
        node = nodes[i]
        if _may_raise(node) or any(r.vid in wanted for r in node.results):
            kept.append(i)
            wanted.update(operands(node))
    return kept[::-1]


def _in_turn(nodes: Sequence[Node], needed: list[int], urgent: frozenset[int]) -> list[list[int]]:
    """The nodes that run first, for the urgent values, and the others; all at once where that would be too few."""
    wanted, first = set(urgent), []
    for i in reversed(needed) if urgent else ():
        if any(r.vid in wanted for r in nodes[i].results):
            first.append(i)
            wanted.update(operands(nodes[i]))
    rest = sorted(set(needed) - set(first))
    return [first[::-1], rest] if first and len(rest) >= ENOUGH else [needed]


def _at_collectives(nodes: Sequence[Node], needed: list[int]) -> list[list[int]]:
    """What comes before each collective, the collective, and what comes after the last."""
    parts: list[list[int]] = [[]]
    for i in needed:
        if collective(nodes[i]):
            parts += [[i], []]
        else:
            parts[-1].append(i)
    return [part for part in parts if part]


ENOUGH = 4  # nodes that are worth a region of their own, to run while values are sent


def _is_alone(node: Node) -> bool:
    rule = rule_for(node.twin)
    return rule is not None and rule.alone


# Cuts within what is one piece of work for the program.
_CONTINUED = ("region.repeat", "region.memory")
Group = tuple[str, list[int], Reason]


def _group(
    nodes: Sequence[Node],
    needed: list[int],
    live: frozenset[int],
    homes: Mapping[int, Home],
    islands: Mapping[int, str],
    max_region: int,
    end: Reason,
    room: int | None,
    layered_from: int,
) -> list[Group]:
    groups: list[Group] = []
    level: dict[int, int] = {}
    from_island: dict[int, bool] = {}
    handed_out = set(live)  # from one group to another, or to the program
    xla: dict[int, list[int]] = defaultdict(list)
    aten: dict[int, list[int]] = defaultdict(list)
    for i in needed:
        node, island = nodes[i], i in islands
        if _is_alone(node) and not island:  # it draws from nothing but numbers, so it can be first
            groups.append(("xla", [i], Reason("region.alone", str(node.op), describe(node.place))))
            continue
        at = 0
        for vid in operands(node):
            if vid in level:
                at = max(at, level[vid] + (from_island[vid] and not island))
        handed_out.update(v for v in operands(node) if v in level and (level[v], from_island[v]) != (at, island))
        (aten if island else xla)[at].append(i)
        for r in node.results:
            level[r.vid], from_island[r.vid] = at, island
    top = max([*xla, *aten], default=-1)
    for at in range(top + 1):
        members: list[int] = []
        repeated = repeats.boundaries(nodes, xla[at], homes, layered_from)
        crowded: dict[int, str] = {}
        if room is not None:
            crowded = temporaries.boundaries(nodes, xla[at], homes, handed_out, repeated, room)
        for i in xla[at]:
            refusal = refuse(Candidate(len(members), max_region, repeated.get(i, ""), crowded.get(i, "")))
            if refusal is not None:
                groups.append(("xla", members, Reason(refusal.code, refusal.detail, describe(nodes[i].place))))
                members = []
            members.append(i)
        if members:
            last = aten[at][0] if aten[at] else None
            why = end if last is None else Reason("region.island", islands[last], describe(nodes[last].place))
            groups.append(("xla", members, why))
        if aten[at]:
            groups.append(("aten", aten[at], end if at == top else Reason("region.island", islands[aten[at][0]])))
    return groups


def _connect(
    nodes: Sequence[Node],
    groups: list[Group],
    live: frozenset[int],
    donatable: frozenset[int],
    homes: Mapping[int, Home],
    kept: Mapping[int, int],
) -> Plan:
    checking = [i for i, n in enumerate(nodes) if may_check(n)] if kept else []
    last_use: dict[int, int] = {}
    made_in: dict[int, int] = {}
    for g, (_, members, _) in enumerate(groups):
        for i in members:
            for vid in operands(nodes[i]):
                last_use[vid] = g
            for r in nodes[i].results:
                made_in[r.vid] = g
    regions, drops = [], []
    for g, (how, members, why) in enumerate(groups):
        needed = {v for i in members for v in operands(nodes[i]) if made_in.get(v) != g}
        # XLA would leave out a collective that nobody on this rank reads.
        kept_here = {r.vid for i in members if collective(nodes[i]) for r in nodes[i].results}
        wanted = {r.vid for i in members for r in nodes[i].results if r.vid in live or last_use.get(r.vid, g) > g}
        wanted |= kept_here
        free: set[int] = set()
        if how == "xla":
            dead = {v for v in needed if last_use[v] == g and v not in live}
            free = {v for v in dead if v in made_in or v in donatable}
            members = canonical(nodes, members, homes, wanted, free)
        inputs = dict.fromkeys(v for i in members for v in operands(nodes[i]) if v in needed)
        outputs = [r.vid for i in members for r in nodes[i].results if r.vid in wanted]
        dying = [v for v in inputs if last_use[v] == g and v not in live]
        here = {v: o for v, o in kept.items() if v in free}
        only = donation.heirs_to_keep(nodes, members, outputs, here, checking) if here else {}
        given = donation.pairs(nodes, members, list(inputs), outputs, free, homes, only)
        heirs = set(given.values())
        outputs = [*given.values(), *(v for v in outputs if v not in heirs)]
        donated = tuple(p for p, v in enumerate(inputs) if v in given)
        continues = g > 0 and groups[g - 1][2].code in _CONTINUED
        regions.append(Region(tuple(members), tuple(inputs), tuple(outputs), donated, how, why, continues))
        drops.append(tuple(dying))
    handed = {v for r in regions if r.how == "xla" for v in r.inputs if v in made_in}
    return Plan(tuple(regions), tuple(drops), live & handed)


def validate(
    plan: Plan, nodes: Sequence[Node], live: frozenset[int], donatable: frozenset[int] | None = None
) -> None:
    """Check what `executing.run` relies on. Without `donatable` any input may be donated.

    Raises:
        ValidationError: a region waits for a later one, a value is made twice or never, a donated value is read
            again, or its memory is the program's.
    """
    maker = {v: g for g, r in enumerate(plan.regions) for v in r.outputs}
    waits = [(maker[v], g) for g, r in enumerate(plan.regions) for v in r.inputs if v in maker]
    if turned := [(a, b) for a, b in waits if a >= b]:
        raise ValidationError(f"regions wait for later ones: {turned}")
    seen: set[int] = set()
    made = {r.vid for n in nodes for r in n.results}
    for g, r in enumerate(plan.regions):
        if seen & set(r.nodes):
            raise ValidationError(f"nodes {sorted(seen & set(r.nodes))} are in two regions")
        seen |= set(r.nodes)
        there = set(r.inputs)
        for i in r.nodes:
            if absent := set(operands(nodes[i])) - there:
                raise ValidationError(f"node {i} of region {g} needs values {sorted(absent)} before they are there")
            there.update(result.vid for result in nodes[i].results)
        if absent := set(r.outputs) - there:
            raise ValidationError(f"region {g} hands out values {sorted(absent)}, which it does not have")
        if absent := (set(r.inputs) & made) - set(maker):
            raise ValidationError(f"region {g} waits for values {sorted(absent)}, which no region hands out")
    missing = (live & made) - set(maker)
    if missing:
        raise ValidationError(f"values {sorted(missing)} are live, but no region hands them out")
    for g, drops in enumerate(plan.drops):
        needed = live.union(*(later.inputs for later in plan.regions[g + 1 :]))
        if early := sorted(needed & set(drops)):
            raise ValidationError(f"values {early} are dropped after region {g}, and needed later")
    for g, r in enumerate(plan.regions):
        if len(r.donated) > len(r.outputs):
            raise ValidationError(f"region {g} donates {len(r.donated)} inputs for {len(r.outputs)} outputs")
        gone = {r.inputs[p] for p in r.donated}
        if donatable is not None and (kept := gone - made - donatable):
            raise ValidationError(f"region {g} donates {sorted(kept)}, whose memory the program keeps")
        late = [v for later in plan.regions[g + 1 :] for v in later.inputs if v in gone]
        if late or gone & live:
            raise ValidationError(f"region {g} donates {late or sorted(gone & live)}, which is needed later")
