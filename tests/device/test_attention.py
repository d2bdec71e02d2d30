"""Attention on the device is one op and its derivative is one, with the values, gradients and errors of the CPU's."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fused_eager import report

Tensor = torch.Tensor


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def operands(device: str, shared: int = 4, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 12, 8), (2, shared, 10, 8), (2, shared, 10, 8)]
    return [torch.randn(s, generator=g).to(device, dtype).requires_grad_() for s in shapes]


SEEN = torch.rand(2, 1, 12, 10, generator=torch.Generator().manual_seed(1)) < 0.6
SEEN[0, 0, 3] = False  # one that sees nothing
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": ((), {}),
    "causal": ((), {"is_causal": True, "scale": 0.3}),
    "a mask": ((SEEN,), {}),
    "a mask that is added": ((torch.randn(12, 10, generator=torch.Generator().manual_seed(2)),), {}),
    "grouped heads": ((), {"is_causal": True, "enable_gqa": True}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_cpus(name: str, dtype: torch.dtype) -> None:
    masks, more = CASES[name]
    results = []
    for device in ("cpu", "tpu"):
        given = operands(device, 2 if "enable_gqa" in more else 4, dtype)
        mask = [m.to(device) if m.dtype is torch.bool else m.to(device, dtype) for m in masks]
        with Seen() as seen:
            out = F.scaled_dot_product_attention(*given, *mask, **more)
            out.sin().sum().backward()
        results.append([x.detach().cpu() for x in (out, *[t.grad for t in given])])  # type: ignore[union-attr]
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    assert [op for op in seen.ops if "bmm" in op] == []
    assert sum("flash_attention_for_cpu" in op for op in seen.ops) == 2


def dropped_by_torch(q: Tensor, k: Tensor, v: Tensor, kept: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
    """Attention with dropout in single ops of torch's, of a draw that is given."""
    if more.get("enable_gqa"):
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * more.get("scale", q.shape[-1] ** -0.5)
    if more.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    return torch.where(kept, torch.ops.aten._safe_softmax(scores, -1) / 0.75, 0.0) @ v


@pytest.mark.parametrize("name", CASES)
def test_dropout_is_part_of_the_op(name: str) -> None:
    masks, more = CASES[name]
    there, here = (operands(device, 2 if "enable_gqa" in more else 4) for device in ("tpu", "cpu"))
    with Seen() as seen:
        out = F.scaled_dot_product_attention(*there, *(m.to("tpu") for m in masks), dropout_p=0.25, **more)
        kept = out.grad_fn.saved_tensors[3].cpu()  # type: ignore[union-attr]
        out.sin().sum().backward()
    assert [op for op in seen.ops if "bmm" in op or "softmax" in op] == []
    assert sum("attention_dropped" in op for op in seen.ops) == 2
    assert kept.shape == (2, 4, 12, 10) and 0.6 < kept.float().mean() < 0.9
    expected = dropped_by_torch(*here, kept, *masks, **more)
    expected.sin().sum().backward()
    found = [out.detach().cpu(), *(t.grad.cpu() for t in there)]  # type: ignore[union-attr]
    torch.testing.assert_close(found, [expected.detach(), *(t.grad for t in here)], rtol=1e-4, atol=1e-5)


def test_dropout_s_derivative_has_one() -> None:
    there, here = (operands(device, dtype=torch.float64) for device in ("tpu", "cpu"))
    out = F.scaled_dot_product_attention(*there, dropout_p=0.25)
    kept = out.grad_fn.saved_tensors[3].cpu()  # type: ignore[union-attr]
    found = []
    for given, made in ((there, out), (here, dropped_by_torch(*here, kept))):
        first = torch.autograd.grad(made.sin().sum(), given, create_graph=True)
        found.append([x.detach().cpu() for x in torch.autograd.grad(sum(t.square().sum() for t in first), given)])
    torch.testing.assert_close(found[0], found[1])


