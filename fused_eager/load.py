"""Loading: a stream's plan with an executable for each region, made once and found again for every repetition."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Hashable
from dataclasses import dataclass

from fused_eager.fusion_rules import precision

from . import mappings, plan, telling
from .buffers import Home
from .caching import forget_loaded, keeper
from .compile import MEMORY as EXECUTABLES
from .compile import Executable, load_or_compile
from .config import Config
from .errors import IslandRefused
from .events import LOG
from .hotness import SKELETONS
from .lower import NodeFailed
from .plan import Plan, Region
from .reasons import Reason
from .site import describe
from .stream import Node, Stream
from .trace import MEMORY


@dataclass(frozen=True, slots=True)
class Ready:
    """A plan with its executables (None for ATen regions): everything a repeated stream needs."""

    plan: Plan
    executables: tuple[Executable | None, ...]
    checked: bool
    number: int  # names the plan in events
    unstable: Hashable = None  # its signature, if it runs on ATen because its shapes keep changing


# Calls that XLA turned out not to be able to run, by structure number: found once, islands from then on.
ISLANDS: dict[int, str] = {}


def load(stream: Stream, live: frozenset[int], donatable: frozenset[int], reason: Reason) -> Ready:
    """What it takes to run a stream, given the values that are live after it and the inputs that are not."""
    nodes, config = stream.nodes, stream.config
    ending = (live, donatable, config.check_bounds, config.max_region, precision.switches())
    # An interrupt may have come between a node and its step.
    known = stream.at.ready if stream.at.depth == len(nodes) else {}
    ready = known.get(ending)
    if ready is None:
        stream.pace.restart()
        signature = (tuple([n.signature for n in nodes]), tuple([(i.vid, i.home) for i in stream.inputs]), ending)
        skeleton = tuple([n.number for n in nodes])
        if config.mode != "fused" or SKELETONS.is_hot(skeleton, signature):
            began = time.perf_counter()
            ready = known[ending] = _make_ready(stream, live, donatable, reason)
            SKELETONS.compiled(skeleton, time.perf_counter() - began)
        else:
            ready = _on_aten(stream, live, signature)
            LOG.count("unstable stream")
    stream.spell.saw(ready.unstable is None, ready.unstable)
    return ready


def _make_room() -> None:
    """Forget all executables where there would soon be too many."""
    found = mappings.crowded()
    if found is not None:
        EXECUTABLES.clear()
        forget_loaded()
        MEMORY.forget()
        gc.collect()
        LOG.emit("forgotten", maps=found[0], allowed=found[1])


def _make_ready(stream: Stream, live: frozenset[int], donatable: frozenset[int], reason: Reason) -> Ready:
    nodes, config = stream.nodes, stream.config
    _make_room()
    homes = homes_of_values(stream)
    while True:
        islands = {i: ISLANDS[n.signature[0]] for i, n in enumerate(nodes) if n.signature[0] in ISLANDS}  # type: ignore[index]
        checked = any(plan.may_check(n) for n in nodes)  # type: ignore[index]
        made = plan.make_plan(
            nodes, live, frozenset() if checked else donatable, homes, islands, config.max_region, reason
        )
        if config.validates:
            plan.validate(made, nodes, live)
        try:
            executables = tuple([_executable(stream, r, homes) for r in made.regions])
        except NodeFailed as failed:
            _make_island(config, nodes[failed.index], failed.reason)
            continue
        if not checked:
            asking = [(r, c) for r, e in zip(made.regions, executables, strict=True) if e for c in e.checks]
            plan.CHECKING.update(nodes[r.nodes[c.node]].signature[0] for r, c in asking)  # type: ignore[index]
            if asking and donatable:
                continue
        if config.log == "plans":
            print(made, flush=True)
        return Ready(made, executables, checked, telling.planned(made, nodes, homes, executables))


def homes_of_values(stream: Stream) -> dict[int, Home]:
    """Dtype and shape of every value of a stream."""
    homes: dict[int, Home] = {i.vid: i.home for i in stream.inputs}
    homes.update({r.vid: r.home for n in stream.nodes for r in n.results})
    return homes


def _on_aten(stream: Stream, live: frozenset[int], signature: Hashable) -> Ready:
    """The whole stream as one ATen region: its shapes change too often to be compiled."""
    nodes = stream.nodes
    why = Reason("region.unstable", f"{len(nodes)} ops", describe(nodes[0].place))
    everything = dict.fromkeys(range(len(nodes)), "unstable")
    homes = homes_of_values(stream)
    made = plan.make_plan(nodes, live, frozenset(), homes, everything, len(nodes), why)
    number = telling.planned(made, nodes, homes, again=True)
    return Ready(made, tuple(None for _ in made.regions), checked=False, number=number, unstable=signature)


def _executable(stream: Stream, region: Region, homes: dict[int, Home]) -> Executable | None:
    """The executable of a region; None if ATen runs it, which is also what becomes of one that XLA cannot compile."""
    if region.how != "xla":
        return None
    config = stream.config
    try:
        kept = keeper(config)
        return load_or_compile(stream.nodes, region, homes, config.check_bounds, config.progress, kept)
    except NodeFailed:
        raise
    except Exception as error:
        place = describe(stream.nodes[region.nodes[0]].place)
        LOG.emit("compile-failed", ops=len(region.nodes), error=f"{type(error).__name__}: {error}", site=str(place))
        return None


def _make_island(config: Config, node: Node, reason: str) -> None:
    place = describe(node.place)
    if config.islands == "refuse":
        raise IslandRefused(f"{node.op} would run natively at {place}: {reason}")
    if config.islands == "warn":
        warnings.warn(f"{node.op} runs natively at {place}: {reason}", stacklevel=2)
    ISLANDS[node.signature[0]] = reason  # type: ignore[index]
    LOG.emit("island", op=str(node.op), reason=reason, site=str(place))
