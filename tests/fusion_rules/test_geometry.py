"""Strided views as XLA expressions: any view of a view reads and writes what torch does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from fused_eager.fusion_rules.geometry import (
    Geometry,
    home_shape,
    is_dense,
    overlaps_itself,
    plan_view,
    read,
    reinterpret,
    write,
)
from fused_eager.fusion_rules.spec import JAX_DTYPE, Spec, contiguous_strides
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_eager.xla import enable_x64

SHAPES = [(2, 3, 4), (5, 6), (4, 4, 4), (2, 3, 4, 5), (7,), (1, 8), (3, 1, 2)]


KINDS = ["permute", "narrow", "select", "step", "unsqueeze", "flatten", "diagonal", "unfold", "expand", "squeeze"]


@st.composite
def views(draw: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A contiguous base, and a view of a view of ... it."""
    shape = draw(st.sampled_from(SHAPES))
    base = torch.arange(float(np.prod(shape))).view(shape)
    t = base
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(KINDS))
        d = draw(st.integers(0, max(t.dim() - 1, 0)))
        if t.dim() == 0 and kind != "unsqueeze":
            continue
        if kind == "permute":
            t = t.permute(draw(st.permutations(range(t.dim()))))
        elif kind == "narrow":
            start = draw(st.integers(0, t.shape[d]))
            t = t.narrow(d, start, draw(st.integers(0, t.shape[d] - start)))
        elif kind == "select" and t.shape[d]:
            t = t.select(d, draw(st.integers(0, t.shape[d] - 1)))
        elif kind == "step":
            t = t.transpose(0, d)[draw(st.integers(0, 2)) :: draw(st.integers(1, 3))].transpose(0, d)
        elif kind == "unsqueeze":
            t = t.unsqueeze(draw(st.integers(0, t.dim())))
        elif kind == "flatten" and t.is_contiguous():
            t = t.view(-1)
        elif kind == "diagonal" and t.dim() >= 2:
            t = t.diagonal(draw(st.integers(-1, 1)))
        elif kind == "unfold" and t.shape[d] >= 2:
            t = t.unfold(d, 2, draw(st.integers(1, 2)))
        elif kind == "expand" and t.shape[d] == 1:
            t = t.expand([3 if i == d else n for i, n in enumerate(t.shape)])
        elif kind == "squeeze":
            t = t.squeeze()
    return base, t


