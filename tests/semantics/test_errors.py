"""Errors: eager's type and text, at the op's own line where shapes and dtypes tell, else at the next sync."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fused_eager import LostValue, fused_eager, load, plan, sync

from .programs import compare, run, same_error


def f(*shape: int) -> torch.Tensor:
    return torch.ones(*shape) * 2


def i(*values: int) -> torch.Tensor:
    return torch.tensor(values) * 1


AT_ONCE: dict[str, Callable[[], Any]] = {
    "add shapes": lambda: f(2, 3) + f(2, 4),
    "mm shapes": lambda: f(2, 3) @ f(2, 3),
    "mm dtypes": lambda: torch.mm(f(2, 3), f(3, 2).double()),
    "addmm dtypes": lambda: torch.addmm(f(2, 2), f(2, 3), f(3, 2).double()),
    "bmm dtypes": lambda: torch.bmm(f(1, 2, 3), f(1, 3, 2).half()),
    "mv shapes": lambda: f(2, 3).mv(f(2)),
    "dot shapes": lambda: f(3).dot(f(4)),
    "dot dtypes": lambda: f(3).dot(f(3).double()),
    "linear shapes": lambda: F.linear(f(2, 3), f(4, 5)),
    "linear dtypes": lambda: F.linear(f(2, 3), f(4, 3).double()),
    "conv dtypes": lambda: F.conv2d(f(1, 1, 4, 4), f(1, 1, 2, 2).double()),
    "conv channels": lambda: F.conv2d(f(1, 2, 4, 4), f(1, 1, 2, 2)),
    "conv kernel": lambda: F.conv2d(f(1, 1, 2, 2), f(1, 1, 4, 4)),
    "view": lambda: f(2, 3).view(4),
    "view of a transpose": lambda: f(2, 3).t().view(6),
    "expand": lambda: f(2, 3).expand(3, 3),
    "cat shapes": lambda: torch.cat([f(2, 3), f(2, 4)]),
    "stack shapes": lambda: torch.stack([f(2), f(3)]),
    "cat nothing": lambda: torch.cat([]),
    "sum dim": lambda: f(2, 3).sum(2),
    "sum dim twice": lambda: f(2, 3).sum((0, 0)),
    "softmax of ints": lambda: torch.softmax(i(1, 2), 0),
    "mean of ints": lambda: i(1, 2).mean(),
    "var of ints": lambda: i(1, 2).var(),
    "bitwise of floats": lambda: f(2) & f(2),
    "invert of floats": lambda: ~f(2),
    "minus of bools": lambda: (f(2) > 0) - (f(2) > 0),
    "neg of bools": lambda: -(f(2) > 0),
    "in-place dtype": lambda: i(1, 2).add_(1.5),
    "in-place true div": lambda: i(1, 2).div_(2),
    "in-place shape": lambda: f(2).add_(f(3, 2)),
    "embedding of floats": lambda: F.embedding(f(2), f(3, 3)),
    "gather dtype": lambda: f(2, 2).gather(0, f(2, 2)),
    "gather dims": lambda: f(2, 2).gather(0, i(0, 1)),
    "scatter dtypes": lambda: f(2, 2).scatter(0, i(0, 1).view(1, 2), torch.ones(1, 2).double()),
    "index_select dtype": lambda: f(2, 2).index_select(0, f(1)),
    "index_select dim": lambda: f(2, 2).index_select(2, i(0)),
    "index float": lambda: f(3)[f(2)],
    "index too many": lambda: f(3)[0, 0],
    "index number": lambda: f(3)[5],
    "index mask shape": lambda: f(3)[f(4) > 1],
    "setitem shape": lambda: f(3).__setitem__(slice(0, 2), f(3)),
    "index_put shape": lambda: f(3).__setitem__(i(0, 1), f(3)),
    "index_add shapes": lambda: f(3, 2).index_add_(0, i(0, 1), f(3, 2)),
    "index_copy dtypes": lambda: f(3, 2).index_copy_(0, i(0), f(1, 2).double()),
    "where dtypes": lambda: torch.where(f(2), f(2), f(2)),
    "where shapes": lambda: torch.where(f(2) > 0, f(3), f(2)),
    "max empty": lambda: torch.zeros(0).max(),
    "max empty dim": lambda: torch.zeros(0, 3).max(0),
    "argmax empty": lambda: (torch.zeros(0) + 1).argmax(),
    "min complex": lambda: torch.zeros(2, dtype=torch.complex64).min(),
    "sort complex": lambda: torch.zeros(2, dtype=torch.complex64).sort(),
    "less complex": lambda: torch.zeros(2, dtype=torch.complex64) < 1,
    "floor of complex": lambda: torch.zeros(2, dtype=torch.complex64).floor(),
    "cross entropy shapes": lambda: F.cross_entropy(f(2, 3), i(0, 1, 2)),
    "cross entropy dtype": lambda: F.cross_entropy(f(2, 3), i(0, 1).int()),
    "mse warning shapes": lambda: F.mse_loss(f(2, 3), f(4)),
    "bce shapes": lambda: F.binary_cross_entropy(f(2) / 4, f(3)),
    "layer_norm shape": lambda: F.layer_norm(f(2, 3), (4,)),
    "batch_norm one value": lambda: F.batch_norm(f(1, 3), f(3), f(3), training=True),
    "group_norm": lambda: F.group_norm(f(2, 3, 4), 2),
    "max_pool kernel": lambda: F.max_pool2d(f(1, 1, 2, 2), 5),
    "pad": lambda: F.pad(f(2, 2), (2, 2), mode="reflect"),
    "interpolate": lambda: F.interpolate(f(1, 1, 2, 2)),
    "inverse of a rectangle": lambda: torch.linalg.inv(f(2, 3)),
    "cholesky shape": lambda: torch.linalg.cholesky(f(2, 3)),
    "det shape": lambda: torch.det(f(2, 3)),
    "einsum": lambda: torch.einsum("ij,jk->ik", f(2, 3), f(2, 3)),
    "matmul of scalars": lambda: torch.matmul(torch.tensor(1.0) * 1, f(2)),
    "unfold": lambda: f(4).unfold(0, 5, 1),
    "as_strided beyond": lambda: f(4).as_strided((3, 3), (2, 2)),
    "repeat": lambda: f(2, 2).repeat(2),
    "roll": lambda: f(2, 2).roll((1, 2), (0,)),
    "flip": lambda: f(2, 2).flip(2),
    "cumsum dim": lambda: f(2).cumsum(1),
    "topk": lambda: f(3).topk(5),
    "kthvalue": lambda: f(3).kthvalue(5),
    "tril of a vector": lambda: f(3).tril(),
    "outer": lambda: torch.outer(f(2, 2), f(2)),
    "cross": lambda: torch.linalg.cross(f(2, 4), f(2, 4)),
    "lerp dtypes": lambda: torch.lerp(f(2), f(2).double(), 0.5),
    "addcdiv ints": lambda: torch.addcdiv(i(1), i(1), i(2)),
    "pow int negative": lambda: i(2) ** -1,
    "arange": lambda: torch.arange(5, 0),
    "full dtype": lambda: torch.full((2,), "a"),
    "uint8 overflow": lambda: torch.full((2,), 300, dtype=torch.uint8),
    "add alpha float": lambda: i(1).add(i(1), alpha=0.5),
    "clamp nothing": lambda: f(2).clamp(),
    "isin": lambda: torch.isin(torch.zeros(2, dtype=torch.complex64), f(2)),
    "dropout p": lambda: F.dropout(f(2), 1.5),
    "one_hot": lambda: F.one_hot(f(2)),
    "bincount": lambda: torch.bincount(f(2)),
    "histc": lambda: torch.histc(i(1, 2), bins=0),
    "to_dense": lambda: f(2).coalesce(),
    "item of many": lambda: f(2).item(),
    "bool of many": lambda: bool(f(2)),
    "if of empty": lambda: bool(torch.zeros(0) + 1),
    "int of complex": lambda: int(torch.complex(f(1), f(1))),
    "numpy of grad": lambda: (f(2).requires_grad_() * 2).numpy(),
    "deepcopy of non-leaf": lambda: __import__("copy").deepcopy(f(2).requires_grad_() * 2),
    "meta mixed": lambda: f(2) + torch.ones(2, device="meta"),
    "unknown device": lambda: f(2).to("nowhere"),
    "grad of ints": lambda: i(1).requires_grad_(),
    "backward of many": lambda: (f(2).requires_grad_() * 2).backward(),
    "resize with grad": lambda: f(2).requires_grad_().resize_(4),
    "named": lambda: f(2, 2).refine_names("a", "a"),
    "scaled attention": lambda: F.scaled_dot_product_attention(f(1, 2, 3), f(1, 2, 4), f(1, 2, 4)),
    "rnn": lambda: torch.nn.LSTM(3, 4)(f(2, 2, 5)),
    "foreach lengths": lambda: torch._foreach_add([f(2)], [f(2), f(2)]),
    "split sizes": lambda: f(4).split([1, 2]),
    "masked_scatter dtype": lambda: f(2).masked_scatter(f(2) > 0, i(1, 2)),
    "masked_fill mask": lambda: f(2).masked_fill(f(2), 1.0),
    "masked_fill value": lambda: f(2).masked_fill(f(2) > 0, f(2)),
    "put": lambda: f(2).put_(f(1), f(1)),
    "nll weight": lambda: F.nll_loss(f(2, 3), i(0, 1), weight=f(2)),
    "kl": lambda: F.kl_div(f(2), f(3)),
    "pixel_shuffle": lambda: F.pixel_shuffle(f(1, 3, 2, 2), 2),
    "grid_sample": lambda: F.grid_sample(f(1, 1, 2, 2), f(1, 2, 2, 3)),
    "fold": lambda: F.fold(f(1, 4, 5), (3, 3), (2, 2)),
    "searchsorted": lambda: torch.searchsorted(f(2, 2), f(3, 2)),
    "baddbmm": lambda: torch.baddbmm(f(1), f(2, 2, 3), f(2, 2, 3)),
    "tensordot": lambda: torch.tensordot(f(2, 3), f(2, 3), 1),
    "quantile dtype": lambda: torch.quantile(i(1, 2), 0.5),
    "logical out": lambda: torch.add(f(2), 1, out=i(1, 2)),
    "unsqueeze": lambda: f(2).unsqueeze(3),
    "transpose": lambda: f(2, 2).transpose(0, 2),
    "permute": lambda: f(2, 2).permute(0, 0),
    "narrow": lambda: f(2).narrow(0, 1, 4),
    "select": lambda: f(2).select(0, 2),
    "diagonal": lambda: f(2).diagonal(),
    "complex of ints": lambda: torch.complex(i(1), i(1)),
    "polar dtypes": lambda: torch.polar(f(1), f(1).double()),
    "view_as_complex": lambda: torch.view_as_complex(f(2, 3)),
    "dtype view": lambda: f(3).view(torch.float64),
    "dtype view of a transpose": lambda: f(2, 2).t().view(torch.float64),
}


@pytest.mark.parametrize("name", AT_ONCE)
@pytest.mark.filterwarnings("ignore")
def test_raises_at_its_own_line(name: str, mode: str) -> None:
    expected = run(AT_ONCE[name], "eager")
    if name != "mse warning shapes":
        assert expected.error is not None, f"eager returns {expected.value}"
    line: list[bool] = []

    def program() -> Any:
        good = f(3) + 5
        try:
            AT_ONCE[name]()
        except Exception:
            line.append(True)
            assert good.tolist() == [7.0, 7.0, 7.0]
            raise
        line.append(False)

    actual = run(program, mode)
    same_error(expected.error, actual.error)
    assert line == [expected.error is not None], "raised after the op's line"


def idx(*values: int) -> torch.Tensor:
    return torch.tensor(values) + 0


AT_SYNC: dict[str, Callable[[], Any]] = {
    "index": lambda: f(3)[idx(1, 5)],
    "index negative": lambda: f(3)[idx(-4)],
    "index two": lambda: f(3, 3)[idx(0, 1), idx(0, 3)],
    "index_put": lambda: f(3).index_put((idx(3),), f(1)),
    "index_put_": lambda: f(3).index_put_((idx(3),), f(1)),
    "setitem": lambda: _set(f(3), idx(7)),
    "index_put accumulate": lambda: f(3).index_put_((idx(3),), f(1), accumulate=True),
    "gather": lambda: f(3, 3).gather(1, idx(0, 3).view(1, 2)),
    "gather negative": lambda: f(3).gather(0, idx(-1)),
    "scatter": lambda: f(3).scatter(0, idx(3), 1.0),
    "scatter_": lambda: f(3).scatter_(0, idx(3), f(1)),
    "scatter_add": lambda: f(3).scatter_add(0, idx(4), f(1)),
    "scatter_reduce": lambda: f(3).scatter_reduce(0, idx(4), f(1), "amax"),
    "embedding": lambda: F.embedding(idx(0, 9), f(4, 2)),
    "embedding negative": lambda: F.embedding(idx(-1), f(4, 2)),
    "embedding_bag": lambda: F.embedding_bag(idx(0, 9), f(4, 2), idx(0)),
    "take": lambda: f(3).take(idx(5)),
    "take_along_dim": lambda: f(3).take_along_dim(idx(5)),
    "put_": lambda: f(3).put_(idx(5), f(1)),
    "index_select": lambda: f(3, 2).index_select(0, idx(3)),
    "index_select negative": lambda: f(3, 2).index_select(0, idx(-1)),
    "index_add_": lambda: f(3).index_add_(0, idx(3), f(1)),
    "index_copy_": lambda: f(3).index_copy_(0, idx(3), f(1)),
    "index_fill_": lambda: f(3).index_fill_(0, idx(3), 1.0),
    "nll_loss": lambda: F.nll_loss(f(2, 3), idx(0, 3)),
    "cross_entropy": lambda: F.cross_entropy(f(2, 3), idx(0, -1)),
    "cross_entropy 2d": lambda: F.cross_entropy(f(1, 3, 2, 2), idx(0, 1, 2, 3).view(1, 2, 2)),
    "one_hot": lambda: F.one_hot(idx(3), 2),
    "one_hot negative": lambda: F.one_hot(idx(-1), 2),
    "cholesky": lambda: torch.linalg.cholesky(-torch.eye(2) * 1),
    "inverse": lambda: torch.linalg.inv(torch.zeros(2, 2) + 0),
    "solve": lambda: torch.linalg.solve(torch.zeros(2, 2) + 0, f(2)),
    "int divided by zero": lambda: idx(4) // idx(0),
    "int divided by zero number": lambda: idx(4) // 0,
    "int remainder zero": lambda: idx(4) % idx(0),
    "int fmod zero": lambda: torch.fmod(idx(4), idx(0)),
    "int div trunc zero": lambda: torch.div(idx(4), idx(0), rounding_mode="trunc"),
    "in-place int divided by zero": lambda: idx(4).floor_divide_(idx(0)),
    "bce range": lambda: F.binary_cross_entropy(f(2), f(2)),
    "multinomial": lambda: torch.multinomial(-f(3), 1),
    "bernoulli": lambda: torch.bernoulli(f(3)),
    "bincount negative": lambda: torch.bincount(idx(-1)),
    "masked_scatter": lambda: torch.zeros(3).masked_scatter(f(3) > 0, f(1)),
    "repeat_interleave": lambda: f(2).repeat_interleave(idx(-1, 1)),
    "quantile": lambda: torch.quantile(f(3), f(1)),
    "histc": lambda: torch.histc(f(3) * float("inf")),
    "assert_async": lambda: torch._assert_async((f(1) > 5).all()),
    "unpool": lambda: F.max_unpool2d(f(1, 1, 1, 1), idx(99).view(1, 1, 1, 1), 2),
    "tensor to index": lambda: [1, 2, 3][idx(5)],
    "ctc": lambda: F.ctc_loss(f(4, 1, 3), idx(1, 2).view(1, 2), idx(9), idx(2)),
    "poisson": lambda: torch.poisson(-f(2)),
    "normal std": lambda: torch.normal(f(2), -f(2)),
    "binomial": lambda: torch.binomial(-f(2), f(2) / 4),
    "pow of ints": lambda: torch.pow(idx(2), idx(-1)),
    "arange of pending": lambda: torch.arange(int(idx(3)), 0),
    "equal shapes": lambda: torch.testing.assert_close(f(2), f(2) + 1),
    "cdist": lambda: torch.linalg.eigh(f(2, 2) * float("nan")),
    "svd": lambda: torch.linalg.svd(f(2, 2) * float("nan")),
    "cholesky batch": lambda: torch.linalg.cholesky(-f(40, 1, 1)),
    "cholesky_ex": lambda: torch.linalg.cholesky_ex(-f(3, 1, 1), check_errors=True),
    "old cholesky": lambda: torch.cholesky(-f(1, 1)),
    "old cholesky batch": lambda: torch.cholesky(-f(40, 1, 1)),
    "lu_unpack": lambda: torch.lu_unpack(f(2, 2), idx(5, 9).int()),
    "lu_solve high": lambda: torch.linalg.lu_solve(f(2, 2), idx(5, 9).int(), f(2, 1)),
    "lu_solve low": lambda: torch.linalg.lu_solve(f(2, 2), idx(0, 1).int(), f(2, 1)),
    "cholesky_inverse": lambda: torch.cholesky_inverse(torch.zeros(2, 2) + 0),
    "cholesky_inverse batch": lambda: torch.cholesky_inverse(torch.zeros(3, 1, 1) + 0),
    "multi_margin": lambda: F.multi_margin_loss(f(2, 3), idx(0, 7)),
    "multilabel_margin": lambda: F.multilabel_margin_loss(f(1, 3), idx(0, 1, 7).view(1, 3)),
    "segment_reduce": lambda: torch.segment_reduce(f(4), "sum", lengths=idx(1, 9)),
    "searchsorted": lambda: torch.searchsorted(f(3), f(1), sorter=idx(0, 1, 9)),
    "masked_fill number": lambda: idx(3).int().masked_fill(idx(1) > 0, 2**40),
    "pad number": lambda: F.pad(idx(3).int(), (1, 1), value=2**40),
    "repeat_interleave size": lambda: f(2).repeat_interleave(idx(1, 2), output_size=9),
}


def _set(t: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    t[index] = 1.0
    return t


# The same ops on the same shapes and dtypes with values that eager accepts.
GOES_WELL: dict[str, Callable[[], Any]] = {
    "index": lambda: f(3)[idx(1, 2)],
    "index negative": lambda: f(3)[idx(-3)],
    "index two": lambda: f(3, 3)[idx(0, 1), idx(0, 2)],
    "index_put": lambda: f(3).index_put((idx(2),), f(1)),
    "index_put_": lambda: f(3).index_put_((idx(2),), f(1)),
    "setitem": lambda: _set(f(3), idx(2)),
    "index_put accumulate": lambda: f(3).index_put_((idx(2),), f(1), accumulate=True),
    "gather": lambda: f(3, 3).gather(1, idx(0, 2).view(1, 2)),
    "gather negative": lambda: f(3).gather(0, idx(1)),
    "scatter": lambda: f(3).scatter(0, idx(2), 1.0),
    "scatter_": lambda: f(3).scatter_(0, idx(2), f(1)),
    "scatter_add": lambda: f(3).scatter_add(0, idx(2), f(1)),
    "scatter_reduce": lambda: f(3).scatter_reduce(0, idx(2), f(1), "amax"),
    "embedding": lambda: F.embedding(idx(0, 3), f(4, 2)),
    "embedding negative": lambda: F.embedding(idx(1), f(4, 2)),
    "embedding_bag": lambda: F.embedding_bag(idx(0, 3), f(4, 2), idx(0)),
    "take": lambda: f(3).take(idx(2)),
    "take_along_dim": lambda: f(3).take_along_dim(idx(2)),
    "put_": lambda: f(3).put_(idx(2), f(1)),
    "index_select": lambda: f(3, 2).index_select(0, idx(2)),
    "index_select negative": lambda: f(3, 2).index_select(0, idx(1)),
    "index_add_": lambda: f(3).index_add_(0, idx(2), f(1)),
    "index_copy_": lambda: f(3).index_copy_(0, idx(2), f(1)),
    "index_fill_": lambda: f(3).index_fill_(0, idx(2), 1.0),
    "nll_loss": lambda: F.nll_loss(f(2, 3), idx(0, 2)),
    "cross_entropy": lambda: F.cross_entropy(f(2, 3), idx(0, 1)),
    "cross_entropy 2d": lambda: F.cross_entropy(f(1, 3, 2, 2), idx(0, 1, 2, 0).view(1, 2, 2)),
    "one_hot": lambda: F.one_hot(idx(1), 2),
    "one_hot negative": lambda: F.one_hot(idx(1)),
    "cholesky": lambda: torch.linalg.cholesky(torch.eye(2) * 1),
    "inverse": lambda: torch.linalg.inv(torch.eye(2) + 0),
    "solve": lambda: torch.linalg.solve(torch.eye(2) + 0, f(2)),
    "int divided by zero": lambda: idx(4) // idx(1),
    "int divided by zero number": lambda: idx(4) // 2,
    "int remainder zero": lambda: idx(4) % idx(3),
    "int fmod zero": lambda: torch.fmod(idx(4), idx(3)),
    "int div trunc zero": lambda: torch.div(idx(4), idx(3), rounding_mode="trunc"),
    "in-place int divided by zero": lambda: idx(4).floor_divide_(idx(3)),
    "bce range": lambda: F.binary_cross_entropy(f(2) / 4, f(2) / 4),
    "multinomial": lambda: torch.multinomial(f(3), 1),
    "bernoulli": lambda: torch.bernoulli(f(3) / 2),
    "bincount negative": lambda: torch.bincount(idx(1)),
    "masked_scatter": lambda: torch.zeros(3).masked_scatter(f(3) > 2, f(1)),
    "repeat_interleave": lambda: f(2).repeat_interleave(idx(1, 1)),
    "quantile": lambda: torch.quantile(f(3), f(1) / 4),
    "histc": lambda: torch.histc(f(3) * 1.0),
    "assert_async": lambda: torch._assert_async((f(1) > 1).all()),
    "unpool": lambda: F.max_unpool2d(f(1, 1, 1, 1), idx(3).view(1, 1, 1, 1), 2),
    "tensor to index": lambda: [1, 2, 3][idx(1)],
    "ctc": lambda: F.ctc_loss(f(4, 1, 3), idx(1, 2).view(1, 2), idx(4), idx(2)),
    "poisson": lambda: torch.poisson(f(2)),
    "normal std": lambda: torch.normal(f(2), f(2)),
    "binomial": lambda: torch.binomial(f(2), f(2) / 4),
    "pow of ints": lambda: torch.pow(idx(2), idx(1)),
    "arange of pending": lambda: torch.arange(int(idx(0)), 3),
    "equal shapes": lambda: torch.testing.assert_close(f(2), f(2) + 0),
    "cdist": lambda: torch.linalg.eigh(f(2, 2) * 1.0),
    "svd": lambda: torch.linalg.svd(f(2, 2) * 1.0),
    "cholesky batch": lambda: torch.linalg.cholesky(f(40, 1, 1)),
    "cholesky_ex": lambda: torch.linalg.cholesky_ex(f(3, 1, 1), check_errors=True),
    "old cholesky": lambda: torch.cholesky(f(1, 1)),
    "old cholesky batch": lambda: torch.cholesky(f(40, 1, 1)),
    "lu_unpack": lambda: torch.lu_unpack(f(2, 2), idx(1, 2).int()),
    "lu_solve high": lambda: torch.linalg.lu_solve(f(2, 2), idx(1, 2).int(), f(2, 1)),
    "lu_solve low": lambda: torch.linalg.lu_solve(f(2, 2), idx(1, 2).int(), f(2, 1)),
    "cholesky_inverse": lambda: torch.cholesky_inverse(torch.eye(2) + 0),
    "cholesky_inverse batch": lambda: torch.cholesky_inverse(torch.ones(3, 1, 1) + 0),
    "multi_margin": lambda: F.multi_margin_loss(f(2, 3), idx(0, 2)),
    "multilabel_margin": lambda: F.multilabel_margin_loss(f(1, 3), idx(0, 1, 2).view(1, 3)),
    "segment_reduce": lambda: torch.segment_reduce(f(4), "sum", lengths=idx(1, 3)),
    "searchsorted": lambda: torch.searchsorted(f(3), f(1), sorter=idx(0, 1, 2)),
    "masked_fill number": lambda: idx(3).int().masked_fill(idx(1) > 0, 2**4),
    "pad number": lambda: F.pad(idx(3).int(), (1, 1), value=2**4),
    "repeat_interleave size": lambda: f(2).repeat_interleave(idx(4, 5), output_size=9),
}


@pytest.fixture
def newborn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process has learned of single calls from those before: nothing."""
    monkeypatch.setattr(load, "ISLANDS", {})
    monkeypatch.setattr(plan, "CHECKING", set())


