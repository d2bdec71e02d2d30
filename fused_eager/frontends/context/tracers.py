"""Tracers: torch's own compilers, inside a context. No public function of theirs is replaced, as they know functions by
identity: what is met are private ones that those call, and methods."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.jit._trace

from ...executing.materialize import materialize_all
from ...log.reasons import Reason
from ...quiet import stack
from .readers import natively
from .threads import current_door

PACKAGES = ("fused_eager", "fused_eager.fusion_rules", "fused_eager.cache")
DYNAMO = "torch._dynamo"  # it takes a second to import, and most programs do without

# They, and what they compare their results with, run on finished tensors, natively: a trace that is made below a mode
# holds reads of its own constants.
TRACES: tuple[tuple[Any, str], ...] = (
    (torch.jit._trace, "_trace_impl"),
    (torch._C.ScriptModule, "_create_method_from_trace"),
    (torch._C.ScriptModule, "_create_method_from_trace_with_dict"),
)
# C++ reads the memory of parameters and constants, of which it is given no tensor but a module or a graph.
READERS: tuple[tuple[Any, str], ...] = (
    *((torch._C.ScriptModule, name) for name in ("save", "save_to_buffer", "__deepcopy__")),
    (torch._C.ScriptObject, "__deepcopy__"),
    *((torch._C.ScriptModule, name) for name in ("_save_for_mobile", "_save_to_buffer_for_mobile")),
    *((torch._C.ScriptFunction, name) for name in ("save", "save_to_buffer")),
    *((torch._C, name) for name in ("_save_jit_module", "_save_jit_module_to_bytes", "_pickle_save")),
    *((torch._C, name) for name in ("_save_mobile_module", "_save_mobile_module_to_bytes", "_save_parameters")),
    *((torch._C, name) for name in ("_freeze_module", "_jit_pass_optimize_frozen_graph")),
    (torch._C, "_jit_pass_optimize_for_inference"),
    *((torch._C.Graph, name) for name in ("str", "__repr__")),  # of constants, which are tensors
    *((kind, "__repr__") for kind in (torch._C.Node, torch._C.Value)),
)
# What scripted code is called by, and what in it reads tensors in the interpreter's C++ and calls no op to do it.
CALLS: tuple[Any, ...] = (torch._C.ScriptFunction, torch._C.ScriptMethod)
READS = ("prim::tolist", "prim::Print", "aten::str", "aten::format", "aten::percentFormat")


def rows() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """What is patched while a context is open: owner, name, and what makes the patch."""
    for owner, name in (*TRACES, *READERS):
        if hasattr(owner, name):  # not all of them are in each torch
            yield owner, name, torchscript_alone
    for owner in CALLS:
        yield owner, "__call__", in_its_words


def leave_us_out() -> None:
    """Have Dynamo, which has been imported, trace nothing of this library's but what is `have_traced`."""
    from torch._dynamo import trace_rules as rules

    # Once: each time makes torch's list of what is not traced, and the pattern made of it, longer.
    if not hasattr(rules, "_fused_eager_told"):
        for package in PACKAGES:
            rules.add(package)
        rules._fused_eager_told = True  # type: ignore[attr-defined]
        for function in _TRACED:
            _have_traced(function)
        for owner in list(_CALLED):
            _have_called(owner)


def rows_of_dynamo() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """The same for torch's compiler, once the program has imported it."""
    import torch._dynamo.eval_frame

    leave_us_out()
    yield torch._dynamo, "optimize", with_breaks
    if hasattr(torch._dynamo.eval_frame, "set_fullgraph_compiled_frame_count"):  # not in torch 2.11
        yield torch._dynamo.eval_frame, "set_fullgraph_compiled_frame_count", uncounted


_TRACED: list[Callable[..., Any]] = []


def have_traced(function: Callable[..., Any]) -> None:
    """Have Dynamo trace a function of ours as part of the program that calls it, though it leaves our packages out."""
    _TRACED.append(function)
    rules = sys.modules.get(f"{DYNAMO}.trace_rules")
    if rules is not None and hasattr(rules, "_fused_eager_told"):
        _have_traced(function)


_CALLED: weakref.WeakSet[Any] = weakref.WeakSet()


