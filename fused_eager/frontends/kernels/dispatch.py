"""Dispatch: what a torch op whose lowering is a program does under each of torch's dispatch keys.

Beside the op that the user calls lie four overloads of it, all of the schema `programs.SCHEMA`: `call`, and, told
apart for reports, `forward`, `backward` and `tangent` for derivatives. Each takes any program, so derivatives of any
order and batched forms need no further ops.

| key | what happens |
|---|---|
| Autograd | `forward` is called and what the way back needs is saved; then `backward`, or `tangent`, is called |
| FuncTorchBatched, Batched | the batched program is called |
| CPU | the program is run by XLA, at once |
| PrivateUse1 | the device's fallback: the op is recorded, as every op on its tensors is |
| Meta, and fake tensors | the results' shapes and dtypes, from tracing |
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch.autograd_function import custom_function_call_vmap_helper
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._functorch.utils import enable_single_level_autograd_function
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from fused_eager.fusion_rules import programs

from ...quiet import as_kernel, functions_hidden, uncompiled
from . import derive, levels, native, shapes
from .recipes import make

Tensor = torch.Tensor
Numbers = Sequence[int | float]
OVERLOADS = ("call", "forward", "backward", "tangent")
_LIBRARIES: dict[str, torch.library.Library] = {}
# Below autograd there are tensors: no op is asked where to run (`take_none`), and three of the four cannot say.
_BELOW = torch._C._after_autograd_keyset - torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)


def library(namespace: str) -> torch.library.Library:
    """The library that ops of a namespace are defined in.

    It stays to the very end, as torch's own do: what takes a library back aborts the process where the op has several
    overloads and TorchScript has seen one.
    """
    found = _LIBRARIES.get(namespace)
    if found is None:
        found = _LIBRARIES[namespace] = torch.library.Library(namespace, "FRAGMENT")
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(found.m))
        for end, about in list(weakref.finalize._registry.items()):  # type: ignore[attr-defined]
            if about.weakref() is found:
                end.atexit = False
    return found


@functools.cache
def packet(name: str) -> dict[str, OpOverload]:
    """The four overloads of an op, by their names; they are defined the first time. `name` is like "mylib::rotary"."""
    namespace, _, base = name.partition("::")
    lib = library(namespace)
    for overload in OVERLOADS:
        programs.enter(f"{namespace}.{base}.{overload}")
        lib.define(f"{base}.{overload}{programs.SCHEMA}", tags=(torch.Tag.pt2_compliant_tag,))
    made = {o: getattr(getattr(getattr(torch.ops, namespace), base), o) for o in OVERLOADS}
    for overload, op in made.items():
        full = f"{base}.{overload}"
        lib.impl(full, unseen(_autograd, made, op), "Autograd", with_keyset=True)
        lib.impl(full, unseen(_batched, op), "FuncTorchBatched", with_keyset=True)
        lib.impl(full, unseen(_batched_by_autograd, op), "Batched")
        lib.impl(full, unseen(native.run, op), "CPU")
        lib.impl(full, unseen(_on_cuda, name), "CUDA")
        torch.library.register_fake(f"{namespace}::{full}", unseen(shapes.fake), lib=lib)
    return made


@functools.cache
def take_none(name: str) -> None:
    """Have an op take calls without a tensor, by which torch would know where to run it: on the CPU."""
    op = packet(name)["call"]
    cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def run(operands: Sequence[Tensor], numbers: Numbers, program: str) -> list[Tensor]:
        return op.redispatch(cpu, operands, numbers, program)

    # Not for all ops: torch asks it in each call.
    library(name.partition("::")[0]).impl(f"{name.partition('::')[2]}.call", unseen(run), "BackendSelect")


def unseen(kernel: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """`kernel` where neither Dynamo nor a mode of torch's functions looks."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return kernel(*first, *args, **kwargs)

    return uncompiled(as_kernel(run))


