"""Graphs: what AOTAutograd calls in the place of a graph. It keeps a program for each form of the arguments."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch._prims import rng_prims
from torch.fx import GraphModule, Interpreter

from fused_eager.fusion_rules.padded import Refused

from ...bounded import Bounded
from ...compiling.buckets import Bucket
from ...config import Config
from ...log.events import LOG
from ...log.site import caller
from ...lowering.failed import NodeFailed
from ...xla import is_forked
from ..context.context import fused_eager
from . import sizes
from .capture import Capture
from .forms import Form, Forms, changes, form_of
from .program import Program
from .stage import in_own_thread, needs_compiler
from .values import Unfit

FORMS = 16  # forms of the arguments, at most, for which a graph is compiled: further ones go to the first door
TRIES = 3  # times, at most, that it is tried to prove that sizes may be padded, or that rows are apart
# Programs: a number that counts on makes one at each call, and compiles nothing. An op of one takes about a kilobyte.
KEPT, AT_LEAST, OPS = 1024, 64, 100_000  # at most and at least, and ops of all of them between these bounds
_mode = torch._C._get_dispatch_mode
_TRACING = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))


class CompiledGraph:
    """A graph of ATen calls, compiled at its first call for the sizes that it is called with, and for others again.

    A graph that cannot be recorded ahead, for it reads values, runs op by op in a context of its own; so does one whose
    sizes keep changing, for there is decided what is worth compiling, and what runs block by block.
    """

    def __init__(self, graph: GraphModule, config: Config, backward: bool, shown: int | None = None):
        self._boxed_call = True  # it is handed a list, and empties it; torch copies the mark from here to a wrapper
        self.graph = graph
        self.config = config
        self.backward = backward
        self.forms = Forms(graph)
        self.shown = shown  # how many of its results are not for the backward pass alone; None where all are
        kept = OPS // max(len(graph.graph.nodes), 1)
        self.programs: Bounded[Form, Program] = Bounded(max(AT_LEAST, min(KEPT, kept)))
        self.compiled = 0  # how often the compiler was needed
        self.alone = 0  # and that for one form alone
        self.beyond: Bounded[Form, None] = Bounded(KEPT)  # forms that are too many, and run op by op
        self.shares = False  # whether there is what runs several forms
        self.before: Form | None = None  # the last form that was new
        self.latest: Program | None = None  # and its program
        self.sizes: sizes.Env = {}  # and what its sizes were
        self.buckets: Bounded[Form, sizes.Recorded] = Bounded(FORMS)  # by what the largest is called with
        self.padding = ""  # why sizes are not padded
        self.refused: dict[Bucket, str] = {}  # in which buckets
        self.templates: sizes.Templates | None = None  # what runs any number of rows
        self.tried = 0  # how often that was tried
        self.unfit = ""
        self._lock = threading.Lock()

    def __call__(self, args: list[Any]) -> Any:
        """Run it, and leave `args` empty."""
        if self.unfit or self._is_native():
            return self._by_ops(args)
        key = self.forms.key(args)
        program = self.programs.get(key)
        if program is None:
            program = self._new(key, args)
            if program is None:
                return self._by_ops(args)
        if program.rooted and any(args[at].storage_offset() for at in program.rooted):
            return self._by_ops(args)
        return program(args)

    def _new(self, key: Form, args: Sequence[Any]) -> Program | None:
        """The program for another form; None where there is to be none."""
        with self._lock:
            found, form = self.programs.get(key), form_of(args)
            if found is not None:
                return found
            full = self.alone >= FORMS
            if full and (not self.shares or key in self.beyond):
                return None
            try:
                device = _other_device(args)
                if device:
                    raise Unfit(f"a tensor is on {device}, whose ops are recorded as they come")
                made = Capture(self.graph, self.config).program(args)
                made.returns(self.shown, self.backward)
                bucket = self._fill(made, args)
                if full and not bucket:
                    self.beyond[key] = None
                    return None
                if not bucket:
                    self._count(made.make_ready(), alone=True)
            except Unfit as why:
                self.unfit = str(why)
                self._tell(form, self.unfit)
                return None
            last = self.alone == FORMS and not bucket
            over = f"its sizes keep changing: further forms than {FORMS} run op by op" if last else ""
            self._tell(form, over, bucket)
            self.programs[key], self.latest, self.before = made, made, form
            return made

    def _fill(self, made: Program, args: Sequence[Any]) -> str:
        """Give a program, of a graph that came with another size before, executables that do for other sizes as well.
        Returns which sizes these are; "" where there are none, and `padding` says why."""
        before = self.sizes
        if self.config.mode != "fused" or (self.config.measures and not self.config.waits):
            return ""
        try:
            self.sizes = sizes.symbols(self.graph, args)
            found = (before and (self._fill_rows(made) or self._fill_bucket(made, args, before))) or ""
            self.shares = self.shares or bool(found)
            return found
        except Refused as why:
            self.padding = str(why)
            return ""

    def _fill_rows(self, made: Program) -> str:
        """The same for any number of large rows."""
        other = self.latest
        if self.templates is None and other is not None and self.tried < TRIES and sizes.is_large(made):
            self.tried += 1

            def make() -> None:
                self.templates = sizes.templates(made, other)

            try:
                self._count(needs_compiler(make))
            except Refused as why:
                self.padding = str(why)
        known = self.templates
        if known is None or not in_own_thread(lambda: sizes.take(known, made)):
            return ""
        self.padding = ""
        return "any, in blocks of rows"

    def _fill_bucket(self, made: Program, args: Sequence[Any], before: sizes.Env) -> str:
        """The same for all sizes up to a bound."""
        bucket, now = None, self.sizes
        try:
            symbols, bucket = sizes.varying(before, now)
            bucket = sizes.allowed(self.graph, symbols, now, bucket)
            if bucket in self.refused or len(self.refused) >= TRIES:
                return ""
            recorded = self._recorded(args, bucket, [{**now, **dict.fromkeys(symbols, size)} for size in bucket])
            self._count(needs_compiler(lambda: sizes.make_ready(now[symbols[0]], made, recorded)))
        except (Refused, Unfit, NodeFailed) as why:
            self.padding = str(why)
            if bucket is not None:
                self.refused[bucket] = self.padding
            return ""
        self.padding = ""
        return f"{bucket.low} to {bucket.high}"

    def _recorded(self, args: Sequence[Any], bucket: Bucket, envs: Sequence[sizes.Env]) -> sizes.Recorded:
        """The programs of a bucket's sizes, recorded when the first of these comes."""
        largest = sizes.at(self.graph, args, envs[0])
        key = form_of(largest)
        found = self.buckets.get(key)
        if found is None:
            given = [largest, *(sizes.at(self.graph, args, env) for env in envs[1:])]
            try:
                high, low, middle = (Capture(self.graph, self.config).program(each) for each in given)
            except Exception as why:  # what refuses the largest need not refuse what the graph is called with
                raise Refused(f"it cannot be recorded at another size: {why}") from why
            found = self.buckets[key] = sizes.Recorded(bucket, (high, low, middle))
        return found

    def _count(self, compiled: bool, alone: bool = False) -> None:
        self.compiled += compiled
        self.alone += compiled and alone

    def _tell(self, form: Form, why: str, bucket: str = "") -> None:
        found = changes(self.before or form, form)
        site = str(caller())
        told = {"forms": self.compiled, "changes": found, "unfit": why, "backward": self.backward, "site": site}
        LOG.emit("graph", **told, bucket=bucket, unpadded="" if bucket else self.padding)

    def _is_native(self) -> bool:
        """Whether torch alone runs the ops, now."""
        return self.config.mode == "off" or is_forked() or _is_traced()

    def _by_ops(self, args: list[Any]) -> Any:
        given = list(args)
        args.clear()
        interpreter = _Ops(self.graph)
        if _other_device(given) or self._is_native():
            return interpreter.boxed_run(given)
        with fused_eager(**_options(self.config)):
            return interpreter.boxed_run(given)


