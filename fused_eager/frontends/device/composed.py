"""Sparse and nested tensors: torch's own kernels, on the plain tensors that they are made of.

What torch has for them takes them apart, whatever their device is: into indices and values, or into a buffer and sizes
that lie on the host. For those parts it calls ops again, and these are recorded as the ops of any tensor are. So the
kernels that the CPU and CUDA have in common serve the device too. Where each has one of its own, the CPU's looks at
memory: such an op runs on the host, on copies. (Nested tensors with the layout `torch.jagged` are Python of torch's,
and need none of this.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload

from fused_eager.fusion_rules.lowering import leaves, map_leaves

from ...executing.island import tell
from ...log import site
from .doors import door_of, is_on_device, meaning
from .transfers import numbers_as_tensors

Tensor = torch.Tensor
Kernel = Callable[..., Any]
aten = torch.ops.aten
_CPU, _NESTED = DispatchKeySet(DispatchKey.CPU), DispatchKeySet(DispatchKey.NestedTensorCPU)

# They make such tensors of plain ones, in ways that the CPU and CUDA have in common.
_MAKING = (
    aten._nested_view_from_buffer.default,
    aten._nested_from_padded.default,
    aten._nested_tensor_from_mask.default,
    aten._nested_tensor_from_mask_left_aligned.default,
    aten._to_sparse.default,
    aten._to_sparse.sparse_dim,
    aten._to_sparse_csr.default,
    aten._to_sparse_csc.default,
    aten._to_sparse_bsr.default,
    aten._to_sparse_bsc.default,
    aten.sparse_mask.default,
)
# The kernels of the CPU that CUDA does not share.
_ON_HOST = {
    "NestedTensor": (
        *(aten.sum.dim_IntList, aten._nested_sum_backward.default, aten._transform_bias_rescale_qkv.default),
        *(aten._native_multi_head_attention.default, aten.native_layer_norm_backward.default),
    ),
    "Sparse": (
        *(aten.mul.out, aten.bmm.default, aten.bmm.out, aten.sspaddmm.out, aten._coalesce.default),
        *(aten.addmm.default, aten.addmm.out, aten.addmm_.default, aten.hspmm.default, aten.hspmm.out),
        *(aten._sparse_sparse_matmul.default, aten._sparse_sum_backward.default, aten.index_select.default),
        *(aten._sparse_softmax.default, aten._sparse_softmax_backward_data.default),
        *(aten._sparse_log_softmax.default, aten._sparse_log_softmax_backward_data.default),
    ),
    "SparseCsr": (
        *(aten.add.Tensor, aten.add.out, aten.addmv.out, aten.addmm.out, aten.triangular_solve.X),
        *(aten._sparse_csr_sum.dim_dtype, aten._sparse_csr_prod.dim_dtype, aten.sparse_sampled_addmm.default),
        *(aten.sparse_sampled_addmm.out, aten._sparse_mm_reduce_impl.default),
        aten._sparse_mm_reduce_impl_backward.default,
    ),
}


def _like(op: OpOverload, key: DispatchKeySet) -> Kernel:
    """The kernel that an op has under another key."""
    writes = any(a.is_write for a in op._schema.arguments)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        door = door_of(args, kwargs)
        try:
            # Such kernels make empty tensors on a device without a number, for their guard in C++ has chosen it.
            with meaning(None if door is None else door.device.index):
                return op.redispatch(key, *numbers_as_tensors(op, args), **kwargs)
        except RuntimeError as error:
            # One for each device after all, further down: it was looked for before anything was computed.
            if writes or _NO_KERNEL not in str(error):
                raise
        return _on_host(op)(*args, **kwargs)

    return kernel


_NO_KERNEL = "DispatchStub: missing kernel"


def _on_host(op: OpOverload) -> Kernel:
    """The kernel of an op that the host runs on copies of its tensors."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        door = door_of(args, kwargs)
        assert door is not None
        tell(door.stream.config, op, site.here(), "nested or sparse, and ATen computes it in memory")
        given = [t for t in leaves([args, kwargs]) if isinstance(t, Tensor) and is_on_device(t)]
        copies = {id(t): t.cpu() for t in given}
        enter = lambda leaf: copies.get(id(leaf), leaf)  # noqa: E731
        out = op(*map_leaves(enter, args), **{k: map_leaves(enter, v) for k, v in kwargs.items()})
        named = dict(zip([a.name for a in op._schema.arguments], args, strict=False)) | kwargs
        written = [named[a.name] for a in op._schema.arguments if a.is_write]
        for t in written:
            value = copies[id(t)]
            if t.layout not in (torch.strided, torch.sparse_coo):
                t.resize_as_sparse_(value.to(t.device))
            elif t.layout is torch.strided and t.shape != value.shape:
                t.resize_(value.shape)
            t.copy_(value)
        back = {id(copies[id(t)]): t for t in written}
        device = given[0].device
        return map_leaves(lambda x: back.get(id(x), x.to(device) if isinstance(x, Tensor) else x), out)

    return kernel


