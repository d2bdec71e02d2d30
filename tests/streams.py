"""Tools for tests of the runtime: hand-made nodes, the open stream, and what a body told the event log."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from fused_eager.fusion_rules import RULES
from fused_eager.fusion_rules.geometry import Geometry
from fused_eager.fusion_rules.rule import rule_for
from fused_eager.fusion_rules.spec import Spec

from fused_eager import fused_eager, quiet
from fused_eager.compiling import lengths, template
from fused_eager.compiling.key import Computation
from fused_eager.devices.home import Home
from fused_eager.devices.host import scratch
from fused_eager.devices.host.buffers import TABLE
from fused_eager.executing import load
from fused_eager.executing.load import homes_of_values
from fused_eager.executing.run import flush
from fused_eager.frontends.context import bypass
from fused_eager.frontends.context.intercept import FrontDoor
from fused_eager.frontends.context.threads import current_door
from fused_eager.log.events import LOG, Event
from fused_eager.log.reasons import Reason
from fused_eager.lowering.xla_cpu import row_blocks, stages
from fused_eager.planning.plan import make_plan
from fused_eager.policy import allowance, hotness
from fused_eager.policy.allowance import Allowance
from fused_eager.policy.alone import Turn
from fused_eager.tracing import opinfo, trace
from fused_eager.tracing.stream import Node, Ref, Result, Stream, Use

aten = torch.ops.aten
CPU = torch.device("cpu")
HOME: Home = (torch.float32, (8,))
END = Reason("cut.exit")
# Who looks at the clock.
CLOCKS = ("policy.alone", "policy.autotuner", "policy.policy", "policy.segment", "frontends.context.bypass")


def geometry(n: int = 8, dtype: torch.dtype = torch.float32, offset: int = 0) -> Geometry:
    """A contiguous vector."""
    return Geometry((n,), (1,), offset, dtype)


def node(
    made: int | Sequence[int],
    reads: Sequence[int],
    op: Any = aten.relu.default,
    structure: int = 0,
    home: Home = HOME,
    base: int | None = None,
    scalars: Sequence[float | int] = (),
) -> Node:
    """A node that reads the values `reads` and makes the values `made`, all of one home."""
    made = [made] if isinstance(made, int) else list(made)
    g = geometry(home[1][0], home[0])
    spec = Spec(g.size, g.dtype, g.stride, CPU)
    uses = tuple(Use(v, g) for v in reads)
    return Node(
        number=structure,
        op=op,
        twin=op,
        args=[Ref(i) for i in range(len(reads))],
        kwargs={},
        uses=uses,
        scalars=list(scalars),
        results=tuple(Result(v, home, g, base, spec) for v in made),
        targets=(),
        signature=(structure, *reads, *made),
        place=None,
    )


def open_stream() -> Stream:
    """The stream of the context that is open in this thread."""
    door = current_door()
    assert door is not None
    return door.stream


def flush_now() -> None:
    """Run what is pending, without binding it to the tensors."""
    flush(open_stream(), Reason("sync.call"))


@contextmanager
def events(*kinds: str) -> Iterator[list[Event]]:
    """The events of the given kinds (all, if none is named) that the body caused, by all threads."""
    seen: list[Event] = []

    def take(event: Event) -> None:
        if not kinds or event.kind in kinds:
            seen.append(event)

    LOG.sinks.append(take)
    try:
        yield seen
    finally:
        LOG.sinks.remove(take)


RESULTS_OF_ALL_SIZES: dict[str, Any] = {"LARGE": 1}
BLOCKS_OF_ALL_SIZES: dict[str, Any] = {
    "LARGE": 1, "STAGED": 1, "BLOCK": 100, "SMALLEST": 1, "FEWEST": 2, "threads": lambda: 1
}  # fmt: skip
STAGES_OF_ALL_LENGTHS: dict[str, Any] = {"AT_ONCE": 0, "REST": 0}


@contextmanager
def _compiled_with(module: ModuleType, values: dict[str, Any]) -> Iterator[None]:
    """In the body a module has these values. Executables that were made otherwise are forgotten."""
    load.forget()
    with pytest.MonkeyPatch.context() as m:
        for name, value in values.items():
            m.setattr(module, name, value)
        yield
    load.forget()


@contextmanager
def all_results_large() -> Iterator[None]:
    """In the body results of all sizes go to scratch memory."""
    with _compiled_with(scratch, RESULTS_OF_ALL_SIZES):
        yield
    scratch.SCRATCH.forget()


@contextmanager
def all_lengths_large() -> Iterator[None]:
    """In the body streams of all sizes run block by block once their lengths keep changing. No skeleton is known."""
    with _compiled_with(template, {"LARGE": 1, "BLOCK": 512}), pytest.MonkeyPatch.context() as m:
        m.setattr(lengths, "LARGE", 1)
        m.setattr(hotness, "VARIANTS", 1)  # compiled as they are
        m.setattr(load, "SKELETONS", hotness.Skeletons())
        yield


def all_rows_in_blocks() -> AbstractContextManager[None]:
    """In the body regions with rows of all sizes are cut into blocks of two or more, where that can be."""
    return _compiled_with(row_blocks, BLOCKS_OF_ALL_SIZES)


@contextmanager
def all_steps_in_stages() -> Iterator[None]:
    """The same, and what may be stored between two steps of a block is."""
    with _compiled_with(stages, STAGES_OF_ALL_LENGTHS), all_rows_in_blocks():
        yield


@contextmanager
def given_up_anywhere(seed: int) -> Iterator[None]:
    """In the body shadowed streams are given up after any of their ops; threads then rest for any number of sync
    points, or for a moment."""
    chance = random.Random(seed)

    def is_used_up(self: Allowance, seen: object, ops: int, begun: float, is_new: bool) -> bool:
        return seen is not None and ops > 0 and chance.random() < 0.1

    def is_enough(self: Allowance) -> bool:
        return chance.random() < 0.5

    with pytest.MonkeyPatch.context() as m:
        m.setattr(Allowance, "is_used_up", is_used_up)
        m.setattr(Allowance, "_is_enough", is_enough)
        m.setattr(allowance, "PATIENCE", 1e-3)
        m.setattr(allowance, "LEAST", 1e-5)
        yield


@contextmanager
def restless(seed: int) -> Iterator[list[str]]:
    """In the body the front door steps aside, or comes back, at any turn and any read where it may. Yields what it
    did."""
    chance, did = random.Random(seed), list[str]()

    def turned(door: FrontDoor, turn: Turn) -> None:
        if door.hidden or torch._C._current_graph_task_id() != -1 or chance.random() < 0.5:
            return
        if door.bypassed:
            did.append("back")
            door.come_back()
        elif door in quiet.stack() and not door.stream.policy.autotuner.stepping and bypass._is_alone(door):
            did.append("aside")
            bypass._leave(door, turn, 0.0)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(bypass, "turned", turned)
        m.setattr(bypass, "read", lambda door: turned(door, "read"))
        yield did


def forget_shapes() -> None:
    """Forget which streams have come with other shapes: each is compiled at first sight again."""
    for seen in vars(hotness.SKELETONS).values():
        seen.clear()


@contextmanager
def stable_shapes() -> Iterator[None]:
    """In the body no shape of another test counts."""
    forget_shapes()
    yield


@contextmanager
def lowered_by(name: str, lower: Callable[..., Any]) -> Iterator[None]:
    """In the body the row of an overload has another lowering; what was traced outside of it is not met inside."""

    def forget() -> None:
        rule_for.cache_clear()
        trace.MEMORY.forget()

    try:
        with pytest.MonkeyPatch.context() as m:
            m.setitem(RULES, name, replace(RULES[name], lower=lower))
            forget()
            yield
    finally:
        forget()


@contextmanager
def passing_for_aten(*ops: Any) -> Iterator[None]:
    """Take custom ops for ATen ops without lowering: run at once the first time, deferred as islands from then on.

    (Ops of ATen itself would not do: which of them have no lowering changes with every rule, and none fails on demand.)
    """
    with pytest.MonkeyPatch.context() as m:
        for op in ops:
            info = opinfo.info_of(op)
            assert info.kind is opinfo.Kind.CUSTOM and info.island
            m.setitem(opinfo._INFO, op, replace(info, kind=opinfo.Kind.COMPUTE))
        yield


def forget_pending() -> None:
    """Take away what other tests have left that is pending or lost, so that it does not fail the next one."""
    for b in [b for b in TABLE.values() if b.stream is not None or b.error is not None]:
        del TABLE[b.cdata]


def compilations_per_round(step: Callable[[int], object], rounds: int) -> list[int]:
    """How many regions each round of a loop compiled."""
    counts = []
    for i in range(rounds):
        with events("compile") as seen:
            step(i)
        counts.append(len(seen))
    return counts


def collected(ref: Callable[[], object]) -> bool:
    """Whether a weakly referenced object is gone, after a garbage collection."""
    gc.collect()
    return ref() is None


def recorded(
    program: Callable[[], Any], donate: bool = False, live: Callable[[Any], Any] = lambda out: out
) -> Computation:
    """The one region of a program; `live` picks the results that are still seen after it."""
    with fused_eager():
        out = program()
        stream = open_stream()
        seen = live(out)
        tensors = list(seen) if isinstance(seen, (tuple, list)) else [seen]
        by_storage = {b.cdata: b.vid for b in stream.pending.values()}
        alive = frozenset(by_storage[t.untyped_storage.__wrapped__(t)._cdata] for t in tensors)
        donatable = frozenset(i.vid for i in stream.inputs) if donate else frozenset()
        nodes, homes = list(stream.nodes), homes_of_values(stream)
        (region,) = make_plan(nodes, alive, donatable, homes, {}, 10_000, END).regions
        del out, seen, tensors
    return Computation(nodes, region, homes)
