"""Loading: a stream's plan with an executable for each region, made once and found again for every repetition."""

from __future__ import annotations

import functools
import gc
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from fused_eager.cache import Key, Unencodable
from fused_eager.fusion_rules import precision
from fused_eager.fusion_rules.rule import rule_for

from ..bounded import Bounded
from ..compiling import background, emit, lengths, mappings
from ..compiling.background import Waiting
from ..compiling.caching import forget_loaded, keeper, settings
from ..compiling.canonical import to_parts
from ..compiling.compile import MEMORY as EXECUTABLES
from ..compiling.compile import Computation, Executable, load_or_compile
from ..compiling.ready import Ready
from ..config import Config
from ..devices.home import Home, nbytes_of
from ..errors import ValidationError
from ..log.events import LOG
from ..log.reasons import Reason
from ..log.site import describe
from ..lowering.failed import NodeFailed
from ..planning import budget, donation, fetching, plan
from ..planning.plan import Plan, Region, Work
from ..policy.hotness import SKELETONS
from ..policy.segment import Pieces
from ..tracing.opinfo import info_of
from ..tracing.stream import Node, Stream
from ..tracing.trace import MEMORY, Step
from . import op_autotuner, validate
from .island import tell, tell_region

_default = torch.get_default_dtype

LONG = 0.5  # seconds of compiling that leave enough memory behind to be given back

# The number of the first plan of the streams with some shapes: later ones (other values are alive, parameters are on
# the device) are told of as having come instead of it.
CAME: Bounded[Hashable, int] = Bounded(1024)

# Who wants to see each stream that has not come before, as it is about to be planned.
WATCHERS: list[Callable[[Work], None]] = []


class Ranks(Protocol):
    """Who speaks for the ranks with which this process computes."""

    def agree(self, nodes: Sequence[Node], digest: str) -> bool:
        """Whether all are about to run the same regions, by their digest; "" says that they cannot. `nodes` are the
        collectives."""

    def launched(self, count: int, token: Any) -> None:
        """A region has been launched that holds so many collectives; `token` is ready when it has run."""


# That, where collectives are recorded like other ops.
RANKS: list[Ranks] = []


def collectives_of(nodes: Sequence[Node]) -> list[Node]:
    """The collectives among the ops of a stream."""
    return [n for n in nodes if plan.collective(n)] if RANKS else []


# Calls that XLA turned out not to be able to run, by structure number: found once, islands from then on.
ISLANDS: dict[int, str] = {}


def load(
    stream: Stream, live: frozenset[int], donatable: frozenset[int], reason: Reason, cuts: bool = False
) -> Ready:
    """What it takes to run a stream, given the values that are live after it and the inputs that are not. `cuts`: each
    of its collectives by itself."""
    nodes, config = stream.nodes, stream.config
    device = stream.device
    options = (config.check_bounds, config.max_region, device.name, cuts)
    ending = (live, donatable, *options, precision.switches(), stream.urgent)
    # An interrupt may have come between a node and its step.
    known: MutableMapping[Hashable, Ready | Waiting] = stream.at.ready if stream.at.depth == len(nodes) else {}
    ready = known.get(ending)
    if not isinstance(ready, Ready):
        if isinstance(ready, Waiting) and ready.asked and not ready.failed:
            found = ready.meet(stream.policy.backoff)
            if found.shapes is None:  # regions come next, and take memory of their own
                device.housekeeping.turn()
        else:
            homes = homes_of_values(stream)
            switches, urgent = ending[-2:]
            work = Work(nodes, homes, live, donatable, config, reason, switches, _default(), device, urgent, cuts)
            for watch in WATCHERS:
                watch(work)
            found = _find(stream, known, ending, work)
        if found.shapes is None:
            known[ending] = found
            stream.warm()
        ready = ready.meanwhile if stream.shadowed and isinstance(ready, Waiting) else found
        if ready.varies:
            stream.policy.autotuner.varies()
        elif not ready.unstable:  # else it runs like that until it has come often enough, and that is what fused takes
            stream.policy.autotuner.restart()
    else:
        for alike in ready.alike:
            alike.recurs = True
    # A backoff would have ATen run what XLA has run before.
    stable = not (ready.unstable or stream.strayed) or stream.config.is_reproducible
    stream.policy.flushed(ready.pieces, stable, ready.shapes if ready.unstable else None)
    return ready


