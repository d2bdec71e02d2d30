"""How many elements a call returns at most, by what its op is.

A row stands for ops whose results depend on shapes alone, and are no larger than it says. Ops without a row may return
anything; only shape inference knows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from fused_eager.fusion_rules.rule import rule_for

Bound = Callable[[Any, list[torch.Tensor]], int]


def most_returned(op: OpOverload, args: Any, tensors: list[torch.Tensor]) -> int | None:
    """The most elements that a call may return in memory of their own; None where that is not known before."""
    bound = _bound(op)
    try:
        return None if bound is None else bound(args, tensors)
    except Exception:
        return None  # no such call, which ATen will refuse; or one with arguments left out


@functools.cache
def _bound(op: OpOverload) -> Bound | None:
    schema = op._schema
    rule = rule_for(op)
    if op.namespace != "aten" or rule is None or rule.defines or any(a.is_out for a in schema.arguments):
        return None
    name = schema.name.removeprefix("aten::")
    if name in _ROWS:
        return _ROWS[name]
    if torch.Tag.nondeterministic_seeded in op.tags:
        return None  # a rehearsal would take numbers from the program's generator
    if all(r.alias_info is not None for r in schema.returns):
        return _nothing  # it returns what it writes
    if name.startswith("_foreach_"):
        return _pairs
    return _broadcast if torch.Tag.pointwise in op.tags else None


def _nothing(args: Any, tensors: list[torch.Tensor]) -> int:
    return 0


def _one(args: Any, tensors: list[torch.Tensor]) -> int:
    return 1


def _broadcast(args: Any, tensors: list[torch.Tensor]) -> int:
    return 2 * math.prod(torch.broadcast_shapes(*[t.shape for t in tensors]))


def _operands(args: Any, tensors: list[torch.Tensor]) -> int:
    # A sum over no rows has as many numbers as there are columns.
    return 4 * sum(math.prod(max(n, 1) for n in t.shape) for t in tensors)


def _pairs(args: Any, tensors: list[torch.Tensor]) -> int:
    """Of lists of tensors each with the one at its place in the next list."""
    lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor)]
    shapes = zip(*[[t.shape for t in each] for each in lists], strict=True)
    return sum(math.prod(torch.broadcast_shapes(*each)) for each in shapes)


def _product(args: Any, tensors: list[torch.Tensor]) -> int:
    """The rows of a matrix by the columns of the one after it, which are as many as what is added to them has."""
    left, right = [t for t in tensors if t.ndim == max(t.ndim for t in tensors)][-2:]
    return math.prod(left.shape[:-1]) * right.shape[-1]


def _distances(args: Any, tensors: list[torch.Tensor]) -> int:
    left, right = args[:2]
    return math.prod(left.shape[:-1]) * int(right.shape[-2])


def _squares(args: Any, tensors: list[torch.Tensor]) -> int:
    return 4 * sum(math.prod(t.shape[:-2]) * max(*t.shape[-2:], 1) ** 2 for t in tensors if t.ndim >= 2)


def _sizes(args: Any, tensors: list[torch.Tensor]) -> int:
    return math.prod(args[0])


def _second_sizes(args: Any, tensors: list[torch.Tensor]) -> int:
    return math.prod(args[1])


def _image_sizes(args: Any, tensors: list[torch.Tensor]) -> int:
    return math.prod(args[1]) * tensors[0].shape[0] * tensors[0].shape[1]


def _padded(args: Any, tensors: list[torch.Tensor]) -> int:
    widths = [args[1][i] + args[1][i + 1] for i in range(0, len(args[1]), 2)]
    return math.prod(n + (widths[d] if d < len(widths) else 0) for d, n in enumerate(reversed(tensors[0].shape)))


def _numbers(args: Any, tensors: list[torch.Tensor]) -> int:
    start, end, step = ((0, args[0], 1) if len(args) == 1 else (*args, 1))[:3]
    return math.ceil((end - start) / step)


def _rows(args: Any, tensors: list[torch.Tensor]) -> int:
    return int(args[1].numel() * args[0].shape[-1])


def _table(args: Any, tensors: list[torch.Tensor]) -> int:
    gradient, _, rows = args[:3]
    return int(rows * gradient.shape[-1])


def _slices(args: Any, tensors: list[torch.Tensor]) -> int:
    values, dim, places = args[:3]
    return int(values.numel() // max(values.shape[dim], 1) * places.numel())


def _places(args: Any, tensors: list[torch.Tensor]) -> int:
    """Of each axis that has no tensor of indices all, and what those broadcast to."""
    values, places = args[:2]
    given = torch.broadcast_shapes(*[i.shape for i in places if i is not None])
    return math.prod(given) * math.prod(n for d, n in enumerate(values.shape) if d >= len(places) or places[d] is None)


def _convolved(args: Any, tensors: list[torch.Tensor]) -> int:
    x, weight, _, stride, padding, dilation, transposed, more, groups = args
    lengths = list(zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, more, strict=True))
    if transposed:
        return int(
            x.shape[0] * weight.shape[1] * groups * math.prod(n * s + d * k + o for n, k, s, _, d, o in lengths)
        )
    return int(x.shape[0] * weight.shape[0] * math.prod((n + 2 * p) // s + 1 for n, _, s, p, _, _ in lengths))


_TABLE: list[tuple[Bound, str]] = [
    (
        _operands,
        "sum mean prod amax amin aminmax max min argmax argmin all any var std var_mean std_mean logsumexp norm median "
        "linalg_vector_norm nansum cumsum cumprod cummax cummin logcumsumexp _is_all_true count_nonzero "
        "_softmax _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data native_layer_norm "
        "native_layer_norm_backward native_group_norm native_group_norm_backward native_batch_norm "
        "native_batch_norm_backward nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward "
        "sort argsort topk flip roll tril triu clone _to_copy cat stack unsafe_split trace dot mv "
        "gather scatter scatter_add scatter_reduce index_add index_copy index_fill index_put masked_fill "
        "zeros_like ones_like empty_like full_like lift_fresh_copy convolution_backward "
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward "
        "max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward _fft_r2c _fft_c2c",
    ),
    (
        _broadcast,
        "floor_divide leaky_relu_backward binary_cross_entropy binary_cross_entropy_backward "
        "binary_cross_entropy_with_logits mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward "
        "huber_loss huber_loss_backward",
    ),
    (_product, "mm bmm addmm baddbmm"),
    (_distances, "_cdist_forward"),
    (_squares, "linalg_cholesky_ex _linalg_solve_ex linalg_qr _linalg_slogdet _linalg_det _linalg_eigh linalg_inv_ex"),
    (_one, "scalar_tensor"),
    (_sizes, "zeros ones empty full"),
    (_second_sizes, "new_zeros new_ones new_empty new_full slice_backward select_backward"),
    (_image_sizes, "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d"),
    (_padded, "constant_pad_nd"),
    (_numbers, "arange"),
    (_rows, "embedding"),
    (_table, "embedding_dense_backward"),
    (_slices, "index_select"),
    (_places, "index"),
    (_convolved, "convolution"),
]
_ROWS = {name: bound for bound, names in _TABLE for name in names.split()}