def _layer_norm(x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    """`native_layer_norm` of a nested tensor, which the CPU and CUDA compute in memory: of the rows of its buffer."""
    sizes, op = x._nested_tensor_size(), aten.native_layer_norm.default
    fits = sizes.shape[0] and sizes.shape[1] > len(shape) and (sizes[:, -len(shape) :] == torch.tensor(shape)).all()
    if not fits or weight is None or bias is None:
        return op.redispatch(_NESTED, x, shape, weight, bias, eps)  # which says what is wrong
    x = x.contiguous()
    out, mean, scale = op(x.values().view(-1, *shape), shape, weight, bias, eps)
    laid = x._nested_tensor_size(), x._nested_tensor_strides(), x._nested_tensor_storage_offsets()
    return aten._nested_view_from_buffer(out.view(-1), *laid), mean.view(-1), scale.view(-1)


def _add_out(self: Tensor, other: Tensor, *, alpha: Any = 1, out: Tensor) -> Tensor:
    """`add` with a sparse tensor, as CUDA has it and not the CPU: nothing is fetched, as it comes in every step."""
    dtype = torch.result_type(self, other)
    alike = self.shape == other.shape and other.layout is torch.sparse_coo and other.sparse_dim() > 0
    if not alike or not torch.can_cast(dtype, out.dtype) or isinstance(alpha, complex):
        return _ADD_ON_HOST(self, other, alpha=alpha, out=out)  # type: ignore[no-any-return]
    values = other._values().to(dtype) * alpha
    if self.layout is torch.strided and out.layout is torch.strided:
        if out is not self:
            out.resize_(self.shape).copy_(self)
        return out.index_put_(tuple(other._indices()), values.to(out.dtype), accumulate=True)
    if self.layout is not torch.sparse_coo or self.sparse_dim() != other.sparse_dim():
        return _ADD_ON_HOST(self, other, alpha=alpha, out=out)  # type: ignore[no-any-return]
    indices = torch.cat([self._indices(), other._indices()], 1)
    both = torch.cat([self._values().to(dtype), values]).to(out.dtype)
    return out.copy_(torch.sparse_coo_tensor(indices, both, self.shape, check_invariants=False))


_ADD_ON_HOST = _on_host(aten.add.out)
_OWN: dict[str, dict[OpOverload, Kernel]] = {
    "NestedTensor": {aten.native_layer_norm.default: _layer_norm},
    "Sparse": {aten.add.out: _add_out},
    "SparseCsr": {},
}
KERNELS = {str(op): _like(op, _CPU) for op in _MAKING}  # of plain tensors


def kernels(kind: str, overloads: Iterator[OpOverload]) -> Iterator[tuple[str, Kernel]]:
    """Name and kernel of each op that torch has for a kind of tensors."""
    like = DispatchKeySet(getattr(DispatchKey, f"{kind}CPU"))
    for op in overloads:
        if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), f"{kind}CPU"):
            kernel = _OWN[kind].get(op) or (_on_host(op) if op in _ON_HOST[kind] else _like(op, like))
            yield op.name().removeprefix("aten::"), kernel