@pytest.mark.parametrize("name", AT_SYNC)
@pytest.mark.filterwarnings("ignore")
def test_raises_at_the_next_sync_at_the_latest(name: str, mode: str) -> None:
    expected = run(AT_SYNC[name], "eager")

    def program() -> Any:
        good = f(3) + 5
        result = AT_SYNC[name]()
        other = f(3) + 6
        try:
            sync()
        except Exception:
            assert good.tolist() == [7.0, 7.0, 7.0] and other.tolist() == [8.0, 8.0, 8.0]
            raise
        return result

    same_error(expected.error, run(program, mode).error)


@pytest.mark.parametrize("name", AT_SYNC)
@pytest.mark.filterwarnings("ignore")
def test_raises_though_nobody_reads_the_result(name: str, mode: str, newborn: None) -> None:
    expected = run(AT_SYNC[name], "eager")

    def program() -> None:
        AT_SYNC[name]()

    same_error(expected.error, run(program, mode).error)


@pytest.mark.parametrize("name", AT_SYNC)
@pytest.mark.parametrize("read", [True, False], ids=["read", "unread"])
@pytest.mark.filterwarnings("ignore")
def test_raises_after_the_same_ops_went_well(name: str, read: bool, mode: str, newborn: None) -> None:
    def once(table: dict[str, Callable[[], Any]]) -> Callable[[], Any]:
        def program() -> Any:
            result = table[name]()
            return result if read else None

        return program

    good, bad = run(once(GOES_WELL), "eager"), run(once(AT_SYNC), "eager")
    assert good.error is None, f"eager refuses the good values: {good.error}"
    for table, expected in ((GOES_WELL, good), (GOES_WELL, good), (AT_SYNC, bad), (AT_SYNC, bad), (GOES_WELL, good)):
        actual = run(once(table), mode)
        same_error(expected.error, actual.error)
        compare(expected.value, actual.value, versions=False)


