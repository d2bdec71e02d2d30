"""Helion's own examples on the device: `python -m tests.frontends.kernels.helion_examples FOLDER [NAME ...]`.

FOLDER is `examples` of a checkout of Helion; nothing of it is here. Each kernel is taken as it is, made an op of by its
`jax_fn`, called with tensors of the device, and compared with torch. It prints a line of JSON for each.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@dataclass(frozen=True)
class Example:
    """A kernel of a file, what it is called with, and what torch returns: of several results, as many as are given."""

    file: str
    kernel: str
    arguments: Callable[[], tuple[Any, ...]]
    truth: Callable[..., Any]
    results: int = 1


def _rms(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, w.shape, w, 1e-5)


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def _se(x: Tensor, w: Tensor) -> Tensor:
    return 2 * x * torch.sigmoid(x @ w)


def _layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, w.shape, w, b)


_FEW, _SQUARE = (lambda: (randn(32, 128),)), (lambda: (randn(64, 128), randn(128, 64)))
_QKV = lambda: tuple(randn(1, 2, 128, 64) + i for i in range(3))  # noqa: E731
EXAMPLES: dict[str, Example] = {
    "add": Example("add", "add", lambda: (randn(64, 128), randn(64, 128) + 1), torch.add),
    "add, broadcast": Example("add", "add", lambda: (randn(64, 128), randn(128)), torch.add),
    "exp": Example("exp", "exp_fwd", _FEW, torch.exp),
    "softmax": Example("softmax", "softmax", _FEW, lambda x: x.softmax(1)),
    "softmax, decomposed": Example("softmax", "softmax_decomposed", _FEW, lambda x: x.softmax(1)),
    "softmax, in two passes": Example("softmax", "softmax_two_pass", _FEW, lambda x: x.softmax(1)),
    "batch_softmax": Example("batch_softmax", "batch_softmax", lambda: (randn(4, 8, 128),), lambda x: x.softmax(-1)),
    "sum": Example("sum", "sum_kernel", _FEW, lambda x: x.sum(-1)),
    "long_sum": Example("long_sum", "longsum", _FEW, lambda x: x.sum(-1)),
    "rms_norm": Example("rms_norm", "rms_norm_fwd", lambda: (randn(32, 128), randn(128)), _rms, 2),
    "layer_norm": Example(
        "layer_norm", "layer_norm_fwd", lambda: (randn(32, 128), [128], randn(128), randn(128)),
        lambda x, s, w, b: F.layer_norm(x, s, w, b), 3,
    ),
    "welford": Example(
        "welford", "welford", lambda: (randn(128), randn(128) + 1, randn(32, 128)),
        lambda w, b, x: F.layer_norm(x, [128], w, b),
    ),
    "matmul": Example("matmul", "matmul", _SQUARE, torch.matmul),
    "matmul_split_k": Example("matmul_split_k", "matmul_split_k", _SQUARE, torch.matmul),
    "matmul_layernorm": Example(
        "matmul_layernorm", "matmul_layernorm", lambda: (*_SQUARE(), randn(64), randn(64) + 1),
        lambda x, y, w, b: F.layer_norm(x @ y, [64], w, b),
    ),
    "bmm": Example("bmm", "bmm", lambda: (randn(2, 128, 128), randn(2, 128, 128) + 1), torch.bmm),
    "broadcast_matmul": Example(
        "broadcast_matmul", "broadcast_matmul", lambda: (randn(2, 32, 64), randn(64, 48)), torch.matmul
    ),
    "attention": Example("attention", "attention", _QKV, _sdpa, 2),
    "attention, output alone": Example("attention", "attention_output", _QKV, _sdpa),
    "attention, causal": Example(
        "attention", "causal_attention_output", _QKV,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    ),
    "cross_entropy": Example(
        "cross_entropy", "cross_entropy", lambda: (randn(64, 128), torch.arange(64).int()),
        lambda x, y: F.cross_entropy(x, y.long()),
    ),
    "geglu": Example("geglu", "_geglu", lambda: (randn(32, 128), randn(32, 128) + 1),
                     lambda a, b: F.gelu(a, approximate="tanh") * b),
    "geglu, for Pallas": Example("geglu", "_geglu_pallas", lambda: (randn(32, 128), randn(32, 128) + 1),
                                 lambda a, b: F.gelu(a, approximate="tanh") * b),
    "swiglu": Example(
        "swiglu", "_swiglu_fwd", lambda: (randn(32, 128), randn(32, 128) + 1), lambda a, b: F.silu(a) * b
    ),
    "swiglu, for Pallas": Example(
        "swiglu", "_swiglu_fwd_pallas", lambda: (randn(32, 128), randn(32, 128) + 1), lambda a, b: F.silu(a) * b
    ),
    "embedding": Example(
        "embedding", "embedding", lambda: (torch.arange(24).int().reshape(4, 6), randn(32, 64)), F.embedding
    ),
    "concatenate": Example(
        "concatenate", "concat2d_dim1", lambda: (randn(32, 64), randn(32, 48)), lambda x, y: torch.cat([x, y], 1)
    ),
    "se_block": Example("se_block", "se_block_fwd", lambda: (randn(32, 64), randn(64, 64) / 8), _se, 2),
    "kl_div": Example(
        "kl_div", "kl_div_forward", lambda: (randn(32, 128).log_softmax(-1), randn(32, 129)[:, 1:].softmax(-1)),
        lambda p, q: F.kl_div(p, q, reduction="batchmean"),
    ),
}  # fmt: skip


def module(folder: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"helion_example_{name}", folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


def run(folder: Path, name: str) -> None:
    """Raises AssertionError where a result is not torch's, and whatever Helion raises."""
    from fused_eager import jax_op

    example = EXAMPLES[name]
    kernel = getattr(module(folder, example.file), example.kernel)
    given = example.arguments()
    tensors = [x for x in given if isinstance(x, Tensor)]

    form, several = [None if isinstance(x, Tensor) else x for x in given], example.results > 1

    def called(*arrays: Any) -> Any:
        left = iter(arrays)
        made = kernel.jax_fn(*[next(left) if x is None else x for x in form])
        return tuple(made) if several else made

    functions = [
        lambda a: called(a), lambda a, b: called(a, b), lambda a, b, c: called(a, b, c),
        lambda a, b, c, d: called(a, b, c, d),
    ]  # fmt: skip
    parameters = ", ".join(f"Tensor {p}" for p in "abcd"[: len(tensors)])
    out = "Tensor" if example.results == 1 else f"({', '.join(['Tensor'] * example.results)})"
    op = jax_op(f"helion_examples::{example.kernel}", schema=f"({parameters}) -> {out}")(functions[len(tensors) - 1])
    made = op(*[t.to("tpu") for t in tensors])
    truth = example.truth(*given)
    pairs = zip(made, truth if isinstance(truth, tuple) else [truth]) if several else [(made, truth)]  # noqa: B905
    for found, expected in pairs:
        assert found.device.type == "tpu"
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4, check_dtype=False)


def main(folder: Path, names: list[str]) -> int:
    """Returns how many differ or raise."""
    import fused_eager.tpu  # noqa: F401

    failed = 0
    for name in names or EXAMPLES:
        try:
            run(folder, name)
            result = "equal"
        except AssertionError as error:
            result = f"differs: {error}"
        except Exception as error:  # whatever Helion raises for a kernel that it does not make
            result = f"{type(error).__name__}: {error}"
        failed += result != "equal"
        print(json.dumps({"example": name, "result": " ".join(result.split())[:300]}), flush=True)
    return failed


if __name__ == "__main__":
    os.environ.setdefault("HELION_BACKEND", "pallas")
    os.environ.setdefault("HELION_PALLAS_INTERPRET", "1")
    os.environ.setdefault("HELION_AUTOTUNE_EFFORT", "none")
    sys.exit(min(main(Path(sys.argv[1]), sys.argv[2:]), 100))