def _composed(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a composition of ops, which autocast sees as it sees torch's own."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with functions_hidden():
            return call(*args, **kwargs)

    return uncompiled(run)


def define(name: str, overload: str, schema: str, call: Callable[..., Any]) -> OpOverload:
    """An overload of an op, by the user's own schema, that is a composition of others: what `call` does.

    Raises:
        RuntimeError: torch does not take the schema.
    """
    namespace, _, base = name.partition("::")
    full = base if overload == "default" else f"{base}.{overload}"
    op = getattr(getattr(getattr(torch.ops, namespace), base, None), overload, None)
    if op is None:
        library(namespace).define(full + schema, tags=(torch.Tag.pt2_compliant_tag,))
        kernel = _composed(call)
        library(namespace).impl(full, kernel, "CompositeImplicitAutograd")
        for key in ("FuncTorchBatched", "Batched"):  # where torch would take a composition of the user's row by row
            library(namespace).impl(full, kernel, key)
        op = getattr(getattr(getattr(torch.ops, namespace), base), overload)
    return op


def _on_cuda(name: str, operands: Sequence[Tensor], numbers: Numbers, program: str) -> list[Tensor]:
    where = next((t.device for t in operands if t.device.type != "cpu"), None)
    raise NotImplementedError(f"{name} runs on tensors of the CPU, and one is on {where}: move it with .cpu()")


# ---- derivatives -------------------------------------------------------------------------------------------------


def _autograd(
    ops: dict[str, OpOverload], op: OpOverload, keyset: Any, operands: Sequence[Tensor], numbers: Numbers, program: str
) -> list[Tensor]:
    tracked = torch.is_grad_enabled() and any(t.requires_grad for t in operands)
    if tracked or levels.are_open():
        mask = tuple([t.requires_grad and _floats(t) for t in operands]) if tracked else ()
        about = _About(ops, op, keyset, list(numbers), program, mask)
        if tracked:
            about.way = shapes.way_back(operands, numbers, program, mask)
            needed = {i for kind, i in about.way.sources if kind == "operand"}
            others = [t for i, t in enumerate(operands) if i not in needed]
            if others:
                about.spare = _apply(_Spare, next(t for t in operands if t.requires_grad), *others)
                about.spare_node = about.spare.grad_fn
        made = _apply(_Differentiable, about, *operands)
        return list(made[: len(made) if mask == () else _results(operands, numbers, program)])
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & _BELOW, operands, numbers, program)


def _apply(function: Any, *args: Any) -> Any:
    if torch._C._are_functorch_transforms_active():  # outer ones; each sees the op by itself
        with enable_single_level_autograd_function():
            return function.apply(*args)
    return function.apply(*args)


@contextmanager
def _for_outer_levels() -> Iterator[None]:
    """Where functions are differentiated within others, the outer ones see what happens here, for which torch has
    switched both modes of differentiation off at this level."""
    if torch._C._are_functorch_transforms_active():
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            yield
    else:
        yield


def _results(operands: Sequence[Tensor], numbers: Numbers, program: str) -> int:
    return len(shapes.specs(operands, numbers, program))


def _floats(t: Tensor) -> bool:
    return t.dtype.is_floating_point or t.dtype.is_complex


@dataclass
class _About:
    """What an op that autograd sees is called with besides its operands, and how its gradients are computed."""

    ops: dict[str, OpOverload]
    op: OpOverload
    keyset: Any
    numbers: list[int | float]
    program: str
    mask: tuple[bool, ...]
    way: derive.Way | None = None
    spare_node: Any = None  # it saves operands which only gradients of gradients need
    spare: Any = None  # its result: in torch 2.11 what a node has saved is let go as the last result is


class _Spare(_SingleLevelFunction):
    """Operands that are saved, and looked at only where a gradient is to be differentiated: one that is overwritten
    meanwhile, as the op itself may do, is an error there alone. `tracked` is not saved: it makes the node, where none
    of the operands has a gradient."""

    @staticmethod
    def forward(ctx: Any, tracked: Tensor, *operands: Tensor) -> Tensor:
        ctx.save_for_backward(*operands)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        return (None,) * (1 + len(ctx.saved_tensors))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return torch.empty(0)


