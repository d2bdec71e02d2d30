"""Kernels: what torch calls for each op on a device's tensors.

Each op has a kernel of its own and not the one fallback: where there is none, torch takes what is made of other ops
(`_foreach_add`, `_to_copy`) apart before it asks. What it does with the views, and with ops that have no lowering but a
form in other ops, is right as it is.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from fused_eager.fusion_rules.lowering import leaves, map_leaves

from ... import follower
from ...devices.device import SEEN_AS
from ...log.reasons import Reason
from ...quiet import as_kernel, uncompiled
from ...tracing.opinfo import RANDOM_UNLESS_ZERO, Kind, OpInfo, info_of
from ..context.composites import READING_COMPOSITES
from . import attention, cells, composed, norms, queues, random, recurrent, storages, transfers
from .doors import Door, door_of, named_door, unseen
from .transfers import island

Tensor = torch.Tensor
aten = torch.ops.aten
META, CPU = DispatchKeySet(DispatchKey.Meta), DispatchKeySet(DispatchKey.CPU)
KEY = "PrivateUse1"


def _has(op: OpOverload, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def _is_torchs(op: OpOverload, info: OpInfo) -> bool:
    """Whether torch itself knows what to do with an op on tensors of any device."""
    if _has(op, "CompositeImplicitAutograd"):
        return True
    if not _has(op, "CompositeExplicitAutograd"):
        return False
    if info.kind in (Kind.VIEW, Kind.METADATA, Kind.ALLOCATE, Kind.COMPOSITE, Kind.RANDOM) or str(op) in _VIEWS:
        return True
    return info.kind is Kind.COMPUTE and bool(info.island)


# They return views, and their schemas say otherwise.
_VIEWS = frozenset({"aten.unsafe_chunk.default", "aten.unsafe_split.Tensor", "aten.unsafe_split_with_sizes.default"})


def _on(key: DispatchKeySet, op: OpOverload) -> Callable[..., Any]:
    """The kernel that another kind of tensors has: of an op that looks at nothing but sizes and strides."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return op.redispatch(key, *args, **kwargs)

    if key is META:
        VIEWS.append(op.name())
    return kernel


# What is made here with nothing before or behind it, and so may be made in C++ (`following`).
RECORDED: list[str] = []
VIEWS: list[str] = []