@pytest.mark.parametrize("name", ["index", "gather", "embedding", "index_select", "scatter_", "index_put_", "nll_loss"])
def test_names_the_line_and_the_op(name: str, mode: str) -> None:
    code = AT_SYNC[name].__code__
    if name == "setitem":
        code = _set.__code__
    kind = type(run(AT_SYNC[name], "eager").error)
    with pytest.raises(kind) as caught, fused_eager(mode=mode):
        result = AT_SYNC[name]()
        sync()
        del result
    at_its_line = any(entry.frame.code.raw is code for entry in caught.traceback)
    assert at_its_line or f"{code.co_filename}:{code.co_firstlineno}" in str(caught.value)


def test_two_independent_failures_are_both_told(mode: str) -> None:
    with fused_eager(mode=mode):
        w = f(4, 2)
        told = 0
        results = []
        for bad in (9, 8):
            try:
                results.append(F.embedding(idx(bad), w))
            except IndexError:
                told += 1
        for r in results:
            try:
                r.tolist()
                raise AssertionError("unwritten or clamped memory was read")
            except (IndexError, LostValue):
                told += 1
        good = w + 1
        assert told == 2 and good.tolist() == [[3.0, 3.0]] * 4


def test_two_failures_in_different_flushes_are_both_told(mode: str) -> None:
    with fused_eager(mode=mode):
        w = f(4, 2)
        sync()
        results = []
        for bad in (9, 8):
            try:
                results.append(torch.gather(w, 0, idx(bad, bad).view(1, 2)))
                (w + 1).data_ptr()
            except (IndexError, RuntimeError):
                pass
        for r in results:
            with pytest.raises((IndexError, RuntimeError)):
                r.tolist()


