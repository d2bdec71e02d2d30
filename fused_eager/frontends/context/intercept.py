"""The front door for CPU tensors: a TorchDispatchMode that hands each op to the recorder.

A front door decides only how ops arrive. Everything behind it (`recording.record`, `executing.run`, `recording.native`)
knows tensors and overloads, so a second one, a device of its own, needs no change there.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._C import _len_torch_function_stack as _functions
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from fused_eager.fusion_rules import families
from fused_eager.fusion_rules.decompose import is_composite

from ... import follower, profiled, quiet
from ...compiling import background
from ...config import Config
from ...devices.buffer import LOCK
from ...executing import choices, run
from ...executing.materialize import give_up, hand_over, materialize_all, take_over
from ...log import site
from ...log.events import LOG
from ...log.reasons import OUTSIDE, Reason
from ...policy.allowance import ALLOWANCE, limits
from ...recording import native, other_devices, record, rounds
from ...recording.native import nothing_is_pending
from ...tracing.calls import shape_of
from ...tracing.opinfo import RANDOM_UNLESS_ZERO, Kind, OpInfo, info_of
from ...tracing.stream import Stream
from ...tracing.trace import MEMORY
from . import collectives, inspecting, subclasses
from .bypass import Bypass, turned

_is_inference, _inference_mode = torch.Tensor.is_inference, torch.is_inference_mode_enabled
_modes_below = torch._C._len_torch_dispatch_stack
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}  # of wrapped numbers


class Watcher(TorchDispatchMode):
    """A mode that is entered before a context to see what runs natively in it, and nothing else."""


def _only_watchers() -> bool:
    return all(isinstance(mode, Watcher) for mode in quiet.stack())


class FrontDoor(Bypass):
    """Intercepts the ops of one thread and records them in its stream."""

    def __init__(self, config: Config, lender: FrontDoor | None = None):
        super().__init__(Stream(config), lender)
        self.config = config  # what its context was entered with
        self.open = True  # whether threads that are started may still enter in its name
        self.parked = 0.0  # when its context was left last, if it is parked (`parking`)
        self.keeps_subnormals = False  # the program has asked for them in this context (`subnormals`)
        self.raised: list[BaseException] | None = None  # what an op has, last, in a call that forgets it (`tracers`)

    def reopen(self, config: Config) -> None:
        """A context is entered again for which this one was kept. How its streams fared it still knows."""
        self.config = self.stream.config = config
        self.policy.enter_again()
        self.open, self.hidden, self.reads, self.backwards = True, False, 0, 0
        self.keeps_subnormals = False

    def allowed(self, config: Config) -> Config:
        """The options that hold where the program asks for `config`: regions flush subnormal numbers."""
        return config.replace(mode="off") if self.keeps_subnormals else config

    def take(self, config: Config) -> None:
        """From here on these options hold; nothing is pending that was recorded under others."""
        self.stream.config = config
        if limits(config):
            ALLOWANCE.enter(self.policy.backoff)
        else:  # natively nothing would be checked, or fused
            self.policy.backoff.end()

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap every call in a guard against its own compiler, which costs as much as the op.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _functions():
            with quiet.functions_hidden():
                return self.__torch_dispatch__(func, types, args, kwargs)
        if subclasses.asks_functions(args, kwargs):
            with torch._C.DisableTorchFunctionSubclass():
                return self.__torch_dispatch__(func, types, args, kwargs)
        if profiled.on and getattr(func, "namespace", "") != "profiler":  # whose ranges are the program's own
            return self._profiled(func, types, args, kwargs)
        # As in `unobserved`, but without an object: making one is what lets the collector run.
        collected = gc.isenabled()
        if collected:
            gc.disable()
        try:
            return self._dispatch(func, types, args, kwargs)
        except BaseException as error:
            if (given := self._given_again(func, args, kwargs, error)) is None:
                raise
            return self._dispatch(func, types, *given)
        finally:
            if collected:
                gc.enable()

    def _profiled(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """An op that torch has told its profiler of: what follows from it is ours."""
        collected = gc.isenabled()
        gc.disable()
        try:
            with profiled.hidden():
                return self._dispatch(func, types, args, kwargs)
        except BaseException as error:
            if (given := self._given_again(func, args, kwargs, error)) is None:
                raise
            with profiled.hidden():
                return self._dispatch(func, types, *given)
        finally:
            if collected:
                gc.enable()

    def _given_again(self, func: Any, args: Any, kwargs: Any, error: BaseException) -> tuple[Any, Any] | None:
        """Of a call that has raised: `_with_tensors`, or None, where the exception goes on."""
        given = _with_tensors(func, args, kwargs, error)
        if given is None and self.raised is not None:
            self.raised[:] = [error]
        return given

    def _begin(self, func: Any, args: Any) -> None:
        """The first op since the last boundary."""
        stream, policy = self.stream, self.policy
        if not stream.config.measures:
            policy.autotuner.waiting = False
        elif self.lender is not None and self.lender.someone_is_bypassed():
            policy.autotuner.go_along()
        else:
            with torch._C.DisableTorchFunction():  # `set_` comes here without asking a subclass's function first
                shapes = list(_shapes(args))
            changes = policy.begin(site.here(), id(func), shapes)
            if changes and policy.autotuner.native:
                # What is on the device would be fetched one by one, and looked for at every op.
                hand_over(Reason("region.native"), only=stream)
            elif changes:
                take_over()

    def _dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        stream = self.stream
        policy = stream.policy
        # What is not ours passes before anything of it is looked at: its sizes may be symbols.
        if _modes_below() and not _only_watchers():
            return _pass_on(stream, func, args, kwargs or {})
        for kind in types:
            if not subclasses.is_plain(kind):
                subclasses.leave_to(args, kwargs)
                return NotImplemented
        if policy.autotuner.waiting:
            self._begin(func, args)
        natively = policy.runs_natively(stream.config.measures)
        if natively and id(func) in _HARMLESS and nothing_is_pending() and not policy.autotuner.countdown:
            return quiet.through(func, args, kwargs or {})
        config = stream.config
        mode = config.mode
        if kwargs is None:
            kwargs = {}
        if mode == "off" or _in_child:
            return quiet.through(func, args, kwargs)
        if not isinstance(func, OpOverload):
            # A higher-order op calls its branches itself, on finished tensors.
            materialize_all(Reason("sync.island", f"{func} runs natively"), only=stream)
            with profiled.shown():
                return func(*args, **kwargs)
        step = stream.expected()
        # The op that came next last time is known without a look-up, which costs as much as a small op.
        info = step.info if step is not None and step.info.op is func else info_of(func)
        kind = info.kind
        if natively and kind in _LEFT_ALONE and not info.writes_list:
            _HARMLESS.add(id(func))
        if kind is Kind.VIEW or kind is Kind.ALLOCATE:
            return profiled.through(func, args, kwargs) if profiled.on else func(*args, **kwargs)
        if kind is Kind.CUSTOM:
            if info.op.namespace in collectives.NAMESPACES:
                return collectives.run_collective(stream, info, args, kwargs, lambda: self)
            # Not under the lock: a collective may wait for another process, and that for a thread of this one.
            return native.run_free(stream, info, args, kwargs, "a custom op may do more than compute")
        with LOCK:
            if self.stream.config is not config:  # the thread that opened this context has just closed it
                return self._dispatch(func, types, args, kwargs)
            if stream.unfinished is not None:
                run.flush(stream, Reason("cut.full", "after an interrupt"))
            if kind is Kind.COMPUTE:
                return self._compute(stream, mode, info, args, kwargs)
            return self._other(stream, info, args, kwargs)

    def _compute(self, stream: Stream, mode: str, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
        if info.writes_list and any(map(_is_inference, args[info.written[0]])) and not _inference_mode():
            with quiet.counting_writes():  # ATen refuses it
                return native.run_now(stream, info, args, kwargs, "it writes inference tensors outside of that mode")
        out = self._computed(stream, mode, info, args, kwargs)
        if info.writes_list:
            # The elements of a list get no version bump above us; in eager ATen's kernel makes it, one by one.
            torch.autograd.graph.increment_version(args[info.written[0]])
        return out

    def _computed(self, stream: Stream, mode: str, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
        config, policy = stream.config, stream.policy
        if config.log == "ops":
            inspecting.print_call(info, args, kwargs)
        if policy.backoff.left:
            return native.run_through(stream, info, args, kwargs, policy.backoff.code)
        seen_alone = self.lender is not None and self.lender.someone_is_bypassed()
        if seen_alone and config.measures:
            return native.run_through(stream, info, args, kwargs, "region.native")
        if policy.autotuner.native and config.measures and not self._records_from_here(info, args):
            return native.run_through(stream, info, args, kwargs, "region.native")
        device = other_devices.device_of(args, kwargs)
        if device:
            out = other_devices.run(config, info, args, kwargs, device)
            if mode == "debug":
                other_devices.wait(device)
                if config.check_nan:
                    inspecting.find_nan(info, args, kwargs, out)
            return out
        before = len(stream.nodes)
        if before and before >= config.max_pending // 2 and rounds.comes_again(stream, info, args, kwargs):
            run.flush(stream, Reason("cut.full", f"{before} ops, before the one that it began with"))
            if config.measures and self.rounds.cut(info, before) and not self._begin_round(info, args):
                return native.run_through(stream, info, args, kwargs, "region.native")
            before = 0
        if self.rounds.aligns and not before and self.rounds.lets_pass(config.max_pending, info, args, kwargs):
            out = native.run_through(stream, info, args, kwargs, "region.new")
            self.rounds.has_passed(info, args, out)
            return out
        if not before:
            families.load()  # JAX and the rows, once: that is nothing that recording takes
        known, begun = MEMORY.size, ALLOWANCE.begin(stream.shadowed)
        out = record.record(stream, info, args, kwargs)
        is_new = MEMORY.size != known
        if ALLOWANCE.is_used_up(stream.shadowed, len(stream.nodes), begun, is_new) and limits(config):
            give_up(stream)
            return out
        pending = len(stream.nodes)
        if mode == "fused":
            if pending >= config.max_pending:
                run.flush(stream, Reason("cut.full", f"{pending} ops"))
            elif stream.strayed:
                record.end_strayed(stream, info)
        elif pending > before:
            inspecting.run_single(stream, info, args, kwargs, out)
        if seen_alone:  # its own context asks for more than torch alone; but nobody there sees that he reads a value
            materialize_all(Reason("cut.options"), only=stream)
        return out

    def _begin_round(self, info: OpInfo, args: Any) -> bool:
        """A round begins that nothing else tells from the one before. Whether it is to be recorded."""
        stream = self.stream
        if stream.policy.autotuner.is_sampling:
            run.wait()
        boundary(stream, (self.rounds.op, self.rounds.place), True)
        self._begin(info.op, args)
        stream.policy.count_round(self.rounds.ops)
        return not stream.policy.autotuner.native

    def _records_from_here(self, info: OpInfo, args: Any) -> bool:
        """Whether what runs natively is rounds, one is over, and what follows is to be recorded."""
        autotuner = self.policy.autotuner
        if not autotuner.countdown:
            return False
        autotuner.countdown -= 1
        if autotuner.countdown or not self._begin_round(info, args):
            return False
        if not self.rounds.begins(info):
            self.rounds.align()
            autotuner.restart()
        return True

    def _other(self, stream: Stream, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
        kind = info.kind
        if kind is Kind.RANDOM:
            name = RANDOM_UNLESS_ZERO.get(str(info.op))
            if name is not None:
                at = info.names.index(name)
                drawn = args[at] if at < len(args) else kwargs.get(name, 0)
                if not drawn:
                    return self._compute(stream, stream.config.mode, info, args, kwargs)
            return native.draw(stream, info, args, kwargs)
        if kind is Kind.PARTS:
            out = quiet.through(info.op, args, kwargs)
            native.expose_parts([args, kwargs, out])
            return out
        if kind is Kind.COMPOSITE:
            with self, profiled.shown():
                out = _tracked(info.op, info.op.decompose, args, kwargs)
            if out is not NotImplemented:
                return out
            return native.run_now(stream, info, args, kwargs, "its decomposition is not in Python's reach")
        if kind is Kind.METADATA:
            if "resize" in info.op._schema.name or info.op._schema.name == "aten::set_":
                with torch._C.DisableTorchFunction():  # `set_` comes here without asking a subclass's function first
                    return native.change_storage(stream, info, args, kwargs)
            return _tracked(info.op, lambda *a, **k: quiet.through(info.op, a, k), args, kwargs)
        LOG.count(f"sync {info.op}")
        place, waits = site.here(), native.is_away([args, kwargs])
        if not waits and not info.written:
            out = quiet.call(info.op, args, kwargs)
        else:
            if kind is Kind.CHECK:
                code = "sync.check"
            else:
                code = "sync.shape" if torch.Tag.dynamic_output_shape in info.op.tags else "sync.value"
            reason = Reason(code, str(info.op), site.describe(place))
            if info.op is torch.ops.aten._local_scalar_dense.default:
                out = native.read_number(info, args[0], reason)
            else:
                out = native.run_at_once(stream, info, args, kwargs, reason)
        if kind is not Kind.CHECK:  # in the middle of a function that hands out tensors: the program reads nothing
            looked_at(stream, place, waits)
        return out


def _with_tensors(func: Any, args: Any, kwargs: Any, error: BaseException) -> tuple[Any, Any] | None:
    """The arguments of a call that torch has refused for a number in the place of a tensor, with tensors there; None if
    it was refused for anything else. C++ that works with a number as a tensor gives modes the number, and most ops
    take none back."""
    if (
        not isinstance(error, RuntimeError)
        or "Expected a value of type 'Tensor'" not in str(error)
        or not isinstance(func, OpOverload)
    ):
        return None
    made = []

    def tensor(value: Any, parameter: torch.Argument) -> Any:
        if type(value) not in _DTYPES or not isinstance(parameter.type, torch.TensorType):
            return value
        made.append(torch.scalar_tensor(value, dtype=_DTYPES[type(value)]))
        return made[-1]

    named = {parameter.name: parameter for parameter in func._schema.arguments}
    with quiet.unobserved():
        given = (
            tuple(tensor(value, parameter) for value, parameter in zip(args, named.values(), strict=False)),
            {name: tensor(value, named[name]) for name, value in (kwargs or {}).items()},
        )
    return given if made else None  # else an op of the program's has said so itself


@functools.cache
def _comes_untracked(op: OpOverload) -> bool:
    """Whether a composite has no kernel of its own that knows which tensor is a view and counts writes."""
    return is_composite(op) and not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "ADInplaceOrView")


def _tracked(op: OpOverload, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Call `op` by `call`. In inference mode composites come here whole, past what tracks views and writes of ordinary
    tensors: it is to see the ops that they consist of, as it does in eager."""
    if not _inference_mode() or not _comes_untracked(op):
        return call(*args, **kwargs)
    with quiet.counting_writes():
        return call(*args, **kwargs)


