"""Program: a graph that has been recorded, as steps, and what runs them on real tensors.

The steps are stages, each a stream with its plan, and calls that only torch can make. What they hand to each other are
storages: a slot holds the tensor over a storage's memory, and each value of the graph is a view of one. So views,
aliases and updates in place come out as they do in eager, whatever made the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...devices.host.device import HOST
from ...executing import run
from ...log.reasons import Reason
from ...quiet import unobserved
from ...recording import native
from .results import Results
from .stage import Slots, Stage, needs_compiler
from .templates import Fetch, fetched, read

Tensor = torch.Tensor


class Made(NamedTuple):
    """A slot that a call fills, and the form of tensor that what follows was recorded for; None where nobody minds."""

    slot: int
    size: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A call that torch makes itself: `made` is what it returns, in order."""

    target: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    made: tuple[Made, ...]
    is_flat: bool = field(init=False)  # slots are among the arguments as they are, and nowhere else

    def __post_init__(self) -> None:
        held = [type(a) is Fetch and a.geometry is None for a in self.args]
        others = [a for a, is_held in zip(self.args, held, strict=True) if not is_held]
        object.__setattr__(self, "is_flat", not read([others, self.kwargs]))

    def run(self, slots: Slots) -> None:
        """Make the call, on the values of the slots."""
        if self.is_flat:
            result = self.target(*[slots[a.slot] if type(a) is Fetch else a for a in self.args], **self.kwargs)
        else:
            result = self.target(*fetched(self.args, slots), **fetched(self.kwargs, slots))
        found = list(_flat(result))
        if len(found) != len(self.made):
            raise RuntimeError(f"{self.target} returned {len(found)} values where {len(self.made)} were promised")
        for made, value in zip(self.made, found, strict=True):
            slots[made.slot] = value if made.size is None else self._as_promised(value, made)

    def _as_promised(self, t: Tensor, made: Made) -> Tensor:
        size, strides = made.size, made.strides
        assert size is not None and strides is not None
        if tuple(t.shape) != size or t.dtype is not made.dtype or t.layout is not torch.strided:
            raise RuntimeError(
                f"{self.target} returned {t.dtype}{list(t.shape)} ({t.layout}) where its shape function promised "
                f"{made.dtype}{list(size)}"
            )
        if t.is_conj() or t.is_neg():
            t = t.resolve_conj().resolve_neg()
        if t.stride() == strides:
            return t
        return torch.empty_strided(size, strides, dtype=t.dtype).copy_(t)


def _flat(result: Any) -> Any:
    if isinstance(result, (list, tuple)):
        for each in result:
            yield from _flat(each)
    elif result is not None:
        yield result


@dataclass(slots=True)
class Program:
    """A recorded graph. `arguments` says for each argument of the graph which slot it goes to; None for a number. The
    arguments at `rooted` have to begin where their storages do."""

    steps: list[Call | Stage]
    drops: list[tuple[int, ...]]  # after each step: slots that nobody needs any more
    arguments: tuple[int | None, ...]
    constants: tuple[tuple[int, Any], ...]
    slots: int
    result: Any
    rooted: tuple[int, ...] = ()
    results: Results = field(init=False)

    def __post_init__(self) -> None:
        self.returns()

    def returns(self, shown: int | None = None, gradients: bool = False) -> None:
        """Say what the results are: the first `shown` are for the program, the others for the backward pass; or all
        are gradients."""
        new = {slot for step in self.steps if isinstance(step, Stage) for _, slot in step.outputs}
        given = {slot for slot in self.arguments if slot is not None}
        templates = self.result if isinstance(self.result, (list, tuple)) else [self.result]
        self.results = Results(templates, new, given, shown, gradients)
        seen = frozenset(read(list(templates[:shown])))
        for step in self.steps:
            if isinstance(step, Stage):
                step.shown = seen

    def make_ready(self) -> bool:
        """Load or compile all that it needs. Returns whether the compiler was needed."""

        def make() -> None:
            for step in self.steps:
                if isinstance(step, Stage):
                    step.kept.fill(step.work)

        return needs_compiler(make)

    def __call__(self, args: list[Any]) -> Any:
        """Run it; empties `args`, so that what is not needed any more is freed on the way."""
        slots: Slots = [None] * self.slots
        for slot, value in zip(self.arguments, args, strict=True):
            if slot is not None:
                slots[slot] = value
        args.clear()
        value = None
        for slot, value in self.constants:
            slots[slot] = value
        del value
        if HOST.table or run.DEFERRED.launches:  # in a context: what it reads is finished first
            native.materialize(slots, Reason("sync.memory", "a compiled graph"))
        with unobserved():
            with torch._C._AutoDispatchBelowADInplaceOrView():
                for step, dying in zip(self.steps, self.drops, strict=True):
                    step.run(slots)
                    for slot in dying:
                        slots[slot] = None
                made = self.results.own(slots)
            return self.results.finish(made, slots)


def free_slots(steps: Sequence[Call | Stage], result: Any, slots: int) -> list[tuple[int, ...]]:
    """After which step which slots are not needed any more."""
    last = dict.fromkeys(read(result), len(steps))
    drops: list[tuple[int, ...]] = []
    for at in range(len(steps) - 1, -1, -1):
        step = steps[at]
        if isinstance(step, Call):
            touched = [*read(step.args), *read(step.kwargs), *(made.slot for made in step.made)]
        else:
            touched = [s for _, _, s, _ in step.inputs] + [s for _, s in step.outputs] + [s for _, s, _ in step.written]
        drops.append(tuple(dict.fromkeys(s for s in touched if s not in last)))
        for slot in touched:
            last.setdefault(slot, at)
    return drops[::-1]