@st.composite
def strided(draw: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A flat base, and whatever `as_strided` makes of it."""
    size = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    stride = tuple(draw(st.integers(0, 9)) for _ in size)
    offset = draw(st.integers(0, 5))
    reach = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True) if n) + 1
    base = torch.arange(float(reach + draw(st.integers(0, 7))))
    return base, base.as_strided(size, stride, offset)


def geometry_of(t: torch.Tensor) -> Geometry:
    return Geometry(tuple(t.shape), t.stride(), t.storage_offset(), t.dtype, t.is_conj(), t.is_neg())


def check_read(base: torch.Tensor, t: torch.Tensor) -> None:
    out = np.asarray(jax.jit(lambda home: read(home, geometry_of(t)))(base.numpy()))
    assert out.shape == tuple(t.shape) and (out == t.numpy()).all()


def check_write(base: torch.Tensor, t: torch.Tensor) -> None:
    if overlaps_itself(tuple(t.shape), t.stride()):
        return
    values = -1 - torch.arange(float(t.numel())).view(t.shape)
    out = np.asarray(jax.jit(lambda home, new: write(home, geometry_of(t), new))(base.numpy(), values.numpy()))
    t.copy_(values)
    assert out.shape == tuple(base.shape) and (out == base.numpy()).all()


@given(views() | strided())
@settings(max_examples=25, deadline=None)
def test_reads_and_writes_are_torch_s(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    with enable_x64(True):
        check_read(*case)
        check_write(*case)


@given(views() | strided())
@settings(max_examples=150, deadline=None)
def test_overlap_is_never_missed(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    base, t = case
    index = torch.arange(base.numel()).as_strided(t.shape, t.stride(), t.storage_offset())
    distinct = index.unique().numel() == index.numel()
    assert distinct or overlaps_itself(tuple(t.shape), t.stride())


@given(views() | strided())
@settings(max_examples=150, deadline=None)
def test_dense_means_one_gapless_block(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    base, t = case
    index = torch.arange(base.numel()).as_strided(t.shape, t.stride(), t.storage_offset()).unique()
    gapless = index.numel() == t.numel() and (t.numel() == 0 or index[-1] - index[0] + 1 == t.numel())
    assert is_dense(tuple(t.shape), t.stride()) == gapless


@pytest.mark.parametrize("seed", range(20))
def test_slices_and_transposes_take_no_gather(seed: int) -> None:
    rng = np.random.default_rng(seed)
    t = torch.zeros(4, 6, 8).permute(*rng.permutation(3).tolist())
    t = t[tuple(slice(int(rng.integers(0, 3)), None) for _ in range(3))]
    assert plan_view(192, tuple(t.shape), t.stride(), t.storage_offset()).factors is not None


@pytest.mark.parametrize(
    ("cut", "box"),
    [
        (lambda t: t[:, 1:].unflatten(1, (7, 7)).permute(0, 3, 1, 2), (16, 49, 8)),  # a vision transformer's tokens
        (lambda t: t[:, :48].unflatten(1, (2, 3, 8))[..., 1:], (16, 48, 7)),
        (lambda t: t[2:, :49].unflatten(1, (7, 7)).unflatten(0, (2, 7)), (14, 49, 8)),
        (lambda t: t[:, 1:].unflatten(1, (7, 7))[:, :, 2:5], None),
    ],
)
def test_a_part_of_a_dimension_that_became_several_takes_no_gather(cut: Any, box: tuple[int, ...] | None) -> None:
    base = torch.arange(16.0 * 50 * 8).reshape(16, 50, 8)
    t = cut(base)
    g = Geometry(tuple(t.shape), t.stride(), t.storage_offset(), t.dtype)
    plan = plan_view(base.numel(), *g[:3])
    assert (plan.extents[:-1] if plan.factors is not None else None) == box
    assert np.array_equal(read(jnp.asarray(base.numpy()), g), t.numpy())
    written = base.clone()
    cut(written).fill_(-1)
    assert np.array_equal(write(jnp.asarray(base.numpy()), g, jnp.full(t.shape, -1.0)), written.numpy())


@pytest.mark.parametrize("dtype", [d for d in JAX_DTYPE if d is not torch.bool], ids=str)
def test_bytes_reinterpret_as_torch_does(dtype: torch.dtype) -> None:
    raw = torch.arange(16, dtype=torch.uint8) + 60
    with enable_x64(True):
        typed = reinterpret(jnp.asarray(raw.numpy()), dtype)
        assert typed.dtype == JAX_DTYPE[dtype] and typed.size == 16 // dtype.itemsize
        assert np.asarray(reinterpret(typed, torch.uint8)).tolist() == raw.tolist()
    assert np.asarray(typed).tobytes() == raw.numpy().tobytes()


def test_lazy_bits_are_read_and_written_back() -> None:
    base = torch.tensor([1 + 2j, 3 - 4j, 5 + 0j])
    with enable_x64(True):
        home = jnp.asarray(base.numpy())
        for view in (base.conj(), base.imag, base.conj().imag, torch._neg_view(base[1:])):
            out = read(home, geometry_of(view))
            assert np.asarray(out).tolist() == view.tolist()
            assert np.asarray(write(home, geometry_of(view), out)).tolist() == base.tolist()


def test_homes_lie_in_memory_order() -> None:
    t = torch.empty(2, 3, 1, 4).permute(3, 2, 0, 1)
    spec = Spec(tuple(t.shape), t.dtype, t.stride(), t.device)
    assert home_shape(spec) == (2, 3, 4)
    assert contiguous_strides((2, 0, 3)) == torch.empty(2, 0, 3).stride()


def test_matrices_that_lie_by_columns_are_known() -> None:
    x = torch.empty(6, 8)
    columns = [x.t(), x[:, 2:5].t(), x[::2].t()]
    rows = [x, x[:, :3], x[0], x[0].expand(3, 8).t(), x.t()[:1], x[None].mT]
    for view in (*columns, *rows):
        geometry = Geometry(tuple(view.shape), view.stride(), view.storage_offset(), view.dtype)
        assert geometry.is_by_columns is any(view is each for each in columns), geometry