class _Differentiable(_SingleLevelFunction):
    """An op that autograd sees. Below it runs `forward`, which keeps what the way back needs, or the op itself."""

    @staticmethod
    def forward(ctx: Any, about: _About, *operands: Tensor) -> Any:
        ctx.about, way = about, about.way
        ctx.set_materialize_grads(False)
        ctx.save_for_forward(*operands)
        op, program = about.op, about.program
        if way is not None and way.forward is not None and way.kept:
            op, program = about.ops["forward"], way.forward.name
        with torch._C._AutoDispatchBelowAutograd(), _for_outer_levels():
            out = op.redispatch(about.keyset & _BELOW, list(operands), about.numbers, program)
        if way is None:
            ctx.mark_non_differentiable(*[t for t in out if not _floats(t)])
            return tuple(out)
        results, kept = out[: way.results], out[way.results :]
        saved = {"operand": operands, "result": results, "kept": kept}
        ctx.save_for_backward(*[saved[kind][i] for kind, i in way.sources])
        ctx.mark_non_differentiable(*[t for t in results if not _floats(t)], *kept)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        about: _About = ctx.about
        way, mask = about.way, about.mask
        assert way is not None
        given = given[: way.results]
        cotangents = [g for g in given if g is not None]
        if not cotangents:
            return (None,) * (1 + len(mask))
        wanted = tuple([g is not None for g in given])
        owner = make(about.program)
        needed = ctx.saved_tensors
        if torch.is_grad_enabled():
            # The gradients are to be differentiated: as functions of the operands, which autograd knows.
            program = derive.pullback(owner, mask, wanted)
            needed = _operands(way, len(mask), needed, about.spare_node)
        elif way.make is not None:
            program = way.backward(wanted)
        operands = [*needed, *cotangents]
        try:
            if way.refusal:
                raise RuntimeError(way.refusal)
            shapes.specs(operands, about.numbers, program.name)
        except Exception as error:
            raise RuntimeError(f"{owner.title} has no gradient: JAX says {error}") from error
        gradients = iter(about.ops["backward"](operands, about.numbers, program.name))
        return (None, *[next(gradients) if m else None for m in mask])

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        about: _About = ctx.about
        operands = ctx.saved_tensors
        mask = tuple([t is not None and _floats(x) for t, x in zip(tangents, operands, strict=True)])
        program = derive.tangent(make(about.program), mask)
        given = [t for m, t in zip(mask, tangents, strict=True) if m]
        with _for_outer_levels():
            # Without their tangents of this level, which are `given`: else it would be differentiated here once more.
            plain = [levels.primal_of(t) for t in operands]
            made = iter(about.ops["tangent"]([*plain, *given], about.numbers, program.name))
        specs = shapes.specs(operands, about.numbers, about.program)
        out = [next(made) if dtype.is_floating_point or dtype.is_complex else None for _, dtype in specs]
        return (*out, *[None] * (0 if about.way is None else len(about.way.kept)))


def _operands(way: derive.Way, count: int, needed: Sequence[Tensor], spare: Any) -> list[Tensor]:
    """The operands of an op, of which some are among what the way back needs, and the others spare."""
    found = {i: t for (kind, i), t in zip(way.sources, needed, strict=True) if kind == "operand"}
    others = iter(() if spare is None else spare.saved_tensors)
    return [found[i] if i in found else next(others) for i in range(count)]


# ---- vmap --------------------------------------------------------------------------------------------------------


def _batched(op: OpOverload, keyset: Any, operands: Sequence[Tensor], numbers: Numbers, program: str) -> Any:
    def rule(info: Any, dims: Any, operands: Sequence[Tensor], numbers: Numbers, program: str) -> Any:
        axes = tuple(dims[0])
        made = derive.batched(make(program), axes)
        out = op(list(operands), numbers, made.name)
        return out, [0] * len(out)

    interpreter: Any = retrieve_current_functorch_interpreter()
    return custom_function_call_vmap_helper(interpreter, rule, op, operands, numbers, program)


def _batched_by_autograd(op: OpOverload, operands: Sequence[Tensor], numbers: Numbers, program: str) -> list[Tensor]:
    """The same where autograd batches by itself (`torch.autograd.grad(is_grads_batched=True)`): by torch's first vmap,
    whose tensors do not say at which level they are batched. It is the innermost."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    is_batched = torch._C._functorch.is_legacy_batchedtensor
    opened = [torch._remove_batch_dim(t, level, 1, 0) if is_batched(t) else t for t in operands]
    sizes = [t.shape[0] for t, was in zip(opened, operands, strict=True) if is_batched(was)]
    size = max(sizes)
    axes: list[int | None] = []
    given = []
    for t, was in zip(opened, operands, strict=True):
        has = is_batched(was) and t.shape[0] == size
        axes.append(0 if has else None)
        given.append(t if has or not is_batched(was) else t[0])
    made = derive.batched(make(program), tuple(axes))
    return [torch._add_batch_dim(t, 0, level) for t in op(given, numbers, made.name)]