def looked_at(stream: Stream, place: Any, waited: bool) -> None:
    """The program has read a value at `place`; `waited`: the value was not in native memory before."""
    stream.policy.pass_sync()
    # Where nothing is recorded or running, a number that was computed on the host ends a segment as well.
    boundary(stream, place, waited or not (stream.nodes or run.DEFERRED.launches))


def boundary(stream: Stream, place: Any, waited: bool, stepped: bool = False) -> None:
    """The program has read a value at `place`, or waited there: the way in which it goes on may be another one."""
    policy = stream.policy
    if stream.config.measures and not policy.autotuner.stepping:
        if policy.pass_boundary(place, waited, stepped, nothing_is_pending(), background.busy()):
            background.disturb(policy.backoff)
        if policy.owing is not None:
            choices.exchange(stream.config, policy.owing)


def _shapes(args: Any) -> Iterator[Sequence[int] | None]:
    """Of the tensors that an op takes, or makes: `zeros` is told the shape."""
    for a in args:
        if isinstance(a, torch.Tensor):
            shape = shape_of(a)
            yield shape if shape is None or all(type(n) is int for n in shape) else None  # of a symbolic one
        elif type(a) is list and a and all(type(n) is int and n >= 0 for n in a):
            yield tuple(a)


def stepped(door: FrontDoor) -> None:
    """An optimizer step of this thread has ended: a place where the front door may step aside, or come back."""
    stream, autotuner = door.stream, door.policy.autotuner
    autotuner.stepping = False
    if stream.config.measures and autotuner.unread and not door.bypassed:
        # Nothing was read since the last one, so this is where the time is taken.
        if autotuner.is_sampling:
            run.wait()
        boundary(stream, site.here(), True, stepped=True)
    turned(door, "step")


# In a native segment or backoff, while nothing is pending anywhere, ops of these kinds are torch's alone; by identity,
# because the hash of an overload is computed in Python.
_LEFT_ALONE = frozenset({Kind.VIEW, Kind.ALLOCATE, Kind.COMPUTE, Kind.RANDOM, Kind.CHECK})
_HARMLESS: set[int] = set()


_in_child = False


def _pass_on(stream: Stream, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Give an op to the modes under ours (a tracer, fake tensors, a counter): they see what they would in eager."""
    if not (_in_child or stream.config.mode == "off"):
        materialize_all(Reason("sync.island", f"{func} runs natively"), only=stream)
        why = f"{type(quiet.stack()[-1]).__name__} {OUTSIDE}"
        LOG.emit("island", op=str(func), reason=why, site=str(site.describe(site.here())))
    with profiled.shown():
        return func(*args, **kwargs)


def enter_child() -> None:
    """In a forked child: every op runs natively from here on."""
    global _in_child
    _in_child = True
    follower.close()