def _brought(door: Door, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of an op as it is recorded: a number that the host has as a tensor, indices, and the numbers of a
    list op are brought to the device; a device that is named is the one whose ops are recorded.

    Raises:
        RuntimeError: a tensor is elsewhere, or a number that the host has is to be written: what is written would be a
            copy of it.
    """
    kept = set(map(id, _written(info, args, kwargs)))

    def enter(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or door.device.holds(leaf):
            return leaf
        is_index = info.op._schema.name in _INDEXED and _is_index(leaf)
        if leaf.is_cpu and id(leaf) not in kept and (leaf.ndim == 0 or is_index or info.op in _NUMBERED):
            return transfers.to_device(door, leaf)
        raise RuntimeError(transfers.DIFFER.format(f"{door.device.name} and {leaf.device}", info.op))

    kwargs = {k: SEEN_AS if k == "device" and v is not None else map_leaves(enter, v) for k, v in kwargs.items()}
    return [map_leaves(enter, a) for a in args], kwargs


def _written(info: OpInfo, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an op writes."""
    found = [args[at] if at < len(args) else kwargs.get(info.names[at]) for at in info.written]
    return [t for t in leaves(found) if isinstance(t, Tensor)]


def _writes_numbers_of_the_host(info: OpInfo, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an op writes tensors of the host's, each one number, and all others are numbers too: so does a compiled
    optimizer with its counters, if the learning rate is on the device."""
    written = _written(info, args, kwargs)
    if not written or not all(t.is_cpu for t in written):
        return False
    return all(t.ndim == 0 for t in leaves([args, kwargs]) if isinstance(t, Tensor))


def _on_the_host(info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """An op on the host, with the values that the device has of its arguments."""

    def fetch(leaf: Any) -> Any:
        there = isinstance(leaf, Tensor) and not leaf.is_cpu
        return transfers.to_host(leaf, Reason("sync.value", str(info.op))) if there else leaf

    out = info.op(*[map_leaves(fetch, a) for a in args], **{k: map_leaves(fetch, v) for k, v in kwargs.items()})
    if info.writes_list:
        torch.autograd.graph.increment_version(args[info.written[0]])
    return out


def _names_another(door: Door, named: torch.device, args: Any) -> bool:
    """Whether an op names another device than that of its tensors: `torch.zeros_like(x, device="cpu")`. A fake tensor
    says that it is on the device, and has no values there: with no kernel to ask for a shape, torch makes a real one
    like it and calls the op."""
    if any(isinstance(a, FakeTensor) for a in args):
        return True
    if not any(isinstance(a, Tensor) and transfers.is_ours(a) for a in args):
        return False
    return named.type != door.device.type or named_door(named) is not door


def _made_where_named(op: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an op makes on the device that it names: of a tensor like another, by a tensor without values that is laid
    out as that one; a number that it takes as a tensor is read."""

    def enter(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.ndim == 0 and "_like" not in op.name() and "new_" not in op.name():
            return leaf.cpu()
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")

    return op(*(map_leaves(enter, a) for a in args), **kwargs)


_INDEXED = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})

# Their last argument has a number for each tensor of the lists, and is on the CPU for any device.
_NUMBERED = frozenset(
    getattr(torch.ops.aten, f"_foreach_{name}").Tensor for name in ("addcmul", "addcmul_", "addcdiv", "addcdiv_")
)


def _is_index(t: Tensor) -> bool:
    return t.dtype in (torch.int64, torch.int32, torch.bool, torch.uint8)


def _needs_bringing(args: Any, kwargs: dict[str, Any]) -> bool:
    for a in args:
        if isinstance(a, Tensor):
            if a.is_cpu:
                return True
        elif type(a) is list or type(a) is tuple:
            for x in a:
                if isinstance(x, Tensor) and x.is_cpu:
                    return True
    return bool(kwargs)


def _recorded(info: OpInfo) -> Callable[..., Any]:
    """An op that computes."""

    def compute(args: Any, kwargs: dict[str, Any]) -> Any:
        door = door_of(args, kwargs)
        if door is None:
            raise RuntimeError(f"{info.op} was called for a device, and none of its arguments is on one")
        if kwargs.get("device") is not None and _names_another(door, kwargs["device"], args):
            return _made_where_named(info.op, args, kwargs)
        if _needs_bringing(args, kwargs):
            if _writes_numbers_of_the_host(info, args, kwargs):
                return _on_the_host(info, args, kwargs)
            args, kwargs = _brought(door, info, args, kwargs)
        out = transfers.recorded(door, info, args, kwargs)
        if info.writes_list:
            # The elements of a list get no version bump above us; in eager ATen's kernel makes it, one by one.
            torch.autograd.graph.increment_version(args[info.written[0]])
        return out

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return unseen(compute, args, kwargs)

    return kernel


def _fetched(info: OpInfo) -> Callable[..., Any]:
    """An op whose result depends on values, or that is somebody's own."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        door = door_of(args, kwargs)
        assert door is not None
        why = "a custom op may do more than compute" if info.kind is Kind.CUSTOM else ""
        return unseen(island, door, info, args, kwargs, why)

    return kernel


def _to_copy(
    self: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """`to`: on the same device it is an op like others, to another one a transfer."""
    ours = transfers.is_ours(self)
    if ours and (device is None or device == self.device or (device.type == self.device.type and device.index is None)):
        named = {"dtype": dtype, "memory_format": memory_format}
        return _RECORDED_COPY(self, **{k: v for k, v in named.items() if v is not None})  # type: ignore[no-any-return]
    as_it_is = dtype in (None, self.dtype) and memory_format in (None, torch.contiguous_format, torch.preserve_format)
    to_another = ours and device is not None and device.type == self.device.type
    if to_another and as_it_is and self.is_contiguous() and transfers.goes_between(self):
        door = named_door(device)
        queues.begin_before_a_copy(door)
        return transfers.brought(door, self)
    value = transfers.to_host(self, Reason("sync.value", "aten._to_copy.default")) if ours else self
    out = aten._to_copy.default(value, dtype=dtype, layout=layout, memory_format=memory_format)
    if device is not None and device.type == torch._C._get_privateuse1_backend_name():
        door = named_door(device)
        queues.begin_before_a_copy(door)
        return transfers.to_device(door, out)
    return out if device in (None, SEEN_AS) else out.to(device)  # type: ignore[no-any-return]


_RECORDED_HISTC = _recorded(info_of(aten.histc.default))
_RECORDED_COPY = _recorded(info_of(aten._to_copy.default))


def _resize(self: Tensor, size: Any, *, memory_format: torch.memory_format | None = None) -> Tensor:
    return storages.resize(self, tuple(size), memory_format)


_SOURCES = ("source_Storage", "source_Storage_storage_offset", "source_Tensor")


def _laid_over(set_: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        t = set_(*args, **kwargs)
        unseen(storages.seen_as, t)
        return t

    return kernel


def _set_to_nothing(self: Tensor) -> Tensor:
    return self.set_(storages.untyped(0, self.get_device()), 0, (0,), (1,))  # type: ignore[call-overload,no-any-return]


def _record_stream(self: Tensor, stream: Any) -> None:
    """Nothing: a device's memory is not given back before whatever was asked of it has run."""


def _histc(self: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """`histc`: of whole numbers too, as an accelerator has it and ATen on the CPU has not."""
    if self.dtype.is_floating_point:
        return _RECORDED_HISTC(self, bins, min, max)  # type: ignore[no-any-return]
    return _RECORDED_HISTC(self.to(torch.float64), bins, min, max).to(self.dtype)  # type: ignore[no-any-return]


def _pin_memory(self: Tensor, device: Any = None) -> Tensor:
    """A copy that is not pinned: torch would ask the device's own allocator for such memory, which is C++."""
    return self.clone()


def _scaled_grouped_mm(
    a: Tensor, b: Tensor, scale_a: list[Tensor], recipe_a: list[int], swizzle_a: list[int], scale_b: list[Tensor],
    recipe_b: list[int], swizzle_b: list[int], offs: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None, contraction_dim: Any = (), use_fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    """`F.scaled_grouped_mm`, whose shapes torch infers in its older form alone."""
    by_row = [torch.nn.functional.ScalingType.RowWise.value]
    if not (recipe_a == recipe_b == by_row) or any((*swizzle_a, *swizzle_b)) or contraction_dim:
        raise NotImplementedError(
            "scaled_grouped_mm on this device takes one scale for each row and column (ScalingType.RowWise, no "
            f"swizzle, no contraction_dim), and not the recipes {recipe_a} and {recipe_b}"
        )
    return aten._scaled_grouped_mm(  # type: ignore[no-any-return]
        a, b, *scale_a, *scale_b, offs, bias, None, out_dtype, use_fast_accum
    )


# What is neither recorded nor fetched.
OWN: dict[str, Callable[..., Any]] = {
    "aten.empty.memory_format": storages.empty,
    "aten.empty_strided.default": storages.empty_strided,
    "aten._to_copy.default": _to_copy,
    "aten.copy_.default": transfers.copy_,
    "aten._local_scalar_dense.default": transfers.read_number,
    "aten.histc.default": _histc,
    "aten.resize_.default": _resize,
    "aten.set_.default": _set_to_nothing,
    "aten.as_strided.default": _on(CPU, aten.as_strided.default),  # that of `meta` looks at no bounds
    **{f"aten.set_.{name}": _laid_over(_on(CPU, getattr(aten.set_, name))) for name in _SOURCES},
    "aten.record_stream.default": _record_stream,
    "aten._scaled_grouped_mm_v2.default": _scaled_grouped_mm,
    "aten._flash_attention_forward_no_dropout_inplace.default": attention.ragged_attention_into,
    "aten._scaled_dot_product_flash_attention.default": attention.flash_attention,
    "aten._scaled_dot_product_flash_attention_backward.default": attention.flash_attention_backward,
}


def kernel_for(op: OpOverload) -> Callable[..., Any] | None:
    """What a device does with an op; None where torch itself knows."""
    called = str(op)
    tables: Any = (OWN, random.KERNELS, cells.KERNELS, norms.KERNELS, composed.KERNELS)
    own = next((of[called] for of in tables if called in of), None)
    if own is not None:
        if op in _COPIES:
            RECORDED.append(op.name())
        return as_kernel(own)  # type: ignore[no-any-return]
    info = info_of(op)
    if op in _reading_composites():
        return _fetched(info)
    if _is_torchs(op, info):
        return None
    kind = info.kind
    if kind is Kind.VIEW or kind is Kind.METADATA:
        return _on(META, op) if _has(op, "Meta") else None
    if kind is Kind.RANDOM:
        name = RANDOM_UNLESS_ZERO.get(called)
        return random.by_aten(info) if name is None else _unless_zero(info, name)
    if kind is Kind.COMPUTE:
        RECORDED.append(op.name())
        return _recorded(info)
    if kind in (Kind.VALUES, Kind.CHECK, Kind.CUSTOM):
        return _fetched(info)
    return None


# They record, within one device.
_COPIES = (aten._to_copy.default, aten.copy_.default)


@functools.cache
def _reading_composites() -> frozenset[OpOverload]:
    """Composites whose C++ looks at memory, which is not there. (What some others look at comes to the host by ops.)"""
    return frozenset(row.op for row in READING_COMPOSITES if row.op is not None and not row.name.startswith(_BY_OPS))


_BY_OPS = (
    *("tensor_split", "quantile", "nanquantile", "meshgrid", "_reshape_from_tensor"),
    *("sparse_coo_tensor", "_validate_sparse_coo_tensor_args"),
)


def _unless_zero(info: OpInfo, name: str) -> Callable[..., Any]:
    """An op that draws random numbers if the argument `name` is not 0."""
    at, recorded, drawn = info.names.index(name), _recorded(info), random.by_aten(info)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = args[at] if at < len(args) else kwargs.get(name, 0)
        return (drawn if given else recorded)(*args, **kwargs)

    return kernel


def overloads() -> Iterator[OpOverload]:
    """All overloads of ATen's ops."""
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            packet = getattr(aten, name.removeprefix("aten::").partition(".")[0], None)
            op = getattr(packet, name.partition(".")[2] or "default", None)
            if isinstance(op, OpOverload):
                yield op


_libraries: list[torch.library.Library] = []  # what is registered lasts as long as these


def register() -> None:
    """Register a kernel for each op, and one for ops of other namespaces. Once for each process."""
    lib, rest, ours = (torch.library.Library(of, "IMPL") for of in ("aten", "_", "fused_eager"))
    _libraries.extend((lib, rest, ours))
    for op in overloads():
        kernel = kernel_for(op)
        if kernel is not None:
            lib.impl(op.name().removeprefix("aten::"), uncompiled(kernel), KEY)
    for name, whole in {**recurrent.KERNELS, **attention.KERNELS}.items():
        lib.impl(name, uncompiled(as_kernel(whole)), KEY)
        lib.impl(name, as_kernel(whole), f"Autograd{KEY}")
    for kind in ("NestedTensor", "Sparse", "SparseCsr"):
        for called, kernel in composed.kernels(kind, overloads()):
            lib.impl(called, uncompiled(as_kernel(kernel)), f"{kind}{KEY}")
    for op in (*recurrent.OPS, *random.draws(), torch.ops.fused_eager.collective.default):
        RECORDED.append(op.name())
        ours.impl(op.name().removeprefix("fused_eager::"), uncompiled(_recorded(info_of(op))), KEY)
    rest.fallback(uncompiled(_fallback), KEY)
    for key, kind in _KINDS.items():
        rest.fallback(functools.partial(_refuse, kind), f"{key}{KEY}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it stands in the place of another, as it is meant to
        if not follower.has_hooks():
            lib.impl("_pin_memory", _pin_memory, "CPU")
        lib.impl("_has_compatible_shallow_copy_type", _may_take_the_others_data, KEY)


def _may_take_the_others_data(tensor: Tensor, other: Tensor) -> bool:
    """Whether `tensor.data = other` may be. As for CUDA: on the device and on the CPU, dense ones are of one kind in
    C++. So `module.to(device)` keeps its parameters, with their ties and hooks, and FSDP moves those it is given."""
    return all(t.is_cpu or t.device.type == torch._C._get_privateuse1_backend_name() for t in (tensor, other))


_KINDS = {"Quantized": "quantized"}  # tensors that the device has not, by the dispatch key of their ops


def _refuse(kind: str, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """An op that would make or take a kind of tensor that the device has not.

    Raises:
        NotImplementedError: it does.
    """
    name = torch._C._get_privateuse1_backend_name()
    raise NotImplementedError(f"{op}: {name} has no {kind} tensors, call it on the CPU")


def _fallback(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """An op of another namespace, or one that torch has got since."""
    return _kernel_of(op)(*args, **kwargs)


@functools.cache
def _kernel_of(op: OpOverload) -> Callable[..., Any]:
    info = info_of(op)
    if info.kind is Kind.COMPUTE:
        return _recorded(info)
    if info.kind is Kind.VIEW and _has(op, "Meta"):
        return _on(META, op)
    return _fetched(info)