def have_called(owner: Any) -> None:
    """Have Dynamo put calls of `owner.as_node` into its graphs as they are, with the trees of tensors that they take
    and return; what is inside is traced by what takes the graph."""
    _CALLED.add(owner)
    rules = sys.modules.get(f"{DYNAMO}.trace_rules")
    if rules is not None and hasattr(rules, "_fused_eager_told"):
        _have_called(owner)


def _have_called(owner: Any) -> None:
    from torch._dynamo import nonstrict_trace

    owner.as_node = nonstrict_trace(owner.as_node)


def _have_traced(function: Callable[..., Any]) -> None:
    from torch._dynamo import trace_rules as rules
    from torch._dynamo.variables import UserFunctionVariable

    # By name, for the map of functions is made anew after each of Dynamo's resets; and in the one that is there.
    owner, _, name = function.__qualname__.rpartition(".")
    at = f"{owner}#{name}" if owner else name
    rules.manual_torch_name_rule_map[f"{function.__module__}.{at}"] = UserFunctionVariable
    rules.get_torch_obj_rule_map()[function] = UserFunctionVariable


def torchscript_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    """What finishes all values, and has TorchScript do its work without our mode."""

    def call(*args: Any, **kwargs: Any) -> Any:
        materialize_all(Reason("sync.memory", f"TorchScript: {original.__name__}"))
        return natively(original, *args, **kwargs)

    return call


_reads: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _has_reads(script: Any) -> bool:
    try:
        graph = script.inlined_graph
    except RuntimeError:  # a method of a class that is C++ has none
        return False
    return any(graph.findAllNodes(kind) for kind in READS)


def alone_if_it_reads(original: Callable[..., Any]) -> Callable[..., Any]:
    """What calls scripted code; below our mode, unless it has `READS`. Those may read what it has made on the way."""
    alone = torchscript_alone(original)

    @functools.wraps(original)
    def call(script: Any, /, *args: Any, **kwargs: Any) -> Any:
        reads = _reads.get(script)
        if reads is None:
            reads = _reads[script] = _has_reads(script)
        return (alone if reads else original)(script, *args, **kwargs)

    return call


# The interpreter quotes a C++ exception; of one of Python's, as what a mode raises, it knows the type alone.
_WORDLESS = "RuntimeError: \n"


def in_its_words(original: Callable[..., Any]) -> Callable[..., Any]:
    """What calls scripted code as `alone_if_it_reads` does; what an op raises in it has the words that eager gives."""
    inner = alone_if_it_reads(original)

    @functools.wraps(original)
    def call(script: Any, /, *args: Any, **kwargs: Any) -> Any:
        door = current_door()
        if door is None:
            return inner(script, *args, **kwargs)
        outer, door.raised = door.raised, []
        try:
            return inner(script, *args, **kwargs)
        except RuntimeError as error:
            if not door.raised or not str(error).endswith(_WORDLESS):
                raise
            raise _worded(error, door.raised[0]) from None
        finally:
            door.raised = outer

    return call


def _worded(error: RuntimeError, cause: BaseException) -> BaseException:
    """The interpreter's exception with the words of its cause. (No frame that it passes keeps it: that is a cycle.)"""
    if not isinstance(cause, Exception):  # Ctrl-C
        return cause
    kind = NotImplementedError if isinstance(cause, NotImplementedError) else RuntimeError
    said = kind(f"{str(error).removesuffix(_WORDLESS)}RuntimeError: {cause}\n")
    for note in getattr(cause, "__notes__", ()):
        said.add_note(note)
    return said.with_traceback(error.__traceback__)


def uncounted(original: Callable[[int], int]) -> Callable[[int], int]:
    """What says that frames are not counted while our mode is there. Dynamo compiles nothing below one: the function
    runs as written, which `fullgraph` would refuse."""

    def count(value: int) -> int:
        door = current_door()
        return 0 if value == 0 and door is not None and door in stack() else original(value)

    return count


def with_breaks(original: Callable[..., Any]) -> Callable[..., Any]:
    """What `torch.compile` calls, without `fullgraph` inside a context: below a mode there is nothing but breaks."""

    def optimize(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("nopython") and current_door() is not None:
            kwargs["nopython"] = False
        return original(*args, **kwargs)

    return optimize
