"""Advice about collectives: what the ranks of a job wait for from one another, and what would make it less.

What a log of one rank shows is found there; who is last takes the logs of all ranks, merged.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator

from .facts import Facts
from .finding import NOTABLE, OFTEN, STEADY, Advice
from .rows import Collective

SMALL = 1 << 16  # bytes: sending fewer takes about as long as sending none
MANY = 8  # collectives of a line in each round
MET = 10  # collectives of all ranks, before somebody is called the last of most
MOST = 0.8  # of them
LITTLE = 0.1  # of a collective's time in which the program went on


def _rounds(facts: Facts) -> int:
    return max(facts.steps, 1)


def _per_round(facts: Facts, row: Collective) -> float:
    return row.count / _rounds(facts)


def _cost(row: Collective) -> float:
    """The seconds that the program has stood still for it, as far as that is known."""
    return row.wait_s if row.watched_s else row.seconds


def _many(facts: Facts) -> Iterator[Advice]:
    """Of many sizes at one line: a loop over parameters; of one size: something else that comes in pieces."""
    for row in facts.collectives.values():
        if row.op == "barrier" or _per_round(facts, row) < MANY or row.count < 2 * MANY:
            continue
        share = 1 - _rounds(facts) / row.count  # what one large one instead would save
        each = f"{_per_round(facts, row):.0f} of them in a step, of {row.bytes / row.count:.0f} bytes on average"
        if len(row.sizes) >= MANY // 2 and row.op.startswith(("allreduce", "broadcast")):
            yield Advice(
                "collective.parameters",
                row.site,
                f"{row.op.strip('_')} for each parameter",
                "let DistributedDataParallel reduce whole buckets while the backward pass runs, or put all into one "
                "tensor first (torch._utils._flatten_dense_tensors, all_reduce_coalesced)",
                share * _cost(row),
                each,
            )
        elif row.bytes / row.count < SMALL:
            yield Advice(
                "collective.small",
                row.site,
                f"many small collectives ({row.op.strip('_')})",
                "put what they send into one tensor (torch.stack, torch.cat) and send that, or send it in fewer steps",
                share * _cost(row),
                each,
            )


def _no_overlap(facts: Facts) -> Iterator[Advice]:
    for row in facts.collectives.values():
        large = row.op != "barrier" and row.bytes / row.count >= SMALL and _per_round(facts, row) < MANY
        often = row.count >= max(3, OFTEN * facts.steps)
        if not (large and often and row.overlap is not None and row.overlap < LITTLE):
            continue
        if row.wait_s >= NOTABLE * facts.seconds:
            yield Advice(
                "collective.no-overlap",
                row.site,
                f"the program stands still for {row.op.strip('_')}",
                "start it with async_op=True and call wait() where its result is needed; "
                "DistributedDataParallel and FSDP2 do so, FSDP2 with set_modules_to_forward_prefetch",
                row.wait_s,
                f"{row.count} times, {1e3 * row.wait_s / row.count:.3g} ms each, "
                f"{100 * row.overlap:.0f} % of it while the program went on",
            )


def _barriers(facts: Facts) -> Iterator[Advice]:
    for row in facts.collectives.values():
        if row.op in ("barrier", "monitored_barrier_") and row.count >= max(3, STEADY * facts.steps):
            yield Advice(
                "collective.barrier",
                row.site,
                "a barrier in every step",
                "leave it out: a collective waits for all ranks by itself. Where one rank writes files for the others, "
                "a barrier after that is enough",
                _cost(row),
                f"{row.count} times",
            )


def _reducer(facts: Facts) -> Iterator[Advice]:
    for cut in facts.cuts:
        if cut.reason != "sync.memory" or "reducer of DistributedDataParallel" not in cut.detail:
            continue
        if cut.count >= max(3, STEADY * facts.steps):
            yield Advice(
                "ddp.unused",
                cut.site,
                "the reducer looks for unused parameters in every step, so all gradients are finished at the first one",
                "find_unused_parameters=False if each parameter is used in each step; static_graph=True if the same "
                "ones are never used",
                cut.seconds,
                f"{cut.count} times",
            )


def _resized(facts: Facts) -> Iterator[Advice]:
    for cut in facts.cuts:
        resizes = cut.reason == "sync.memory" and "resize_" in cut.detail
        if resizes and cut.count >= max(3, 2 * facts.steps):
            yield Advice(
                "fsdp.resize",
                cut.site,
                "parameters are freed and filled again at each layer, and what reads them runs before that",
                "fully_shard(..., reshard_after_forward=False) if the parameters of all layers fit; or fewer, larger "
                "units: a fully_shard for several layers together",
                cut.seconds,
                f"{cut.count} times, {cut.ops / cut.count:.0f} ops each",
            )


def _late(facts: Facts) -> Iterator[Advice]:
    """A rank for which the others wait in most collectives: its own take the least."""
    complete = [met for met in facts.met.values() if len(met.waits) == met.ranks]
    last: dict[int, list[tuple[float, str]]] = collections.defaultdict(list)  # by process: what was lost, and where
    for met in complete:
        process = min(met.waits, key=met.waits.__getitem__)
        last[process].append((max(met.waits.values()) - met.waits[process], met.site))
    for process, rows in last.items():
        lost = sum(seconds for seconds, _ in rows)
        if len(complete) < MET or len(rows) < MOST * len(complete) or lost < NOTABLE * facts.seconds:
            continue
        yield Advice(
            "collective.late",
            collections.Counter(site for _, site in rows).most_common(1)[0][0],
            f"{facts.processes[process].name} is last in most collectives, and the others wait for it",
            "look at what it does alone (more or longer data, logging, evaluation, a slower or busier machine): give "
            "it less work, or do that in another thread",
            lost,
            f"last in {len(rows)} of {len(complete)}, by {1e3 * lost / len(rows):.3g} ms on average",
        )


FINDERS: tuple[Callable[[Facts], Iterator[Advice]], ...] = (_many, _no_overlap, _barriers, _reducer, _resized, _late)