class _Ops(Interpreter):
    """Runs a graph's ops. To draw the same numbers in a forward and a backward pass, torch has two ops for devices that
    it knows; here they are for others."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        again = target is rng_prims.run_with_rng_state
        if not again and target is not rng_prims.run_and_save_rng_state:
            return super().call_function(target, args, kwargs)
        device = _other_device([kwargs.get("device"), *args])
        if not device:
            return super().call_function(target, args, kwargs)
        before, (op, *operands) = _random_state(device), args[again:]
        if not again:
            return before, op(*operands, **kwargs)
        _go_on_from(args[0], device)
        try:
            return op(*operands, **kwargs)
        finally:
            _go_on_from(before, device)


def _random_state(device: str) -> torch.Tensor:
    """What random numbers come of on a device: its own state, and the host's, from which they may be drawn."""
    return torch.cat([torch.get_rng_state(), torch.get_device_module(device).get_rng_state(device)])


def _go_on_from(state: torch.Tensor, device: str) -> None:
    host = len(torch.get_rng_state())
    torch.set_rng_state(state[:host])
    torch.get_device_module(device).set_rng_state(state[host:], device)


def _is_traced() -> bool:
    """Whether tensors have no values now, or ops are written down: then a graph is its ops."""
    return bool(torch._C._len_torch_dispatch_stack()) and any(_mode(key) is not None for key in _TRACING)


def _other_device(args: Sequence[Any]) -> str:
    """The device, of a tensor or by itself, that is not the host; "" if there is none."""
    devices = (a.device if isinstance(a, torch.Tensor) else a for a in args)
    return next((str(d) for d in devices if isinstance(d, torch.device) and d.type != "cpu"), "")


def _options(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}