def test_what_depends_on_a_failure_is_lost_and_says_why(mode: str) -> None:
    with fused_eager(mode=mode):
        w = f(4, 2)
        try:
            bad = F.embedding(idx(9), w)
            after = (bad + 1).relu()
            sync()
        except IndexError:
            pass
        else:
            raise AssertionError("no IndexError")
        if mode != "debug":
            with pytest.raises((LostValue, IndexError), match="out of range"):
                after.tolist()
            with pytest.raises((LostValue, IndexError), match="out of range"):
                (after * 2).sum().item()
        assert (w * 2).sum().item() == 32.0
    assert w.tolist() == [[2.0, 2.0]] * 4


def test_a_failed_write_leaves_the_old_value(mode: str) -> None:
    with fused_eager(mode=mode):
        x = torch.empty(3000).fill_(1.0)
        sync()
        try:
            x.add_(1)
            x.index_fill_(0, idx(5000), 3.0)
            x.mul_(2)
            sync()
        except IndexError:
            pass
        else:
            raise AssertionError("no IndexError")
        try:
            values = set(x.tolist())
        except LostValue:
            return
        # eager: [2]; anything that x held before or after a whole op is a state that the program went through
        assert values in ({1.0}, {2.0}), values


def test_a_failed_island_leaves_memory_as_it_was(mode: str) -> None:
    with fused_eager(mode=mode):
        x = torch.empty(3000).fill_(1.0)
        sync()
        try:
            x.add_(1)
            y = torch.linalg.cholesky(-torch.eye(2) * x[0])
            x.mul_(y.sum())
            sync()
        except torch.linalg.LinAlgError:
            pass
        else:
            raise AssertionError("no LinAlgError")
        try:
            values = set(x.tolist())
        except LostValue:
            return
        assert values in ({1.0}, {2.0}), values


