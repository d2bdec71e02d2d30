"""Shape inference: what an op returns, without its values; once per distinct call, by torch itself.

FakeTensor knows all ops, and takes a millisecond for a call. Most of it goes into what only few calls need: for the
others FakeTensor, too, asks the kernels for tensors without memory (device `meta`), which answer in a tenth of the
time. So where they are all that it would ask they are asked first, and FakeTensor where they do not know.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._ops import OpOverload

from fused_eager.fusion_rules.lowering import leaves, map_leaves
from fused_eager.fusion_rules.spec import JAX_DTYPE, Spec

from ..devices.device import SEEN_AS
from ..devices.storage import storage_of
from ..policy.allowance import ALLOWANCE


@functools.cache
def _fake() -> Any:
    """Torch's FakeTensorMode. It imports torch's compiler, a second of it, and so does the first op that meta tensors
    are asked for, by torch's own references."""
    began = time.perf_counter()
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=False)
    mode.cache_enabled = False  # a key for each op inside costs as much as the op; what comes out is kept by `calls`
    ALLOWANCE.excuse(time.perf_counter() - began)
    return mode


def is_loaded() -> bool:
    """Whether what shape inference needs has been imported."""
    return _fake.cache_info().currsize > 0


def load() -> None:
    """Import what shape inference needs: where the program waits for the compiler anyway, or before other threads may
    need it, for modules that two threads import at a time may find each other half made. Programs that torch runs alone
    do without."""
    _fake()


@dataclass(frozen=True, slots=True)
class Fresh:
    """In a return template: the op's new output number `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class Same:
    """In a return template: the tensor argument number `index` itself."""

    index: int


@dataclass(frozen=True, slots=True)
class Inferred:
    """What a call returns: specs of new outputs, and `template`, the returned structure with `Fresh` and `Same`."""

    fresh: tuple[Spec, ...]
    template: Any
    alias: bool = False  # a new tensor over an argument's memory: run it as the view op that it is


@dataclass(frozen=True, slots=True)
class Unknown:
    """Why shapes cannot be known before the op has run: it then runs natively, with eager's own errors."""

    reason: str


LOCK = threading.Lock()  # FakeTensorMode keeps state of its own
_FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def silence() -> Iterator[None]:
    """FakeTensor logs and warns about calls that ATen will judge, and tell of, in its own words."""
    was = _FAKE_LOG.disabled
    _FAKE_LOG.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _FAKE_LOG.disabled = was