@dataclass(eq=False)
class Kept:
    """What runs a stream that was recorded ahead: kept by whoever will run it, and let go of where `forget` says so."""

    ready: Ready | None = None

    def fill(self, work: Work) -> Ready:
        """Make it, and wait for that."""
        _make_room()
        began = time.perf_counter()
        ready = _make_ready(work)
        if work.donatable and any(r.how != "xla" for r in ready.plan.regions):
            # What an island raises leaves what was to be overwritten as it is.
            ready = _make_ready(replace(work, donatable=frozenset()))
        work.device.housekeeping.compiled(time.perf_counter() - began > LONG)
        self.keep(ready)
        return ready

    def keep(self, ready: Ready) -> None:
        """Have it as it is."""
        self.ready = ready
        _KEPT.add(self)


_KEPT: weakref.WeakSet[Kept] = weakref.WeakSet()


def is_compiled(at: Step) -> bool:
    """Whether a stream that ends at this step is compiled, or is about to be."""
    return any(r.asked and not r.failed if isinstance(r, Waiting) else r.shapes is None for r in at.ready.values())


def _find(stream: Stream, known: MutableMapping[Hashable, Ready | Waiting], ending: Hashable, work: Work) -> Ready:
    """What runs a stream that has no executables yet, and of which none are being made."""
    if collectives_of(work.nodes):  # when a collective runs does not hang on what this rank alone has seen
        _make_room()
        return _make_ready(work)
    waiting = known.get(ending)
    nodes = work.nodes
    shapes = (tuple([n.signature for n in nodes]), tuple([(i.vid, i.home) for i in stream.inputs]))
    if work.config.waits and not _pays(work, shapes):
        return _on_aten(work, shapes, "region.budget")
    if work.config.mode != "fused" or (isinstance(waiting, Waiting) and waiting.failed):
        _make_room()
        return _make_ready(work)
    if stream.strayed:
        given_up = _on_aten(work, shapes, "region.unstable" if stream.policy.backoff.is_impatient else "region.new")
        emit.came(nodes, work.homes, work.live, given_up.number)
        return given_up
    skeleton = tuple([n.number for n in nodes])
    waits, again = work.config.waits, shapes in background.FORMS
    line = _line(work) if waits and not again else None
    unstable = SKELETONS.is_unstable(
        skeleton, (shapes, ending), shapes, work.config.is_reproducible, waits or again, line
    )
    found = _of_any_length(stream, skeleton, work, unstable)
    if found is not None:
        return found
    if waits or again:
        if unstable:
            return _on_aten(work, shapes, SKELETONS.held.get(shapes, "region.unstable"))
        _make_room()
        if waits:
            found = _compiled(work, skeleton)
            return found if line is None else replace(found, alike=(SKELETONS.of(skeleton), SKELETONS.on(line)))
    if isinstance(waiting, Waiting) and not (unstable or waiting.meanwhile.unstable):
        meanwhile = waiting.meanwhile
    else:
        before = waiting.meanwhile.number if isinstance(waiting, Waiting) else CAME.get(shapes)
        meanwhile = _on_aten(work, shapes, "region.unstable" if unstable else "region.new", before)
    if not isinstance(waiting, Waiting):
        if not again:
            emit.came(nodes, work.homes, work.live, meanwhile.number)
            CAME[shapes] = meanwhile.number
        make = functools.partial(_compiled, work, skeleton, meanwhile.number)
        decomposes = any(rule_for(n.op) is None for n in nodes)
        waiting = known[ending] = Waiting(meanwhile, make, len(nodes), stream.first, decomposes)
    waiting.meanwhile = meanwhile
    if background.came_again(shapes, waiting) and not stream.shadowed:
        waiting.wait_a_little(SKELETONS.spent.get(shapes, 0.0))
        return waiting.ready or meanwhile
    return meanwhile


def _line(work: Work) -> Hashable:
    """The line that a device's stream begins on; None where it is compiled at first sight."""
    place = work.nodes[0].place
    if work.device.has_memory or work.config.inspects or LOG.budgets or place is None:
        return None
    return place[:2]


def _pays(work: Work, shapes: Hashable) -> bool:
    """Whether compiling a stream is worth its time, where the program waits for that."""
    if not work.device.has_memory:
        return work.config.mode == "fused" or not _may_be_fetched(work) or _pays_on_device(work, shapes)
    if work.config.compiles_all or LOG.budgets:
        return True
    return budget.pays_alone(work.nodes) if work.config.is_reproducible else budget.LINES.pays(work.nodes, shapes)


def _pays_on_device(work: Work, shapes: Hashable) -> bool:
    """The same of an op by itself on a device whose memory ATen cannot get at: on fetched values it may take longer
    than is reckoned, so what it has taken so far counts."""
    spent = SKELETONS.spent.get(shapes, 0.0)
    return spent >= budget.compiling(work.nodes) + budget.REGION or budget.LINES.pays(work.nodes, shapes)


