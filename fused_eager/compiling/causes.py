"""Causes: why a region had to be compiled, in words: the difference from the nearest one that was compiled before.

Regions with the same ops in the same order are variants of one *skeleton*. A new one is compared with the variants of
its skeleton, else with what was compiled from the same lines.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..bounded import Bounded
from ..devices.home import Home
from ..log.site import Site, describe
from ..planning.order import operands
from ..planning.plan import in_program_order
from ..tracing.stream import views
from .key import Computation

VARIANTS = 64  # of one skeleton that are remembered
SHOWN = 3  # differences that are told in full
COMPARED = 1000  # ops that are searched for in as many others, which takes the product of both


@dataclass(frozen=True, slots=True)
class Compiled:
    """What is remembered of a compiled region: plain values, no tensors.

    `readers` has the position of the first op that reads each input; `alive` the positions of the ops whose results
    leave the region; `donated` the inputs whose memory it may take over.
    """

    ops: tuple[str, ...]
    sites: tuple[Site, ...]
    arguments: tuple[str, ...]
    views: tuple[Any, ...]
    inputs: tuple[Home, ...]
    readers: tuple[int, ...]
    alive: tuple[int, ...]
    donated: tuple[int, ...]
    flags: str
    continues: bool = False  # it was cut off from another in its plan, so its first line says nothing of earlier rounds


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a region was compiled.

    `code` is one of first, shape, dtype, argument, layout, liveness, donation, option, ops. `changes` are what
    differs, each as (what, before, now); `site` is the line to look at; `skeleton` numbers the sequence of ops, and
    `variant` counts its compilations from 1.
    """

    code: str
    why: str
    site: Site
    changes: tuple[tuple[str, Any, Any], ...] = ()
    skeleton: int = 0
    variant: int = 1


def of(computation: Computation, flags: object) -> Compiled:
    """What is to be remembered of a region."""
    nodes, homes = computation.nodes, computation.homes
    region = in_program_order(nodes, computation.region)
    chosen = [nodes[i] for i in region.nodes]
    first: dict[int, int] = {}
    made: dict[int, int] = {}
    for position, node in enumerate(chosen):
        for vid in operands(node):
            first.setdefault(vid, position)
        made.update((r.vid, position) for r in node.results)
    return Compiled(
        tuple(str(n.op) for n in chosen),
        tuple(describe(n.place) for n in chosen),
        tuple(f"{n.args}{n.kwargs}" for n in chosen),
        tuple(views(n) for n in chosen),
        tuple(homes[v] for v in region.inputs),
        tuple(first.get(v, 0) for v in region.inputs),
        tuple(made[v] for v in region.outputs if v in made),
        region.donated,
        str(flags),
        region.continues,
    )


@dataclass
class Memory:
    """What has been compiled in this process: variants by skeleton, and the last skeleton of each first line."""

    skeletons: Bounded[tuple[str, ...], tuple[int, list[Compiled]]] = field(default_factory=lambda: Bounded(4096))
    by_line: Bounded[tuple[str, str], Compiled] = field(default_factory=lambda: Bounded(4096))
    count: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def cause(self, now: Compiled) -> Cause:
        """Why `now` has to be compiled; remembers it for the next question."""
        with self.lock:
            known = self.skeletons.get(now.ops)
            if known is None:
                self.count += 1
                known = self.skeletons[now.ops] = (self.count, [])
            number, variants = known
            line = (now.ops[0], str(now.sites[0]))
            if variants:
                # The most recent of the nearest: what changed since is what the user has in mind.
                candidates = [difference(v, now) for v in reversed(variants)]
                code, changes, position = min(candidates, key=lambda found: len(found[1]))
                told = words(changes, code, now, position)
                at = now.sites[position]
            elif not now.continues and line in self.by_line and (told := other_ops(self.by_line[line], now)):
                code, changes, at = "ops", [], now.sites[0]
            else:
                code, changes, at = "first", [], now.sites[0]
                told = "these ops are compiled for the first time"
            if not now.continues and len(now.ops) > 1:  # one op alone, as in mode strict, is no form of a round
                self.by_line[line] = now
            variants.append(now)
            del variants[:-VARIANTS]
            return Cause(code, told, at, tuple(changes), number, len(variants))


MEMORY = Memory()  # what was compiled
CAME = Memory()  # whole streams, which ATen ran when they came

Change = tuple[str, Any, Any]