def unknowable(op: OpOverload, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Unknown | None:
    """Why a call has to be run to know what it returns; None if it need not be."""
    warns = _WARNS_IF.get(op._schema.name)
    if warns is not None and warns(args, kwargs, tensors):
        return Unknown("ATen warns of it, at its own line")
    if is_sized_by_values(op, args, kwargs, tensors):
        return Unknown("how much it returns depends on values")
    return None


def infer(op: OpOverload, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Inferred | Unknown:
    """Run `op` on tensors without memory that look like `tensors`, its tensor arguments in order."""
    unknown = unknowable(op, args, kwargs, tensors)
    if unknown is not None:
        return unknown
    # What comes out is looked at under the lock as well: a FakeTensor's device depends on what its mode is doing.
    with LOCK, silence():
        load()
        found = _on_meta(op, args, kwargs, tensors) if _meta_suffices(op, args, tensors) else None
        found = found or _run(op, args, kwargs, tensors, _fake())
    if isinstance(found, Inferred) and found.alias and _makes_its_results(op):
        return replace(found, alias=False)
    return found


@functools.cache
def _makes_its_results(op: OpOverload) -> bool:
    """Whether an op's own kernel returns new tensors where the composition that other devices have may return a view
    (`native_channel_shuffle` of one group). A view is declared by the schema, but for compositions."""
    declared = any(r.alias_info is not None for r in op._schema.returns)
    return not declared and torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CPU")


def _on_meta(
    op: OpOverload, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]
) -> Inferred | Unknown | None:
    device = SEEN_AS
    asked = kwargs.get("device")
    if asked is not None and torch.device(asked) != device:
        return None  # it makes a tensor elsewhere
    if asked is not None or not tensors:
        kwargs = {**kwargs, "device": "meta"}
    found = _run(op, args, kwargs, tensors, torch._C._DisableTorchDispatch(), "meta")
    if isinstance(found, Unknown) or any(s.device.type != "meta" for s in found.fresh):
        return None
    return replace(found, fresh=tuple([replace(s, device=device) for s in found.fresh]))


def _meta_suffices(op: OpOverload, args: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether FakeTensor would find nothing else than `op` on meta tensors.

    Some decompositions of torch's look at the device, but only for half types.
    """
    if not tensors:
        return _is_constructor(op)
    if any(t.device != tensors[0].device for t in tensors):
        return False
    suffices = _SUFFICES_IF.get(op._schema.name)
    if not (suffices(args, tensors) if suffices else _is_common(op)):
        return False
    return all(t.dtype in _PLAIN for t in tensors)


# What has other strides, or fewer outputs, on other devices than CPU. tests/tracing/test_infer.py goes through op_db.
_LOOKS_AT_DEVICE = ("_fft_", "linalg_", "batch_norm", "nonzero_static")
_PLAIN = {
    torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


def _are_plainly_contiguous(args: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether there is no doubt that a convolution's results are contiguous."""
    last = torch.channels_last
    images = [t for t in tensors if t.ndim == 4]
    return (
        len(images) >= 2
        and len({t.dtype for t in tensors}) == 1
        and all(t.is_contiguous() and not t.is_contiguous(memory_format=last) for t in images)
        and all(t.ndim in (1, 4) for t in tensors)
    )


def _always(args: Any, tensors: list[torch.Tensor]) -> bool:
    return True


def _index_dtypes(args: Any) -> set[torch.dtype]:
    """The dtypes by which a call of the `index` family indexes, whatever that of the tensor that it indexes is."""
    return {t.dtype for t in leaves([args[1]]) if isinstance(t, torch.Tensor)}


def _has_no_masks(args: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether what is indexed is indexed by integers, so that the shape does not depend on values."""
    return not _index_dtypes(args) & {torch.bool, torch.uint8}


def is_sized_by_values(op: OpOverload, args: Any, kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the shape of what a call returns depends on the values of its tensor arguments."""
    if torch.Tag.dynamic_output_shape not in op.tags or kwargs.get("output_size") is not None:
        return False
    return op._schema.name != "aten::index" or not _has_no_masks(args, tensors)


def _has_byte_masks(args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> bool:
    return torch.uint8 in _index_dtypes(args)


def _divides_by_no_degrees(args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> bool:
    """Whether a variance is one of no more numbers than its correction."""
    shape = tensors[0].shape
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    correction = kwargs.get("correction")
    try:
        numbers = math.prod([shape[d] for d in dims] if dims else shape)
    except IndexError:
        return False  # ATen refuses it
    return numbers <= (1 if correction is None else correction)


# Calls that ATen warns of each time, by what is known of them without values. They run at their own line: one that is
# run later, or in a region, would warn at another line, or not at all.
_WARNS_IF: dict[str, Callable[[Any, dict[str, Any], list[torch.Tensor]], bool]] = {
    **dict.fromkeys(["aten::index_put", "aten::index_put_", "aten::_index_put_impl_"], _has_byte_masks),
    **dict.fromkeys([f"aten::{name}" for name in ("var", "std", "var_mean", "std_mean")], _divides_by_no_degrees),
}


# Those that FakeTensor, or a device, treats in a way of its own, and the calls for which that comes to the same.
_SUFFICES_IF: dict[str, Callable[[Any, list[torch.Tensor]], bool]] = {
    "aten::convolution": _are_plainly_contiguous,
    "aten::convolution_backward": _are_plainly_contiguous,
    "aten::native_batch_norm": lambda args, tensors: len(args) > 5 and args[5] is True,  # in training
    "aten::native_batch_norm_backward": _always,
    # FakeTensor looks for the device that they name, and there is one.
    **dict.fromkeys([f"aten::{name}_like" for name in ("empty", "zeros", "ones", "full")], _always),
    **dict.fromkeys([f"aten::new_{name}" for name in ("empty", "zeros", "ones", "full")], _always),
    "aten::copy_": _always,
    "aten::embedding": _always,
    **dict.fromkeys(["aten::index", "aten::index_put", "aten::index_put_"], _has_no_masks),
    "aten::linalg_vector_norm": _always,
    "aten::native_layer_norm": _always,
}


@functools.cache
def _is_constructor(op: OpOverload) -> bool:
    """Whether an op makes a tensor of numbers alone, where it is told to; FakeTensor tells it `meta`."""
    arguments = {a.name for a in op._schema.arguments}
    return op.namespace == "aten" and "device" in arguments and "names" not in arguments


@functools.cache
def _is_common(op: OpOverload) -> bool:
    """Whether FakeTensor has no treatment of its own for an op."""
    from torch._subclasses import fake_impls

    special, checks = (getattr(fake_impls, f"op_implementations_{n}", None) for n in ("dict", "checks"))
    if special is None or checks is None or op in special or op.namespace != "aten":
        return False
    if any(part in op._schema.name for part in _LOOKS_AT_DEVICE):
        return False
    # Lists are treated one by one because of their devices, which are known to be one.
    return op._schema.name.startswith("aten::_foreach_") or not any(applies(op) for applies, _ in checks)


def _run(
    op: OpOverload,
    args: Any,
    kwargs: dict[str, Any],
    tensors: list[torch.Tensor],
    mode: AbstractContextManager[Any],
    device: str | None = None,
) -> Inferred | Unknown:
    actors: list[torch.Tensor] = []
    with mode, torch._C._DisableFuncTorch():
        for t in tensors:
            # A written tensor keeps its identity, so that what the op returns can be told from a new one.
            actors.append(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device or SEEN_AS))
        shapes = [tuple(a.shape) for a in actors]
        try:
            out = call(_mended(op), args, kwargs, actors)
        except Exception as error:
            # Whatever is refused, ATen decides: it raises eager's error, or it knows better.
            return Unknown(first_line(error))
    if any(tuple(a.shape) != s for a, s in zip(actors, shapes, strict=True)):
        return Unknown("an out= argument is resized")
    return described(out, actors)


@functools.cache
def _mended(op: OpOverload) -> Callable[..., Any]:
    """What says what `op` returns: the op, or a function in its place where this torch is mistaken.

    Of a sum with a product whose dtype is given, torch has a decomposition that takes this dtype for the factor `beta`:
    of `addmm` in 2.11, of `baddbmm` in 2.13.
    """
    plain = _SUMS_OF_DTYPE.get(op)
    if plain is None:
        return op
    from torch._decomp import decomposition_table as table

    return functools.partial(_sum_of_dtype, *plain) if table.get(op) is table.get(plain[0]) else op


_aten = torch.ops.aten
_SUMS_OF_DTYPE = {
    _aten.addmm.dtype: (_aten.addmm.default, _aten.mm.dtype),
    _aten.baddbmm.dtype: (_aten.baddbmm.default, _aten.bmm.dtype),
}


def _sum_of_dtype(
    plain: OpOverload, product: OpOverload, self: Any, a: Any, b: Any, out_dtype: torch.dtype, **factors: Any
) -> Any:
    plain(torch.empty_like(self, dtype=a.dtype), a, b)  # refuses the shapes that it does
    return product(a, b, out_dtype)


def call(op: Callable[..., Any], args: Any, kwargs: dict[str, Any], actors: list[torch.Tensor]) -> Any:
    """Call `op` with `actors` in place of its tensor arguments, in order."""
    position = iter(actors)

    def enter(leaf: Any) -> Any:
        return next(position) if isinstance(leaf, torch.Tensor) else leaf

    return op(*[map_leaves(enter, a) for a in args], **{k: map_leaves(enter, v) for k, v in kwargs.items()})


def described(out: Any, actors: list[torch.Tensor]) -> Inferred | Unknown:
    """What a call has returned that was made with the tensors `actors`."""
    unfit = why_unfit([leaf for leaf in leaves([out]) if isinstance(leaf, torch.Tensor)])
    if unfit:
        return Unknown(unfit)
    for leaf in leaves([out]):
        if isinstance(leaf, (torch.SymInt, torch.SymBool, torch.SymFloat)):
            return Unknown("it returns a number that depends on values")
    fresh: list[Spec] = []
    storages = {storage_of(a)._cdata for a in actors}
    positions = {id(a): i for i, a in reversed(list(enumerate(actors)))}  # the first, where one is there twice
    alias = False

    def leave(leaf: Any) -> Any:
        nonlocal alias
        if not isinstance(leaf, torch.Tensor):
            return leaf
        position = positions.get(id(leaf))
        if position is not None:
            return Same(position)
        alias = alias or storage_of(leaf)._cdata in storages
        fresh.append(Spec(tuple(leaf.shape), leaf.dtype, tuple(leaf.stride()), leaf.device))
        return Fresh(len(fresh) - 1)

    template = map_leaves(leave, out)
    if fresh and len({s.device.type for s in fresh} | {a.device.type for a in actors}) > 1:
        return Unknown("it moves between devices")
    return Inferred(tuple(fresh), template, alias)


def why_unfit(tensors: list[torch.Tensor]) -> str:
    """Why XLA has no such tensors; "" if it has."""
    for t in tensors:
        if t.layout != torch.strided or t.dtype not in JAX_DTYPE:
            return f"XLA has no {t.dtype} in layout {t.layout}"
    return ""


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