def _of_any_length(stream: Stream, skeleton: Hashable, work: Work, unstable: bool) -> Ready | None:
    """What runs a stream in blocks of rows, if its length keeps changing and that is known to be the same."""
    if stream.config.is_reproducible or not stream.device.has_memory:  # which lengths have come before would decide
        return None
    found = lengths.find(skeleton, work, unstable)
    if found is None or stream.shadowed:
        return None
    return lengths.ready(found, work)


def _compiled(work: Work, skeleton: Hashable, meanwhile: int | None = None) -> Ready:
    began = time.perf_counter()
    ready = _make_ready(work, meanwhile)
    if _default() is not work.default:
        raise RuntimeError("the default dtype, which lowerings read, was changed meanwhile")
    seconds = time.perf_counter() - began
    SKELETONS.compiled(skeleton, seconds)
    work.device.housekeeping.compiled(seconds > LONG)
    return ready


def _make_room() -> None:
    """Forget all executables where there would soon be too many."""
    found = mappings.crowded()
    if found is not None:
        forget()
        gc.collect()  # what refers to them in circles: a second or more in a large program
        LOG.emit("forgotten", maps=found[0], allowed=found[1])


def forget() -> None:
    """Let go of all executables, and of what leads to them."""
    EXECUTABLES.clear()
    lengths.forget()
    forget_loaded()
    for kept in list(_KEPT):
        kept.ready = None
    for step in MEMORY.steps():  # streams that are under way, or wait for their first op, hold on to the tree
        step.ready.clear()
    MEMORY.forget()


def _make_ready(work: Work, meanwhile: int | None = None) -> Ready:
    nodes, homes, config, device = work.nodes, work.homes, work.config, work.device
    ahead: dict[int, str] = {}
    room = device.housekeeping.room
    if config.validates:
        validate.recorded(nodes, homes)
    if config.measures and not config.waits:
        with precision.as_of(work.switches):
            ahead = op_autotuner.islands(nodes, work.live, homes, settings(config))
    while True:
        islands = {i: ISLANDS[n.signature[0]] for i, n in enumerate(nodes) if n.signature[0] in ISLANDS}  # type: ignore[index]
        islands.update(ahead)
        checked = any(plan.may_check(n) for n in nodes)  # type: ignore[index]
        donatable, kept = work.donatable, None
        if checked and device.has_memory:
            donatable = frozenset()
        elif checked:
            kept = donation.last_written(nodes, work.live, donatable)
        made = plan.make_plan(
            nodes, work.live, donatable, homes, islands, config.max_region, work.reason, kept=kept, room=room,
            urgent=work.urgent, layered_from=device.layered_from, cuts=work.cuts,
        )  # fmt: skip
        if config.validates:
            plan.validate(made, nodes, work.live, donatable)
        try:
            with precision.as_of(work.switches):
                executables = tuple([_economical(work, r, _executable(work, r)) for r in made.regions])
                pieces = _pieces(work, made, executables) if config.mode == "fused" else None
        except NodeFailed as failed:
            _make_island(config, nodes[failed.index], failed.reason)
            continue
        if config.validates:
            validate.loaded(made, executables, nodes)
        if not checked:
            asking = [(r, c) for r, e in zip(made.regions, executables, strict=True) if e for c in e.checks]
            plan.CHECKING.update(nodes[r.nodes[c.node]].signature[0] for r, c in asking)  # type: ignore[index]
            if asking and donatable:
                continue
        if config.log == "plans":
            print(made, flush=True)
        number = emit.planned(made, nodes, homes, executables, instead_of=meanwhile, device=device)
        commits = tuple([_committed(r, kept) for r in made.regions]) if kept else ()
        joint = "" if work.cuts else _joint(work, made)
        return Ready(made, executables, checked, number, commits if any(commits) else (), pieces=pieces, joint=joint)


def _joint(work: Work, made: Plan) -> str:
    """The digest of the regions that hold collectives, the same on all ranks that would run the same programs; "" if
    there are none, if they are of several groups of devices, or have no such name."""
    computations = [Computation(work.nodes, region, work.homes) for region in made.regions]
    of = [(c.devices, c) for c in computations if c.devices]
    if len({devices for devices, _ in of}) != 1:
        return ""
    try:
        parts = [to_parts(c) for _, c in of]
        return Key({"regions": parts, "switches": [str(s) for s in work.switches]}).digest
    except Unencodable:
        return ""


def _committed(region: Region, kept: Mapping[int, int]) -> frozenset[int]:
    """What a region writes over inputs that tensors go back to if a check fails."""
    return frozenset(kept[region.inputs[p]] for p in region.donated if region.inputs[p] in kept)