def difference(old: Compiled, now: Compiled) -> tuple[str, list[Change], int]:
    """How two variants of a skeleton differ: a cause's code, the changes, and the op (its position) to look at.

    Inputs come first: what differs in them brings all the rest with it.
    """
    if len(old.inputs) != len(now.inputs):
        # A list of other length: the samples that a DataLoader stacks to a batch.
        pairs = enumerate(zip(old.views, now.views, strict=True))
        longer = next((i for i, (u, v) in pairs if u and v and len(u[0]) != len(v[0])), 0)
        return "shape", [("number of inputs", len(old.inputs), len(now.inputs))], longer
    changes: list[Change] = []
    position = None
    code = "shape"
    for i, (before, after) in enumerate(zip(old.inputs, now.inputs, strict=True)):
        found = _of_input(i, before, after)
        if found and position is None:
            position = now.readers[i]
            code = "dtype" if before[0] != after[0] else "shape"
        changes += found
    if changes:
        return code, changes, position or 0
    for i, (a, b) in enumerate(zip(old.arguments, now.arguments, strict=True)):
        if a != b:
            return "argument", [(f"an argument of {now.ops[i]}", *_middle(a, b))], i
    for i, (u, v) in enumerate(zip(old.views, now.views, strict=True)):
        if u != v:
            return "layout", [(f"strides or offset of what {now.ops[i]} reads or writes", "other", "these")], i
    if old.alive != now.alive:
        more, fewer = sorted(set(now.alive) - set(old.alive)), sorted(set(old.alive) - set(now.alive))
        what: list[Change] = []
        for p in more + fewer:
            what.append((f"result of {now.ops[p]} at {now.sites[p]} needed afterwards", p in fewer, p in more))
        return "liveness", what or [("order of the results", "another", "this")], (more + fewer + [0])[0]
    if old.donated != now.donated:
        return "donation", [("inputs whose memory may be reused", list(old.donated), list(now.donated))], 0
    if old.flags != now.flags:
        return "option", [("options of the lowering", old.flags, now.flags)], 0
    return "ops", [("which op reads which result", "another", "this")], 0


def _of_input(i: int, before: Home, after: Home) -> list[Change]:
    if before[0] != after[0]:
        return [(f"dtype of input {i}", _dtype(before), _dtype(after))]
    if len(before[1]) != len(after[1]):
        return [(f"shape of input {i}", list(before[1]), list(after[1]))]
    pairs = enumerate(zip(before[1], after[1], strict=True))
    return [(f"shape[{d}] of input {i}", a, b) for d, (a, b) in pairs if a != b]


def _dtype(home: Home) -> str:
    return str(home[0]).removeprefix("torch.")


def _alike(a: Sequence[object], b: Sequence[object]) -> tuple[int, int]:
    """How many items two sequences have in common at the beginning, and how many of the others at the end."""
    start = end = 0
    most = min(len(a), len(b))
    while start < most and a[start] == b[start]:
        start += 1
    while end < most - start and a[-1 - end] == b[-1 - end]:
        end += 1
    return start, end


def _middle(a: str, b: str) -> tuple[str, str]:
    """The parts of two texts between their common beginning and end, widened to whole words."""
    start, end = _alike(a, b)
    while start and (a[start - 1].isalnum() or a[start - 1] in "._-"):
        start -= 1
    while end and (a[len(a) - end].isalnum() or a[len(a) - end] in "._"):
        end -= 1
    return a[start : len(a) - end] or "nothing", b[start : len(b) - end] or "nothing"


def words(changes: Sequence[Change], code: str, now: Compiled, position: int) -> str:
    """Changes in a sentence, equal ones told together."""
    if code == "liveness":
        shown = [what if after else what.replace("needed afterwards", "no longer needed") for what, _, after in changes]
    else:
        alike: dict[tuple[str, str], list[str]] = {}
        for what, before, after in changes:
            alike.setdefault((f"{before}", f"{after}"), []).append(what)
        shown = [f"{_list(names)} changed, {a} -> {b}" for (a, b), names in alike.items()]
    more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    only = "only " if len(shown) == 1 else ""
    told = f"{only}{'; '.join(shown[:SHOWN])}{more}"
    if code in ("shape", "dtype", "argument", "layout"):
        told += f" ({now.ops[position]} at {now.sites[position]})"
    return told


def _list(names: Sequence[str]) -> str:
    if len(names) > SHOWN:
        return f"{', '.join(names[:SHOWN])} and {len(names) - SHOWN} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def other_ops(old: Compiled, now: Compiled) -> str:
    """How the ops differ from those that were compiled from the same line before; empty if nothing is alike."""
    a = [f"{op} at {site}" for op, site in zip(old.ops, old.sites, strict=True)]
    b = [f"{op} at {site}" for op, site in zip(now.ops, now.sites, strict=True)]
    start, end = _alike(a, b)
    a, b = a[start : len(a) - end][:COMPARED], b[start : len(b) - end][:COMPARED]
    matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
    blocks = [block for block in matcher.get_opcodes() if block[0] != "equal"]
    if not blocks:
        return ""
    _, a0, a1, b0, b1 = blocks[0]
    gone, new = a1 - a0, b1 - b0
    said = []
    if new:
        said.append(f"{new} more, first {b[b0]}")
    if gone:
        said.append(f"{gone} fewer, first {a[a0]}")
    rest = f", and {len(blocks) - 1} further places" if len(blocks) > 1 else ""
    return f"other ops than before from {now.sites[0]}: {'; '.join(said)}{rest}"
