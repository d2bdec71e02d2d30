"""Every op of op_db on the device against the CPU: what it returns, and its gradient."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from .compare import TPU, moved, same, tensors

RANDOM = frozenset(
    {
        "bernoulli", "multinomial", "normal", "rand_like", "randn_like", "randint_like", "randint", "randn",
        "uniform", "cauchy", "exponential", "geometric", "log_normal", "nn.functional.dropout",
        "nn.functional.dropout2d", "nn.functional.dropout3d", "nn.functional.alpha_dropout",
        "nn.functional.feature_alpha_dropout", "nn.functional.rrelu", "empty", "empty_like", "empty_permuted",
        "empty_strided", "new_empty", "new_empty_strided", "svd_lowrank", "pca_lowrank",
        "nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d",
        "nn.functional.multi_head_attention_forward", "nn.functional.scaled_dot_product_attention",
    }
)
LEFT_OUT = {
    "as_strided": "its samples see more of a storage than is moved",
    "tensor_split": "its indices have to be on the CPU, on every device",
    **dict.fromkeys(["arange", "linspace", "logspace", "eye", "scalar_tensor"], "its samples name no device"),
}
_ELSEWHERE = ("signal.windows", "jiterator")  # their samples name no device; CUDA's alone
OPS = [op for op in op_db if op.name not in LEFT_OUT and not op.name.startswith(_ELSEWHERE)]
TOLERANCE = {torch.float32: 2e-3, torch.complex64: 2e-3, torch.bfloat16: 5e-2}


def compared(op: Any, dtype: torch.dtype, samples: int, grad: bool = False) -> int:
    """Compare an op's first samples. Returns how many there were."""
    count = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in list(op.sample_inputs("cpu", dtype, requires_grad=grad))[:samples]:
            given = (sample.input, sample.args, sample.kwargs)
            x, args, kwargs = moved(given, TPU)
            want = op(sample.input, *sample.args, **sample.kwargs)
            got = op(x, *args, **kwargs)
            count += 1
            if op.name in RANDOM:
                assert [(t.shape, t.dtype) for t in tensors(got)] == [(t.shape, t.dtype) for t in tensors(want)]
                continue
            tolerance = TOLERANCE.get(dtype, 2e-3 * any(t.is_floating_point() for t in tensors(want)))
            same(want, got, tolerance)
            if grad:
                same(_gradients(want, given), _gradients(got, (x, args, kwargs)), tolerance)
    return count


def _gradients(out: Any, given: Any) -> list[torch.Tensor | None]:
    outs = [t for t in tensors(out) if t.requires_grad]
    wanted = [t for t in tensors(given) if t.requires_grad]
    if not outs or not wanted:
        return []
    total = sum(t.abs().sum() if t.is_complex() else t.sum() for t in outs)
    return list(torch.autograd.grad(total, wanted, allow_unused=True))  # type: ignore[arg-type]


@pytest.mark.thinned(24)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.formatted_name)
def test_float32_forward_and_gradient(op: Any) -> None:
    if torch.float32 not in op.supported_dtypes("cpu"):
        return
    differentiable = op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")
    compared(op, torch.float32, 2, grad=differentiable)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.formatted_name)
def test_other_dtypes(op: Any, dtype: torch.dtype) -> None:
    if dtype in op.supported_dtypes("cpu"):
        compared(op, dtype, 2)
