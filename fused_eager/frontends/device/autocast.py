"""Autocast: which ops compute in the lower dtype, which in float32, and which in the widest that they get.

The lists are those that torch documents for accelerators ("Autocast Op Reference"). torch has kernels for its own
devices' keys alone; for PrivateUse1 the backend brings them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload

from fused_eager.fusion_rules.lowering import leaves, map_leaves

from ...quiet import uncompiled
from .doors import DOORS, is_on_device

KEY = "AutocastPrivateUse1"
_EXCLUDED = DispatchKeySet(DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]

LOWER = """
_convolution _convolution.deprecated conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc
conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum
mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
_thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell lstm.input lstm.data gru.input gru.data
rnn_tanh.input rnn_tanh.data rnn_relu.input rnn_relu.data scaled_dot_product_attention
"""
FLOAT32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
cross_entropy_loss hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
_upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
_upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa norm.Scalar
norm.ScalarOpt_dim norm.names_ScalarOpt_dim
"""
FLOAT32_UNLESS_SAID = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
WIDEST = """
addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add cat stack
"""
REFUSED = "binary_cross_entropy"
_REFUSAL = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\nMany models use a sigmoid "
    "layer right before the binary cross entropy layer.\nIn this case, combine the two layers using torch.nn."
    "functional.binary_cross_entropy_with_logits\nor torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and "
    "BCEWithLogits are\nsafe to autocast."
)


def _is_cast(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and is_on_device(t) and t.is_floating_point() and t.dtype is not torch.float64


def _lower_dtype() -> torch.dtype:
    return torch.get_autocast_dtype(DOORS[0].device.type)


def _widest(args: Any, kwargs: dict[str, Any]) -> torch.dtype:
    """float32 if anything is, else the lower dtype."""
    wide = any(_is_cast(t) and t.dtype is torch.float32 for t in leaves([args, kwargs]))
    return torch.float32 if wide else _lower_dtype()


def _cast(dtype: torch.dtype, value: Any) -> Any:
    return map_leaves(lambda t: t.to(dtype) if _is_cast(t) else t, value)


def _kernel(op: OpOverload, to: Callable[[Any, dict[str, Any]], torch.dtype | None]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
            dtype = to(args, kwargs)
            if dtype is None:
                return op(*args, **kwargs)
            args = tuple([_cast(dtype, a) for a in args])
            return op(*args, **{k: _cast(dtype, v) for k, v in kwargs.items()})

    return kernel


def _unless_said(op: OpOverload) -> Callable[..., Any]:
    """float32, unless the program says in which dtype."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
            said = kwargs.get("dtype") is not None or len(args) > _DTYPE_AT.get(str(op), 9)
            if not said and any(_is_cast(t) for t in leaves(args)):
                args = tuple([_cast(torch.float32, a) for a in args])
            return op(*args, **kwargs)

    return kernel


_DTYPE_AT = {"aten.softmax.int": 2, "aten.log_softmax.int": 2}  # it can be said by place


def _refused(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(_REFUSAL)


def _overload(name: str) -> OpOverload | None:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


class _Thread(threading.local):
    is_told = False  # which dtype is meant where none is named


_THREAD = _Thread()


def _mean_bfloat16() -> None:
    """Where a program names no dtype, autocast computes in bfloat16: a TPU has no float16. torch keeps it by thread."""
    if not _THREAD.is_told:
        _THREAD.is_told = True
        torch.set_autocast_dtype(DOORS[0].device.type, torch.bfloat16)


def _tell_each_thread() -> None:
    """Have each thread know it before it asks for the first time."""
    autocast = torch.amp.autocast_mode.autocast
    init = autocast.__init__

    @functools.wraps(init)
    def made(self: Any, device_type: Any, *args: Any, **kwargs: Any) -> None:
        if device_type == DOORS[0].device.type:
            _mean_bfloat16()
        init(self, device_type, *args, **kwargs)

    autocast.__init__ = made  # type: ignore[method-assign]
    _mean_bfloat16()


_libraries: list[torch.library.Library] = []


def register() -> None:
    """Register what autocast does with each op; with all others it does nothing."""
    _tell_each_thread()
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(torch.library.fallthrough_kernel, KEY)
    lib = torch.library.Library("aten", "IMPL")
    _libraries.extend((rest, lib))

    def enter(names: str, make: Callable[[OpOverload], Callable[..., Any]]) -> None:
        for name in names.split():
            op = _overload(name)
            if op is not None:  # else this torch has no such op
                lib.impl(name, uncompiled(make(op)), KEY)

    enter(LOWER, lambda op: _kernel(op, lambda args, kwargs: _lower_dtype()))
    enter(FLOAT32, lambda op: _kernel(op, lambda args, kwargs: torch.float32))
    enter(WIDEST, lambda op: _kernel(op, _widest))
    enter(FLOAT32_UNLESS_SAID, _unless_said)
    enter(REFUSED, lambda op: _refused)
