"""Capture: a graph of ATen calls is recorded ahead, on tensors that stand for values, and becomes a program.

A stand-in is an ordinary tensor, trapped, whose memory nobody reads. Views of it are made by torch, so what is a view
of what is torch's own answer; computations are recorded by what records them at the first door (`recording.ahead`).
What only torch can run becomes a call between two stages, or before the stage where it needs nothing of it: so random
numbers are drawn in the order of the program, and cut nothing.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fused_eager.fusion_rules import precision
from fused_eager.fusion_rules.geometry import Geometry, is_dense

from ...config import Config
from ...devices.buffer import LOCK
from ...devices.home import nbytes_of
from ...devices.host import unwritten
from ...devices.host.device import for_caller
from ...devices.storage import storage_of
from ...executing.island import judge
from ...executing.load import homes_of_values
from ...log.events import LOG
from ...log.graph_site import place_of
from ...log.reasons import Reason
from ...log.site import caller, describe, here
from ...planning.plan import Work
from ...quiet import unobserved
from ...recording.ahead import Refused, forget, record_ahead
from ...tracing.opinfo import RANDOM_UNLESS_ZERO, Kind, OpInfo, info_of
from ...tracing.stream import NativeInput, Stream
from . import control, flex
from .program import Call, Made, Program, free_slots
from .stage import Stage
from .templates import Fetch, mapped
from .values import Opaque, Unfit, is_ordinary, leaves, promised

Tensor = torch.Tensor
aten = torch.ops.aten
END = "cut.graph"


# Draws that look at no value of their operand: its shape and dtype say all.
_VALUELESS = frozenset(
    {"aten::bernoulli.p", "aten::uniform", "aten::normal_functional", "aten::exponential", "aten::geometric",
     "aten::log_normal", "aten::cauchy", "aten::random", "aten::random.from", "aten::random.to"}
)  # fmt: skip


_QUANTIZING = frozenset(
    {"aten::quantize_per_tensor", "aten::quantize_per_tensor_dynamic", "aten::quantize_per_channel",
     "aten::_make_per_tensor_quantized_tensor", "aten::_make_per_channel_quantized_tensor",
     "aten::_empty_affine_quantized", "aten::_empty_per_channel_affine_quantized", "aten::empty_quantized"}
)  # fmt: skip
_DEQUANTIZING = frozenset({"aten::dequantize", "aten::int_repr"})


class Capture:
    """The recording of one graph for arguments of given sizes."""

    def __init__(self, graph: GraphModule, config: Config):
        self.graph = graph
        self.config = config
        self.caller = here()
        self.site = caller()  # of all its runs: to find it at each takes as long as all else that is told of one
        self.stream = Stream(config, ahead=True)
        self.steps: list[Call | Stage] = []
        self.slots = 0
        self.slot_of: dict[int, int] = {}  # by storage address
        self.given: dict[int, Tensor] = {}  # the stand-ins of slots that hold a tensor as it is
        self.constants: list[tuple[int, Any]] = []
        self.env: dict[Node, Any] = {}
        self.rooted: set[int] = set()
        self.keep: list[Any] = []  # stand-ins whose storages' addresses are in use
        self.last: dict[Node, int] = {}
        self.at = 0

    def program(self, args: Sequence[Any]) -> Program:
        """Record the graph for arguments like `args`.

        Raises:
            Unfit: that cannot be.
        """
        with LOCK, unobserved():
            try:
                return self._program(args)
            finally:
                forget(self.stream)

    def _program(self, args: Sequence[Any]) -> Program:
        given = iter(args)
        arguments: list[int | None] = []

        def argument() -> Any:
            value = next(given)
            arguments.append(None if isinstance(value, (int, float, bool, type(None))) else self.slots)
            return value if arguments[-1] is None else self._stand_in(value)

        result = self._returned(self.graph, argument)
        self._close(Reason(END, site=self.site))
        result = mapped(self._template, result)
        drops = free_slots(self.steps, result, self.slots)
        rooted = tuple(at for at, slot in enumerate(arguments) if slot in self.rooted)
        return Program(self.steps, drops, tuple(arguments), tuple(self.constants), self.slots, result, rooted)

    def _returned(self, graph: GraphModule, argument: Callable[[], Any]) -> Any:
        """What a graph returns: the graph, or another that stands in the place of the node at hand."""
        nodes, at_hand = list(graph.graph.nodes), self.at
        inside = graph is not self.graph
        for at, node in enumerate(nodes):
            for operand in node.all_input_nodes:
                self.last[operand] = at_hand if inside else at
        for at, node in enumerate(nodes):
            self.at = at_hand if inside else at
            if node.op == "placeholder":
                self.env[node] = argument()
            elif node.op == "get_attr":
                self.env[node] = self._constant(node, graph)
            elif node.op == "output":
                break
            elif node.op == "call_function":
                args, kwargs = mapped(self._looked_up, node.args), mapped(self._looked_up, dict(node.kwargs))
                self.env[node] = self._call(node, node.target, args, kwargs)  # type: ignore[arg-type]
            else:
                raise Unfit(f"the graph has a node {node.op}")
        return mapped(self._looked_up, nodes[-1].args[0])

    def _looked_up(self, a: Any) -> Any:
        return self.env[a] if isinstance(a, Node) else a

    # ---- stand-ins ----

    def _slot(self) -> int:
        self.slots += 1
        return self.slots - 1

    def _stand_in(self, value: Any) -> Any:
        """What stands for a value that lies in a slot of its own."""
        slot = self._slot()
        if not is_ordinary(value):
            return Opaque(slot)
        size, strides = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
        t = self._made(size, strides, value.dtype)
        t = t.conj() if value.is_conj() else t
        t = t._neg_view() if value.is_neg() else t
        self._own(t, slot)
        self.given[slot] = t
        return t

    def _made(self, size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        reach = 1 + sum((n - 1) * s for n, s in zip(size, strides, strict=True)) if 0 not in size else 0
        flat = unwritten.tensor((reach,), (1,), dtype, reach * dtype.itemsize)
        self.keep.append(flat)
        return flat.as_strided(size, strides)

    def _own(self, t: Tensor, slot: int) -> None:
        self.keep.append(t)
        self.slot_of[storage_of(t)._cdata] = slot

    def _constant(self, node: Node, graph: GraphModule) -> Any:
        value: Any = graph
        for name in str(node.target).split("."):
            value = getattr(value, name)
        if not isinstance(value, Tensor):
            return value
        made = self._stand_in(value)
        self.constants.append((self.slots - 1, value))
        return made

    def _template(self, a: Any) -> Any:
        if isinstance(a, Opaque):
            return Fetch(a.slot)
        if not isinstance(a, Tensor):
            return a
        slot = self.slot_of[storage_of(a)._cdata]
        if self.given.get(slot) is a:
            return Fetch(slot)
        conj = a.dtype.is_complex and a.is_conj()
        return Fetch(slot, Geometry(tuple(a.shape), a.stride(), a.storage_offset(), a.dtype, conj, a.is_neg()))  # type: ignore[arg-type]

    def _take_root(self, t: Any) -> None:
        """Note that a tensor's memory is counted from the beginning of its storage: what an argument's stand-in stands
        for has to begin there."""
        slot = self.slot_of.get(storage_of(t)._cdata)
        if slot is not None and slot in self.given:
            self.rooted.add(slot)

    # ---- calls ----

    def _call(self, node: Node, target: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        found = leaves([args, kwargs])
        values = [a for a in found if isinstance(a, (Tensor, Opaque))]
        if target is operator.getitem:
            return args[0][args[1]]
        if target is torch.ops.prims.convert_element_type.default:  # of a number that Dynamo has made a tensor
            target, args, kwargs = aten._to_copy.default, args[:1], {"dtype": args[1]}
        if not isinstance(target, OpOverload):
            if not values:
                return target(*args, **kwargs)
            decompose = self._flex if flex.is_flex(target) else self._control
            found = decompose(node, target, args, kwargs)
            return found if isinstance(found, tuple) else self._native(node, target, args, kwargs, why=found)
        info = info_of(target)
        if any(isinstance(a, Opaque) for a in values) or target._schema.name in _QUANTIZING:
            return self._native(node, target, args, kwargs, info)
        kind = info.kind
        if kind is Kind.RANDOM and str(target) in RANDOM_UNLESS_ZERO:
            at = info.names.index(RANDOM_UNLESS_ZERO[str(target)])
            drawn = args[at] if at < len(args) else kwargs.get(info.names[at], 0)
            kind = kind if drawn else Kind.COMPUTE
        if target._schema.name.startswith("aten::as_strided"):
            self._take_root(args[0])
        if target is aten.as_strided_scatter.default and not kwargs and _is_all(args[0]):
            return self._scattered(node, *args)
        if kind is Kind.VIEW:
            try:
                return target(*args, **kwargs)
            except RuntimeError as error:  # a stand-in has the memory that its tensor spans, and no more
                raise Unfit(f"{target} reaches beyond a tensor: {error}") from error
        if kind is Kind.COMPUTE:
            return self._compute(node, info, args, kwargs)
        if kind is Kind.ALLOCATE:
            return self._allocate(target, args, kwargs)
        if kind is Kind.RANDOM:
            if target is aten.native_dropout.default:
                return self._dropout(node, *args)
            if target._schema.name.endswith("_like") or _name(target) in _VALUELESS:
                # An operand that the draw does not look at: other memory of its form will do.
                args = [self._allocate(aten.empty_like.default, (args[0],), {}), *args[1:]]
            return self._native(node, target, args, kwargs, info)
        if kind is Kind.VALUES and not values and not leaves([node.meta.get("val")]):
            return target(*args, **kwargs)
        if kind is Kind.METADATA:
            raise Unfit(f"{target} changes a tensor's own geometry")
        if kind is Kind.CHECK and not values:
            return target(*args, **kwargs)
        return self._native(node, target, args, kwargs, info)

    def _scattered(self, node: Node, x: Tensor, part: Tensor, *view: Any) -> Tensor:
        """A copy of memory of which a view is written: what autograd makes of the gradient of an `as_strided`."""
        out: Tensor = self._compute(node, info_of(aten.clone.default), (x,), {})
        self._compute(node, info_of(aten.copy_.default), (aten.as_strided.default(out, *view), part), {})
        return out

    def _control(self, node: Node, target: Any, args: Any, kwargs: Any) -> Any:
        """`cond`, `while_loop` or `scan` as an op of the stream; else why torch has to run it."""
        parts = control.taken(target, args)
        if parts is None:
            return ""
        try:
            if any(isinstance(a, Opaque) for a in parts[2]):
                raise control.Unlike("it takes what is no dense tensor")
            config = self.config.replace(max_pending=1 << 30, islands="allow")
            op, given = control.lowered(target, parts, lambda g, c, x: Capture(g, c).program(x), config)
            out = tuple(self._compute(node, info_of(op), given, {}))
            promised = node.meta.get("val")
            if promised is not None:
                alike = [(tuple(a.shape), a.stride(), a.dtype) for a in out]
                if alike != [(tuple(p.shape), p.stride(), p.dtype) for p in promised]:
                    raise control.Unlike("its results are laid out otherwise")
            return out
        except (control.Unlike, Unfit) as why:
            return str(why)

    def _flex(self, node: Node, target: Any, args: Any, kwargs: Any) -> Any:
        """Flex attention as the ops that torch makes of it; else why torch has to run it."""
        if any(isinstance(a, Opaque) for a in leaves([args, kwargs])):
            return "it takes what is no dense tensor"
        made = flex.decomposed(target, node, args, kwargs)
        if isinstance(made, str):
            return made
        graph, given = made
        return tuple(self._returned(graph, iter(given).__next__))

    def _dropout(self, node: Node, x: Tensor, p: float, train: bool | None) -> tuple[Any, Any]:
        """What ATen's kernel for the host does, step by step: only the mask is drawn by torch, before the stage, and in
        memory that is laid out as the kernel's."""
        if train is False or not x.numel():
            ones = self._compute(node, info_of(aten.ones_like.default), (x,), {"dtype": torch.bool})
            return self._compute(node, info_of(aten.clone.default), (x,), {}), ones
        if p == 1:  # `F.dropout`, which Dynamo has written down as this op, then draws nothing
            mask = self._compute(node, info_of(aten.zeros_like.default), (x,), {"dtype": torch.bool})
            return self._compute(node, info_of(aten.mul.Tensor), (x, mask), {}), mask
        mask = self._allocate(aten.empty_like.default, (x,), {"dtype": torch.bool})
        self.steps.append(Call(aten.bernoulli_.float, [self._template(mask), 1 - p], {}, (Made(self._slot()),)))
        kept = self._compute(node, info_of(aten.mul.Tensor), (x, mask), {})
        return self._compute(node, info_of(aten.mul.Tensor), (kept, 1 / (1 - p)), {}), mask

    def _compute(self, node: Node, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
        place = place_of(node, self.caller)
        try:
            out = record_ahead(self.stream, info, args, kwargs, place)
        except Refused as why:
            self._tell(info.op, str(why), place)
            return self._native(node, info.op, args, kwargs, info)
        if len(self.stream.nodes) >= self.config.max_pending:
            self._close(Reason("cut.full", f"{len(self.stream.nodes)} ops", self.site))
        return out

    def _tell(self, op: Any, why: str, place: Any) -> None:
        if isinstance(op, OpOverload):
            judge(self.config, op, place, why)
        LOG.emit("island", op=str(op), reason=why, site=str(describe(place)))

    def _allocate(self, target: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        """Memory that nobody has written, new at each call of the program."""
        like = target(*args, **kwargs)
        if not is_ordinary(like):
            raise Unfit(f"{target} makes memory elsewhere")
        size, strides = tuple(like.shape), like.stride()
        slot = self._slot()
        t = self.given[slot] = self._made(size, strides, like.dtype)
        self._own(t, slot)
        self.steps.append(Call(torch.empty_strided, (size, strides), {"dtype": like.dtype}, (Made(slot),)))
        return t

    def _native(
        self, node: Node, target: Any, args: Any, kwargs: dict[str, Any], info: OpInfo | None = None, why: str = ""
    ) -> Any:
        """A call that torch makes itself, before the stage that is being recorded unless it reads what that makes."""
        place = place_of(node, self.caller)
        if info is None or info.kind in (Kind.CUSTOM, Kind.PARTS, Kind.COMPOSITE, Kind.VALUES, Kind.CHECK):
            self._tell(target, why or "it is no op that can be recorded", place)
        pending = self.stream.pending
        reads = [storage_of(a)._cdata for a in leaves([args, kwargs]) if isinstance(a, Tensor)]
        if any(cdata in pending for cdata in reads) or info is None or info.written:
            self._close(Reason("sync.island", f"{target} runs natively", describe(place)))
        made: list[Made] = []
        name = info.op._schema.name if info is not None else ""
        quantized = name in _QUANTIZING or any(type(a) is Opaque and a.quantized for a in leaves([args, kwargs]))

        def stand_in(val: Any) -> Any:
            if val is None or isinstance(val, (bool, str)):
                return val
            if isinstance(val, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
                raise Unfit(f"{target} returns a number, which what follows depends on")
            if quantized and name not in _DEQUANTIZING:
                made.append(Made(self._slot()))
                return Opaque(self.slots - 1, True)
            found = self._stand_in(val)
            is_read = read is None or len(made) in read
            form = (tuple(val.shape), val.stride(), val.dtype) if is_read and isinstance(found, Tensor) else ()
            made.append(Made(self.slots - 1, *form))
            return found

        val = promised(node, target, args, kwargs)
        # Of some ops torch's shape function is mistaken in what hardly anybody reads.
        read = _read(node, val)
        template = mapped(self._template, list(args)), mapped(self._template, kwargs)
        out = mapped(stand_in, val)
        self.steps.append(Call(target, *template, tuple(made)))
        return out

    def _close(self, reason: Reason) -> None:
        """End the stage that is being recorded."""
        stream = self.stream
        if stream.nodes:
            outputs, written, donatable = [], [], set()
            alive = {storage_of(t)._cdata for t in self._alive()}
            natives: defaultdict[int, list[NativeInput]] = defaultdict(list)
            for item in stream.inputs:
                assert isinstance(item, NativeInput)  # nothing is on the device here
                natives[item.storage._cdata].append(item)
            for cdata, b in stream.pending.items():
                slot = self.slot_of.get(cdata)
                if slot is not None:
                    t = self.given[slot]
                    size, strides = tuple(t.shape), t.stride()
                    written.append((b.vid, slot, Geometry(size, strides, 0, t.dtype)))
                    read = natives.get(cdata, ())
                    if len(read) == 1 and read[0].home == b.home and is_dense(size, strides):
                        donatable.add(read[0].vid)  # it is overwritten whole
                elif cdata in alive:
                    self.slot_of[cdata] = slot = self._slot()
                    outputs.append((b.vid, slot))
                    self.keep.append(b.storage)
            live = frozenset([*(vid for vid, _ in outputs), *(vid for vid, _, _ in written)])
            switches, default = precision.switches(), torch.get_default_dtype()
            config, homes = self.config, homes_of_values(stream)
            inputs = [(i.vid, i.home, self.slot_of[at], i.offset) for at, found in natives.items() for i in found]
            ends = (live, frozenset(donatable), config, reason)
            device = for_caller(sum(map(nbytes_of, homes.values())))
            work = Work(stream.nodes, homes, *ends, switches, default, device)
            self.steps.append(Stage(work, tuple(inputs), tuple(outputs), tuple(written), reason))
        forget(stream)

    def _alive(self) -> list[Tensor]:
        """The stand-ins of what is read from here on."""
        return [
            t
            for node, last in self.last.items()
            if last >= self.at and node in self.env
            for t in leaves([self.env[node]])
            if isinstance(t, Tensor)
        ]


def _is_all(t: Tensor) -> bool:
    """Whether a tensor is dense and begins where its storage does, so that a copy is laid out as it is."""
    return not t.storage_offset() and is_dense(tuple(t.shape), t.stride()) and not (t.is_conj() or t.is_neg())


def _read(node: Node, val: Any) -> set[int] | None:
    """Which of the values that a call returns are read, as their numbers among those that are there; None if all may
    be."""
    if not isinstance(val, tuple) or any(isinstance(v, (list, tuple)) for v in val):
        return None
    if any(user.target is not operator.getitem for user in node.users):
        return None
    places: list[Any] = [user.args[1] for user in node.users if user.users]
    return {sum(v is not None for v in val[:at]) for at in places}


def _name(op: OpOverload) -> str:
    return op._schema.name + (f".{op._schema.overload_name}" if op._schema.overload_name else "")
