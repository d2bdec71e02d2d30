"""Graphs: what AOTAutograd calls in the place of a graph. It keeps a program for each form of the arguments."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter

from fused_eager.fusion_rules import precision
from fused_eager.fusion_rules.padded import Refused

from ...bounded import Bounded
from ...compiling import emit
from ...compiling.buckets import Bucket
from ...config import Config
from ...log.events import LOG
from ...log.site import caller
from ...lowering.failed import NodeFailed
from ..context.context import fused_eager
from . import sizes
from .capture import Capture
from .program import Program
from .stage import in_own_thread
from .values import Unfit

FORMS = 16  # forms of the arguments, at most, for which a graph is compiled: further ones go to the first door
TRIES = 3  # buckets, at most, in which it is tried to prove that sizes may be padded
KEPT = 64  # programs: a number that counts on makes one at each call, and compiles nothing

Form = tuple[Hashable, ...]
_switches = precision.switches


class CompiledGraph:
    """A graph of ATen calls, compiled at its first call for the sizes that it is called with, and for others again.

    A graph that cannot be recorded ahead, for it reads values, runs op by op in a context of its own; so does one whose
    sizes keep changing, for there is decided what is worth compiling, and what runs block by block.
    """

    def __init__(self, graph: GraphModule, config: Config, backward: bool):
        self._boxed_call = True  # it is handed a list, and empties it; torch copies the mark from here to a wrapper
        self.graph = graph
        self.config = config
        self.backward = backward
        self.programs: Bounded[Form, Program] = Bounded(KEPT)
        self.compiled = 0  # the forms for which the compiler was needed
        self.before: Form | None = None  # the last form that was new
        self.sizes: sizes.Env = {}  # and what its sizes were
        self.padding = ""  # why sizes are not padded
        self.refused: dict[Bucket, str] = {}  # in which buckets
        self.unfit = ""
        self._lock = threading.Lock()

    def __call__(self, args: list[Any]) -> Any:
        """Run it, and leave `args` empty."""
        if self.config.mode == "off" or self.unfit:
            return self._by_ops(args)
        form = form_of(args)
        program = self.programs.get(form)
        if program is None:
            program = self._new(form, args)
            if program is None:
                return self._by_ops(args)
        if program.rooted and any(args[at].storage_offset() for at in program.rooted):
            return self._by_ops(args)
        return program(args)

    def _new(self, form: Form, args: Sequence[Any]) -> Program | None:
        """The program for another form; None where there is to be none."""
        with self._lock:
            found = self.programs.get(form)
            if found is not None or self.compiled >= FORMS:
                return found
            try:
                device = _other_device(args)
                if device:
                    raise Unfit(f"a tensor is on {device}, whose ops are recorded as they come")
                made = Capture(self.graph, self.config).program(args)
                bucket = self._fill_bucket(made, args)
                if not bucket:
                    self.compiled += made.make_ready()
            except Unfit as why:
                self.unfit = str(why)
                self._tell(form, self.unfit)
                return None
            full = self.compiled == FORMS
            over = f"its sizes keep changing: further forms than {FORMS} run op by op" if full and not bucket else ""
            self._tell(form, over, bucket)
            self.programs[form], self.before = made, form
            return made

    def _fill_bucket(self, made: Program, args: Sequence[Any]) -> str:
        """Give a program, of a graph that came with another size before, the executables that do for all sizes up to a
        bound. Returns which sizes these are; "" where it has none, and `padding` says why."""
        before, bucket = self.sizes, None
        try:
            self.sizes = now = sizes.symbols(self.graph, args)
            if not before or self.config.mode != "fused" or (self.config.measures and not self.config.waits):
                return ""
            symbol, bucket = sizes.varying(before, now)
            if bucket in self.refused or len(self.refused) >= TRIES:
                return ""

            def recorded(size: int) -> Program:
                return Capture(self.graph, self.config).program(sizes.at(self.graph, args, {**now, symbol: size}))

            others = [recorded(size) for size in bucket]

            def make() -> bool:
                sizes.make_ready(now[symbol], bucket, made, *others)
                return emit.begin()[1] > 0

            self.compiled += in_own_thread(make)
        except (Refused, Unfit, NodeFailed) as why:
            self.padding = str(why)
            if bucket is not None:
                self.refused[bucket] = self.padding
            return ""
        self.padding = ""
        return f"{bucket.low} to {bucket.high}"

    def _tell(self, form: Form, why: str, bucket: str = "") -> None:
        before = self.before or form
        found = [[what, str(a), str(b)] for what, a, b in zip(_words(form), before, form, strict=False) if a != b][:20]
        site = str(caller())
        told = {"forms": self.compiled, "changes": found, "unfit": why, "backward": self.backward, "site": site}
        LOG.emit("graph", **told, bucket=bucket, unpadded="" if bucket else self.padding)

    def _by_ops(self, args: list[Any]) -> Any:
        given = list(args)
        args.clear()
        interpreter = Interpreter(self.graph)
        if self.config.mode == "off" or _other_device(given):
            return interpreter.boxed_run(given)
        with fused_eager(**_options(self.config)):
            return interpreter.boxed_run(given)


def _other_device(args: Sequence[Any]) -> str:
    """The device of a tensor that is not in the host's memory; "" if all are."""
    return next((str(a.device) for a in args if isinstance(a, torch.Tensor) and a.device.type != "cpu"), "")


def _options(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def form_of(args: Sequence[Any]) -> Form:
    """All that a program depends on: torch's switches, and each argument's number, or sizes, strides and dtype."""
    return (_switches(), *map(_form, args))


def _form(a: Any) -> Hashable:
    if isinstance(a, torch.Tensor):
        try:
            return a.shape, a.stride(), a.dtype, a.is_conj(), a.is_neg()
        except RuntimeError:  # a sparse one has no strides
            return a.shape, a.layout, a.dtype
    return type(a), a


def _words(form: Form) -> list[str]:
    return ["torch's switches for products", *(f"argument {at}" for at in range(len(form) - 1))]