def test_an_island_that_fails_spares_the_others(mode: str) -> None:
    with fused_eager(mode=mode):
        a = f(3)
        try:
            bad = torch.bucketize(a, idx(3, 1, 2).float().view(3, 1))
            del bad
        except RuntimeError:
            pass
        first = torch.bucketize(a, f(3))
        try:
            f(2, 2).put_(idx(50), f(1))
            sync()
        except IndexError:
            pass
        second = torch.bucketize(a, f(3))
        assert first.tolist() == [0, 0, 0] and second.tolist() == [0, 0, 0]


def test_values_left_by_an_index_error_are_never_clamped(mode: str) -> None:
    with fused_eager(mode=mode):
        t = torch.arange(4.0)
        try:
            r = t.index_select(0, idx(4))
        except (IndexError, RuntimeError):
            return
        with pytest.raises((IndexError, RuntimeError)):
            r.tolist()
        with pytest.raises((IndexError, RuntimeError)):
            r.tolist()


def test_error_before_the_exit_is_not_raised_twice(mode: str) -> None:
    with fused_eager(mode=mode):
        try:
            F.embedding(idx(9), f(4, 2))
            sync()
        except IndexError:
            pass
        x = f(2)
    assert x.tolist() == [2.0, 2.0]


def test_error_at_exit_comes_out_of_the_with(mode: str) -> None:
    good = None
    with pytest.raises(IndexError), fused_eager(mode=mode):
        good = f(2) + 1
        _ = F.embedding(idx(9), f(4, 2))
    assert good is not None and good.tolist() == [3.0, 3.0]
    with fused_eager(mode=mode):
        assert (f(2) + 1).tolist() == [3.0, 3.0]


def test_checks_can_be_switched_off() -> None:
    with fused_eager(mode="fused", check_bounds=False):
        assert F.embedding(idx(1), f(4, 2)).tolist() == [[2.0, 2.0]]


def test_recursion_error_is_the_users(mode: str) -> None:
    def deep(t: torch.Tensor, n: int) -> torch.Tensor:
        return deep(t + 1, n + 1)

    with fused_eager(mode=mode):
        x = f(2)
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(400)
        try:
            with pytest.raises(RecursionError):
                deep(x, 0)
        finally:
            sys.setrecursionlimit(limit)
        assert (x + 1).tolist() == [3.0, 3.0]