def _pieces(work: Work, made: Plan, executables: Sequence[Executable | None]) -> Pieces | None:
    """The regions of a plan as every process would call them; None where one has no such name."""
    kept = keeper(work.config)
    if kept is None or not work.device.has_memory:
        return None
    found = []
    for region, executable in zip(made.regions, executables, strict=True):
        try:
            if executable is None:
                name = kept.key(Computation(work.nodes, region, work.homes), work.config.check_bounds).digest
            else:
                name = executable.key
        except Unencodable:
            return None
        if not name:
            return None
        found.append(("xla" if executable else "aten", name))
    return tuple(found)


def homes_of_values(stream: Stream) -> dict[int, Home]:
    """Dtype and shape of every value of a stream."""
    homes: dict[int, Home] = {i.vid: i.home for i in stream.inputs}
    homes.update({r.vid: r.home for n in stream.nodes for r in n.results})
    return homes


def _on_aten(work: Work, shapes: Hashable, code: str, before: int | None = None) -> Ready:
    """The whole stream as one ATen region; `code` says why, `before` is the plan that has run it so far.

    Where ATen cannot get at the values it is op by op, for most ops are compiled already, whatever stream they were in;
    or ATen on fetched values, where it is less to bring these than to compile the others.
    """
    nodes, homes = work.nodes, work.homes
    why = Reason(code, f"{len(nodes)} ops", describe(nodes[0].place))
    if not (work.device.has_memory or _is_fetched(work)):
        singly = replace(work, config=work.config.replace(max_region=1), reason=why)
        return replace(_make_ready(singly, before), shapes=shapes, unstable=True)
    islands = dict.fromkeys(range(len(nodes)), code)
    made = plan.make_plan(nodes, work.live, frozenset(), homes, islands, len(nodes), why, everything=True)
    number = emit.planned(made, nodes, homes, again=True, instead_of=before, device=work.device)
    unstable = code == "region.unstable" or (code == "region.budget" and work.config.mode == "fused")
    if unstable:
        LOG.count("unstable stream")
    return Ready(made, tuple(None for _ in made.regions), False, number, shapes=shapes, unstable=unstable)


def _is_fetched(work: Work) -> bool:
    """Whether a device's stream is run by ATen, on values that are fetched for it."""
    return _may_be_fetched(work) and fetching.is_cheaper(work.nodes, work.homes, work.live, work.device.link)


def _may_be_fetched(work: Work) -> bool:
    """Whether it may be: the options allow it, and ATen has kernels for it."""
    config = work.config
    return config.islands == "allow" and not (config.is_reproducible or LOG.budgets) and _has_kernels(work.nodes)


def _has_kernels(nodes: Iterable[Node]) -> bool:
    """Whether ATen could run all of these on the host."""
    return all(info_of(node.op).on_cpu for node in nodes)


def _executable(work: Work, region: Region) -> Executable | None:
    """The executable of a region; None if ATen runs it, which is also what becomes of one that XLA cannot compile."""
    if region.how != "xla":
        return None
    computation = Computation(work.nodes, region, work.homes)
    if work.config.validates:
        validate.keyed(computation)
    try:
        return load_or_compile(computation, settings(work.config, work.device))
    except NodeFailed:
        raise
    except Exception as error:
        if isinstance(error, ValidationError) and work.config.validates:
            raise
        place = describe(work.nodes[region.nodes[0]].place)
        LOG.emit("compile-failed", ops=len(region.nodes), error=f"{type(error).__name__}: {error}", site=str(place))
        return None


def _economical(work: Work, region: Region, executable: Executable | None) -> Executable | None:
    """The executable; None, so that ATen runs the region, if it takes many times the memory that ATen may."""
    if executable is None or collectives_of([work.nodes[i] for i in region.nodes]):  # those are XLA's alone
        return executable
    inner = [r.vid for i in region.nodes for r in work.nodes[i].results]
    plain = sum(nbytes_of(work.homes[v]) for v in {*region.inputs, *inner})
    wastes = work.device.housekeeping.wastes(executable.needs, plain)
    if not (wastes and _has_kernels(work.nodes[i] for i in region.nodes)):
        return executable
    needs, has = (f"{nbytes / 2**20:.0f} MB" for nbytes in (executable.needs, plain))
    why = f"XLA needs {needs} at once for {executable.name}, of which all values have {has}"
    tell_region(work.config, work.nodes, region, why)
    return None


def _make_island(config: Config, node: Node, reason: str) -> None:
    tell(config, node.op, node.place, reason)
    ISLANDS[node.signature[0]] = reason  # type: ignore[index]