def test_a_checkpoint_drops_the_same_again() -> None:
    found = []
    for call in (lambda f, *x: f(*x), lambda f, *x: checkpoint(f, *x, use_reentrant=False)):
        given = operands("tpu")
        torch.manual_seed(5)
        out = call(lambda *x: F.scaled_dot_product_attention(*x, dropout_p=0.25), *given)
        out.sin().sum().backward()
        found.append([out.detach().cpu(), *(t.grad.cpu() for t in given)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_it_is_recorded_with_dropout_whatever_its_size() -> None:
    """ATen has no kernel for that op which could refuse its numbers; large calls went to the host to ask one."""
    q, k, v = (torch.ones(8, 8, 512, 16, device="tpu", requires_grad=True) for _ in range(3))
    before = report().flushes.get("sync.island", 0)
    F.scaled_dot_product_attention(q, k, v, dropout_p=0.25).sum().backward()
    assert q.grad is not None and bool(q.grad.isfinite().all())
    assert report().flushes.get("sync.island", 0) == before


@pytest.mark.parametrize("why", ["dropout of all", "a mask that learns", "it is forbidden", "another width of values"])
def test_what_the_op_has_not_goes_torchs_way(why: str) -> None:
    q, k, v = operands("tpu")
    mask = None
    if why == "a mask that learns":
        mask = torch.zeros(12, 10, device="tpu", requires_grad=True)
    if why == "another width of values":
        v = torch.ones(2, 4, 10, 5, device="tpu")
    allowed = [SDPBackend.MATH] if why == "it is forbidden" else [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(allowed), Seen() as seen:
        out = F.scaled_dot_product_attention(q, k, v, mask, 1.0 if why == "dropout of all" else 0.0)
        out.sum().backward()
    assert not any("flash" in op for op in seen.ops) and q.grad is not None and bool(q.grad.isfinite().all())
    if mask is not None:
        assert mask.grad is not None and bool(mask.grad.abs().sum() > 0)


def test_derivatives_of_derivatives_and_tangents() -> None:
    def twice(device: str) -> list[Tensor]:
        given = operands(device, dtype=torch.float64)
        out = F.scaled_dot_product_attention(*given, is_causal=True)
        with torch.enable_grad():
            first = torch.autograd.grad(out.sin().sum(), given, create_graph=True)
        second = torch.autograd.grad(sum(t.square().sum() for t in first), given)
        return [x.detach().cpu() for x in (*first, *second)]

    with sdpa_kernel(SDPBackend.MATH):
        expected = twice("cpu")
    torch.testing.assert_close(twice("tpu"), expected)
    q, k, v = (x.detach() for x in operands("tpu", dtype=torch.float64))
    _, tangent = torch.func.jvp(lambda x: F.scaled_dot_product_attention(x, k, v), (q,), (q,))
    eps = 1e-6
    moved = F.scaled_dot_product_attention(q + eps * q, k, v) - F.scaled_dot_product_attention(q - eps * q, k, v)
    torch.testing.assert_close(tangent.cpu(), (moved / (2 * eps)).cpu(), rtol=1e-5, atol=1e-7)


def test_transforms_of_torch_func() -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v).sin().sum()

    found = []
    for device in ("cpu", "tpu"):
        given = [x.detach() for x in operands(device, dtype=torch.float64)]
        each = [x[:, None] for x in given]  # a batch of batches of one
        with sdpa_kernel(SDPBackend.MATH):
            found.append([x.cpu() for x in (*torch.func.grad(loss, (0, 1, 2))(*given), torch.func.vmap(loss)(*each))])
    torch.testing.assert_close(found[1], found[0])
    assert torch.func.grad(loss)(*given).shape == given[0].shape


def test_errors_are_eagers() -> None:
    q, k, v = operands("tpu")
    with pytest.raises(RuntimeError, match="is_causal"):
        F.scaled_dot_product_attention(q, k, v, torch.ones(12, 10, device="tpu"), is_causal=True)
    with pytest.raises(RuntimeError, match="same dtype"):
        F.scaled_dot_product_attention(q, k.double(), v)


LENGTHS: dict[str, tuple[list[int], list[int] | None]] = {
    "of its own": ([5, 3, 8], None),
    "of others, and none": ([5, 0, 3], [7, 2, 0]),
    "in one row": ([1, 1, 1, 30], None),  # rows of their own would be longer than all tokens together
}
WINDOWS = {"all": (-1, -1), "causal": (-1, 0), "a window": (3, 0), "both sides": (2, 1)}


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, queries: list[int], keys: list[int], window: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Attention of each sequence by itself, and its log-sum-exp, `[heads, tokens]`."""
    outs, sums = [], []
    for qi, ki, vi in zip(q.split(queries), k.split(keys), v.split(keys), strict=True):
        grouped = q.shape[1] // k.shape[1]
        ki, vi = (t.repeat_interleave(grouped, 1).transpose(0, 1) for t in (ki, vi))
        scores = qi.transpose(0, 1) @ ki.mT * q.shape[-1] ** -0.5
        here = torch.arange(len(qi))[:, None] + ki.shape[1] - len(qi)
        there, (left, right) = torch.arange(ki.shape[1]), window
        seen = ((left < 0) | (there >= here - left)) & ((right < 0) | (there <= here + right))
        scores = scores.masked_fill(~seen, -torch.inf)
        sums.append(torch.where(seen.any(-1), scores.logsumexp(-1), torch.inf))
        weights = torch.where(seen.any(-1, keepdim=True), scores.softmax(-1), 0.0)
        outs.append((weights @ vi).transpose(0, 1))
    return torch.cat(outs), torch.cat(sums, 1)


def varlen_that_has(*arguments: str) -> Any:
    """The module of `varlen_attn`, where that takes these arguments."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    lacking = set(arguments) - set(inspect.signature(varlen.varlen_attn).parameters)
    if lacking:
        pytest.skip(f"torch 2.13 has these arguments first: {', '.join(sorted(lacking))}")
    return varlen


@pytest.mark.thinned(3)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", LENGTHS)
def test_sequences_of_several_lengths(name: str, window: str) -> None:
    varlen = varlen_that_has("enable_gqa")
    queries, given_keys = LENGTHS[name]
    keys, g = given_keys or queries, torch.Generator().manual_seed(0)
    shapes = [(sum(queries), 4, 8), (sum(keys), 2, 8), (sum(keys), 2, 8)]
    given = [torch.randn(shape, generator=g) for shape in shapes]
    ours, theirs = ([t.to(d).requires_grad_() for t in given] for d in ("tpu", "cpu"))
    expected, sums = one_by_one(*theirs, queries, keys, WINDOWS[window])
    expected.sin().sum().backward()
    starts, others = (torch.tensor([0, *n]).cumsum(0).int().to("tpu") for n in (queries, keys))
    out, lse = varlen.varlen_attn(
        *ours, starts, others if given_keys else starts, max(queries), max(keys), window_size=WINDOWS[window],
        enable_gqa=True, return_aux=varlen.AuxRequest(lse=True),
    )  # fmt: skip
    out.sin().sum().backward()
    found = [out.detach(), lse.detach(), *[t.grad for t in ours]]  # type: ignore[union-attr]
    for a, b in zip(found, [expected, sums, *[t.grad for t in theirs]], strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)  # type: ignore[union-attr]
    assert not [op for op in report().islands if "flash" in op]


def test_one_sequence_hides_no_nan_of_its_own_and_sees_none_of_another() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    q, starts = torch.randn(6, 2, 8), torch.tensor([0, 2, 6], dtype=torch.int32).to("tpu")
    q[1] = torch.nan
    out = varlen.varlen_attn(*[q.to("tpu")] * 3, starts, starts, 4, 4).cpu()
    assert out[:2].isnan().all() and out[2:].isfinite().all()


@pytest.mark.parametrize(("queries", "keys"), [([], []), ([0], [0]), ([3, 0], [0, 0]), ([0, 0], [2, 1]), ([1], [1])])
def test_sequences_of_no_tokens_and_of_one(queries: list[int], keys: list[int]) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    given = [torch.randn(sum(n), 2, 8).to("tpu").requires_grad_() for n in (queries, keys, keys)]
    starts, others = (torch.tensor([0, *n]).cumsum(0).int().to("tpu") for n in (queries, keys))
    longest = [max(n, default=0) for n in (queries, keys)]
    out, lse = varlen.varlen_attn(*given, starts, others, *longest, return_aux=varlen.AuxRequest(lse=True))
    out.sum().backward()
    assert out.shape == given[0].shape and lse.shape == (2, sum(queries))
    assert torch.equal(out.cpu(), given[2].detach().cpu() if queries == [1] else torch.zeros(out.shape))
    assert [t.grad.shape for t in given] == [t.shape for t in given]  # type: ignore[union-attr]


def test_the_result_is_written_where_it_is_asked_for() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if not hasattr(varlen, "varlen_attn_out"):
        pytest.skip("torch 2.13 has it first")
    q, starts = torch.randn(6, 2, 8).to("tpu"), torch.tensor([0, 2, 6], dtype=torch.int32).to("tpu")
    out = torch.empty_like(q)
    varlen.varlen_attn_out(out, q, q, q, starts, starts, 4, 4)
    assert torch.equal(out, varlen.varlen_attn(q, q, q, starts, starts, 4, 4))


def test_a_compiled_function_has_the_op_and_its_derivative() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    q, starts = torch.randn(6, 2, 8), torch.tensor([0, 2, 6], dtype=torch.int32).to("tpu")

    def function(q: Tensor) -> Tensor:
        return varlen.varlen_attn(q * 2, q, q, starts, starts, 4, 4, window_size=(-1, 0)).sin()

    found = []
    for each in (function, torch.compile(function, backend="tpu", fullgraph=True)):
        leaf = q.to("tpu").requires_grad_()
        each(leaf).sum().backward()
        found.append(leaf.grad)
    torch.testing.assert_close(*found)


def test_a_cache_of_pages_is_decoded_from() -> None:
    varlen = varlen_that_has("enable_gqa", "seqused_k", "block_table")
    g = torch.Generator().manual_seed(0)
    pages, used = torch.randn(2, 10, 4, 2, 8, generator=g), [5, 9, 1]
    table = torch.tensor([[7, 2, 0], [1, 9, 4], [3, 0, 0]], dtype=torch.int32)
    q = torch.randn(3, 4, 8, generator=g)
    k, v = (torch.cat([pool[row].flatten(0, 1)[:n] for row, n in zip(table, used, strict=True)]) for pool in pages)
    expected, _ = one_by_one(q, k, v, [1] * 3, used, (-1, 0))
    starts, lengths = (torch.tensor(n, dtype=torch.int32).to("tpu") for n in (range(4), used))
    given = [t.to("tpu") for t in (q, *pages)]
    out = varlen.varlen_attn(
        *given, starts, None, 1, 12, window_size=(-1, 0), enable_gqa=True, seqused_k=lengths,
        block_table=table.to("tpu"),
    )  # fmt: skip
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_the_op_of_accelerators_is_the_same() -> None:
    """What tensors that wrap others (DTensor) see."""
    q, k, v = operands("tpu")
    out, lse, _, _, queries, keys, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, False, scale=0.3
    )
    out.sin().sum().backward()
    of_cpu = operands("cpu")
    expected, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*of_cpu, 0.0, False, scale=0.3)
    expected.sin().sum().backward()
    for one, other in zip((out, lse, q.grad, k.grad, v.grad), (expected, sums, *[t.grad for t in of_cpu]), strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.detach(), rtol=1e-4, atol=1e-5)
    assert (queries, keys, seed.ndim, offset.ndim) == (12, 10, 0, 0)
    with pytest.raises(NotImplementedError, match="no dropout on tpu"):
        torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.5)
