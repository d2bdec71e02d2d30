"""Views, in-place writes and aliasing: exactly as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fused_eager import sync

from .programs import check, compilations, run

Program = Callable[[], Any]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def base(n: int = 24) -> torch.Tensor:
    return torch.arange(float(n))


def native(n: int = 24) -> torch.Tensor:
    t = torch.empty(n).copy_(torch.arange(float(n)))
    sync()
    return t


@program
def views_of_views() -> Any:
    x = base()
    v = x.view(4, 6)[1:, ::2].t()
    w = v[1:].unsqueeze(0).expand(2, -1, -1)
    x.add_(1)
    v.mul_(2)
    return x, v, w, w.sum()


@program
def what_an_observer_keeps_is_laid_out_anew() -> Any:
    """Its schema says that it writes these, and nobody says that it resizes them."""
    low, high, on = torch.tensor([]), torch.tensor([]), torch.tensor([1])
    scale, zero, seen = torch.tensor([1.0]), torch.tensor([0], dtype=torch.int32), []
    for i in range(1, 4):
        x = base(6).view(2, 3) * i - 0.5
        y = torch.fused_moving_avg_obs_fake_quant(x, on, on, low, high, scale, zero, 0.1, -128, 127, 0, True, True)
        seen.append((y, low.clone(), high * 2, scale + 1, zero.clone()))
    return seen, low, high, scale, zero


@program
def write_through_view_of_native() -> Any:
    x = native()
    v = x.view(4, 6).t()[2:4]
    v.add_(100)
    return x, v, x.view(2, 12)


@program
def write_through_every_third() -> Any:
    x = native()
    x[::3] = -1
    x[1::3] += 5
    return x, x[::3]


@program
def read_base_write_view_alternating() -> Any:
    x = base()
    out = []
    for i in range(4):
        x[i * 2 : i * 2 + 3] *= i + 1
        out.append(x.sum())
        x.view(6, 4)[:, i] = x.view(6, 4)[:, 3 - i]
    return out, x


@program
def diagonal() -> Any:
    x = base(16).view(4, 4)
    x.diagonal().zero_()
    torch.diagonal(x, 1).add_(7)
    x.fill_diagonal_(3.0)
    return x, x.diagonal(-1)


@program
def overlapping_reads() -> Any:
    x = base(8)
    windows = x.unfold(0, 3, 1)
    strided = x.as_strided((4, 3), (1, 1))
    x.add_(1)
    return windows * 1, strided + 1, windows, x.as_strided((3, 2), (2, 3), 1).sum(1)


@program
def overlapping_reads_of_native() -> Any:
    x = native(8)
    return x.as_strided((4, 3), (1, 1)) * 2, x.unfold(0, 4, 2).sum(-1), x.as_strided((2, 2), (0, 1), 3) + 1


@program
def as_strided_of_a_view_counts_from_the_storage() -> Any:
    x = base(12)
    v = x[4:]
    return v.as_strided((2, 2), (2, 1)) * 1, v.as_strided((2,), (1,), 0) + 1


@program
def as_strided_scatter() -> Any:
    x = base(12)
    return torch.as_strided_scatter(x, torch.zeros(2, 2), (2, 2), (3, 1), 1), torch.select_scatter(
        x, torch.tensor(9.0), 0, 3
    )


@program
def expanded_write_refused() -> Any:
    x = torch.zeros(1, 3).expand(4, 3)
    return x.add_(1)


@program
def expanded_copy_refused() -> Any:
    x = native(3).expand(4, 3)
    x.copy_(torch.ones(4, 3))


@program
def expanded_assignment_refused() -> Any:
    x = torch.zeros(3, 1).expand(3, 4)
    x[:, 1:] = 5


@program
def expanded_out_refused() -> Any:
    x = torch.zeros(1).expand(4)
    return torch.add(base(4), 1, out=x)


@program
def overlapping_write_refused() -> Any:
    base(8).as_strided((3, 3), (1, 1)).mul_(2)


@program
def partial_overlap_refused() -> Any:
    x = base(8)
    x[1:].add_(x[:-1])


@program
def partial_overlap_of_native_refused() -> Any:
    x = native(8)
    x[1:].mul_(x[:-1])


@program
def partial_overlap_out_refused() -> Any:
    x = base(8)
    return torch.add(x[:4], x[2:6], out=x[1:5])


@program
def transposed_self_refused() -> Any:
    x = base(9).view(3, 3)
    return x.add_(x.t())


@program
def overlapping_copy() -> Any:
    x = base(8)
    x[1:].copy_(x[:-1].clone())
    return x


@program
def in_place_with_itself() -> Any:
    x = base(8)
    x.add_(x).mul_(x)
    x.sub_(x[0]).copy_(x)
    return x


@program
def out_same_as_input() -> Any:
    x = base(8)
    y = torch.mul(x, 2, out=x)
    return x, y is x


@program
def sums_with_products_are_written_over_the_sum() -> Any:
    a, b, found = base(12).view(3, 4), base(20).view(4, 5), [base(15).view(3, 5) for _ in range(3)]
    for _ in range(2):
        torch.addmm(found[0], a, b, beta=0.5, alpha=2, out=found[0])
        torch.addbmm(found[1], a.expand(2, 3, 4), b.expand(2, 4, 5), out=found[1])
        torch.addr(found[2], a[:, 0], b[0], out=found[2])
    found.append(torch.addmv(base(3), a, b[:, 0], out=base(3)))
    found.append(torch.baddbmm(base(30).view(2, 3, 5), a.expand(2, 3, 4), b.expand(2, 4, 5)))
    torch.baddbmm(found[-1], a.expand(2, 3, 4), b.expand(2, 4, 5), out=found[-1])
    # What is written is a factor as well, or another part of the same memory.
    x = base(32).view(2, 4, 4)
    torch.addmm(x[0], x[1], b[:, :4], out=x[0])
    return *found, x


@program
def a_sum_with_a_product_over_its_transpose_refused() -> Any:
    x = base(16).view(4, 4)
    return torch.addmm(x.t(), torch.eye(4), torch.eye(4), out=x)


@program
def out_fresh() -> Any:
    o = torch.empty(8)
    r = torch.add(base(8), 1, out=o)
    return o, r is o, o._version


@program
def out_resized_from_empty() -> Any:
    o = torch.empty(0)
    r = torch.add(base(8), 1, out=o)
    return o, r is o, o.storage_offset()


@program
def out_resized_pending() -> Any:
    o = torch.zeros(0) + 1
    torch.mul(base(8), 3, out=o)
    torch.mul(base(8).view(2, 4), 3, out=o)
    return o


@program
def out_resized_was_computed() -> Any:
    o = base(3) * 2
    torch.add(base(8), 1, out=o)
    return o


@program
def out_resized_was_settled() -> Any:
    o = base(3) * 2
    o.tolist()
    torch.add(base(8), 1, out=o)
    return o


@program
def out_resized_keeps_view() -> Any:
    o = base(3) * 2
    v = o[:2]
    torch.add(base(8), 1, out=o)
    return o, v


@program
def out_shrinks() -> Any:
    o = base(8) * 2
    torch.add(base(3), 1, out=o)
    return o


@program
def out_of_a_view() -> Any:
    x = native(8)
    torch.add(base(4), 10, out=x[2:6])
    torch.neg(base(4), out=x[::2])
    return x


@program
def out_other_dtype() -> Any:
    o = torch.zeros(4, dtype=torch.float64)
    torch.add(base(4), 1.1, out=o)
    return o


@program
def out_other_dtype_refused() -> Any:
    return torch.add(base(4), 1.1, out=torch.zeros(4, dtype=torch.int32))


@program
def out_two() -> Any:
    v, i = torch.empty(4), torch.empty(4, dtype=torch.int64)
    r = torch.max(base().view(4, 6), 1, out=(v, i))
    return v, i, r.values is v


@program
def out_two_resized() -> Any:
    v, i = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    torch.sort(base().view(4, 6), 1, descending=True, out=(v, i))
    return v, i


@program
def out_strided() -> Any:
    o = torch.zeros(6, 4).t()
    torch.mm(base().view(4, 6), torch.ones(6, 6), out=o)
    return o


@program
def out_with_grad_refused() -> Any:
    x = base(4).requires_grad_()
    return torch.add(x, 1, out=torch.empty(4))


@program
def data_swap() -> Any:
    p = torch.nn.Parameter(base(4))
    alias = p.data
    before = p + 1
    p.data = base(6) * 3
    alias.add_(1)
    return p, alias, before.detach(), p._version


@program
def data_swap_between_pending() -> Any:
    a, b = base(4) + 1, base(4) * 5
    a.data, b.data = b.data, a.data
    a.mul_(2)
    return a, b


@program
def data_write_leaves_the_version() -> Any:
    x = base(4)
    y = x * 2
    x.data.add_(1)
    return x, y, x._version


@program
def set_tensor() -> Any:
    a, b = base(4) + 1, base(8) * 2
    v = a[1:]
    a.set_(b)
    a.add_(1)
    return a, b, v


@program
def set_storage() -> Any:
    a, b = torch.empty(0), base(12) * 2
    a.set_(b.untyped_storage(), 2, (2, 3), (4, 1))
    b.add_(1)
    first = a * 1
    a.zero_()
    return a, b, first


@program
def set_to_nothing() -> Any:
    a = base(4) + 1
    v = a[:2]
    a.set_()
    return a, v


@program
def detach_shares() -> Any:
    x = base(4).requires_grad_()
    d = x.detach()
    d.add_(1)
    d[0] = 9
    return x, d, x._version


@program
def detach_inplace() -> Any:
    x = base(4).requires_grad_()
    y = x * 2
    y.detach_()
    y.add_(1)
    return y


@program
def resize_grow_and_shrink() -> Any:
    x = base(4) * 2
    x.resize_(2)
    first = x.clone()
    x.resize_(4)
    return first, x


@program
def resize_larger() -> Any:
    x = base(4) * 2
    x.resize_(10)
    x[4:] = 0
    return x, x.untyped_storage().nbytes()


@program
def resize_after_reading() -> Any:
    x = native(4)
    y = x + 1
    x.resize_(2000).fill_(3)
    return y, x


@program
def resize_as() -> Any:
    x = base(6) + 1
    x.resize_as_(torch.zeros(2, 3))
    return x


@program
def storage_resized_to_zero_and_back() -> Any:
    x = native(4)
    y = x + 1
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(16)
    x.fill_(7)
    return y, x


@program
def metadata_in_place() -> Any:
    x = base().view(4, 6) * 2
    x.t_()
    x.unsqueeze_(0)
    x.squeeze_()
    x.transpose_(0, 1)
    y = x.as_strided_((2, 3), (1, 2))
    x.add_(1)
    return x, y is x


@program
def squeeze_and_write() -> Any:
    x = base().view(4, 1, 6)
    x.squeeze(1)[2].zero_()
    x.movedim(0, -1).select(-1, 0).fill_(4)
    return x


@program
def split_and_write() -> Any:
    x = base()
    a, b, c = x.split([8, 8, 8])
    a.add_(b)
    c.copy_(a)
    rows = x.view(4, 6).unbind(0)
    rows[3].neg_()
    return x, a, b, c, rows


@program
def chunk_under_grad_write_refused() -> Any:
    x = base().requires_grad_()
    a, _ = (x * 2).chunk(2)
    a.add_(1)


@program
def index_put_forms() -> Any:
    x = base().view(4, 6)
    x[torch.tensor([0, 2])] = 5.0
    x[:, torch.tensor([1, 1])] += 1
    x[torch.tensor([True, False, False, True])] = -1
    x[1, [2, 3]] = torch.tensor([7.0, 8.0])
    x[..., 0] = x[..., 5]
    x.index_put_((torch.tensor([0, 0]), torch.tensor([1, 1])), torch.tensor([1.0, 2.0]), accumulate=True)
    return x


@program
def masked_writes() -> Any:
    x = base()
    x[x > 10] = 0
    x.masked_fill_(x == 3, -3)
    x.view(4, 6).masked_scatter_(torch.eye(4, 6, dtype=torch.bool), torch.full((4,), 9.0))
    return x


@program
def write_into_a_transposed_tensor() -> Any:
    x = torch.zeros(3, 5).t()
    x[1:3, 1:] = base(4).view(2, 2)
    x.add_(torch.arange(5.0).unsqueeze(1))
    return x, x.contiguous()


@program
def step_and_flip() -> Any:
    x = base(10)
    x[1:9:3].mul_(10)
    return x, x.flip(0), torch.roll(x, 2), x[::2].flip(0)


@program
def dtype_views() -> Any:
    x = base(4) - 1.5
    i = x.view(torch.int32)
    i.bitwise_and_(0x7FFFFFFF)
    return x, i, x.view(torch.uint8), x.view(torch.int16)[::2], x.view(torch.float64).view(torch.int64)


@program
def dtype_view_written_small() -> Any:
    x = native(4)
    x.view(torch.uint8)[3::4] = 0
    b = x.view(torch.int16)
    b[0] = 1
    return x, b


@program
def dtype_view_of_bool() -> Any:
    m = base(4) > 1
    u = m.view(torch.uint8)
    m[0] = True
    u[3] = 0
    return m, u


@program
def storage_with_an_odd_tail() -> Any:
    raw = torch.arange(10, dtype=torch.uint8)
    x = torch.empty(0, dtype=torch.int16).set_(raw.untyped_storage(), 0, (4,), (1,))
    y = torch.empty(0, dtype=torch.int32).set_(raw.untyped_storage(), 0, (2,), (1,))
    x.add_(1)
    y.mul_(2)
    return raw, x, y


@program
def complex_parts() -> Any:
    z = torch.complex(base(4), -base(4))
    r = torch.view_as_real(z)
    r[..., 0].add_(1)
    z.imag.mul_(2)
    z.real[1:] = 9
    return z, r, z.real, z.imag, torch.view_as_complex(r)


@program
def conjugate_views() -> Any:
    z = torch.complex(base(4), base(4) + 1)
    c = z.conj()
    c.mul_(2j)
    n = c.imag
    first = n * 1
    n.add_(1)
    return z, c, n, first, c.resolve_conj(), n.resolve_neg(), c.is_conj(), n.is_neg()


@program
def conjugate_copy_and_out() -> Any:
    z = torch.complex(base(4), base(4) + 1)
    o = torch.zeros(4, dtype=torch.complex64).conj()
    torch.mul(z.conj(), 1j, out=o)
    z.conj().copy_(o)
    return z, o, z.conj().clone(), z.conj() @ z, z.mH, z.conj().physical if hasattr(z, "physical") else 0


@program
def conjugate_matmul() -> Any:
    z = torch.complex(base(4), base(4) + 1).view(2, 2)
    return z.mH @ z, z.conj().t() + z, torch.view_as_real(z.conj().resolve_conj()), z.conj().sum(), z.conj().abs()


@program
def conjugate_view_as_real_refused() -> Any:
    return torch.view_as_real(torch.complex(base(4), base(4)).conj())


@program
def channels_last() -> Any:
    x = base(48).view(2, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    y = x * 2 + 1
    c = torch.nn.functional.conv2d(x, torch.ones(2, 2, 2, 2))
    z = torch.empty_like(x).copy_(y)
    b = torch.nn.functional.batch_norm(x, torch.zeros(2), torch.ones(2))
    return (
        x,
        y,
        c,
        z,
        y.sum(1),
        torch.nn.functional.max_pool2d(x, 2),
        b,
        torch.relu(x.permute(0, 2, 3, 1)),
        torch.cat([x, y], 1),
    )


@program
def strides_of_results() -> Any:
    x = base().view(2, 3, 4)
    t = x.permute(2, 0, 1)
    return (
        t + 1,
        t + x.reshape(4, 2, 3),
        t.sum(0),
        t.clone(),
        t.contiguous(),
        torch.empty_like(t).zero_(),
        t.float(),
        t.double(),
        torch.zeros_like(t),
        t.softmax(0),
        t[:, :, 1:] * 2,
        t.cumsum(1),
        t.flip(0),
        torch.where(t > 3, t, 0.0),
        x[:, ::2] + 1,
        x.expand(2, 2, 3, 4) * 2,
        t.matmul(x.transpose(0, 1)[:1].expand(4, 3, 4)),
        t.reshape(4, 6),
    )


@program
def zero_size() -> Any:
    e = torch.zeros(0, 3)
    e.add_(1)
    x = base(6).view(2, 3)
    return (
        e,
        e.sum(),
        e.sum(0),
        e.mean(),
        torch.cat([e, x]),
        x[2:],
        x[2:] + 1,
        e @ torch.ones(3, 2),
        e.prod(0),
        e.t() * 2,
        torch.ones(2, 0) @ torch.ones(0, 2),
        e.any(),
        e.all(),
        torch.stack([e, e]),
        e.view(3, 0),
        e.tolist(),
        torch.empty(0) + 1,
    )


@program
def zero_size_max_refused() -> Any:
    return (torch.zeros(0, 3) + 1).max(0)


@program
def zero_size_writes() -> Any:
    x = base(6)
    x[3:3] = 7
    x[3:3].add_(1)
    torch.add(x[:0], 1, out=x[6:])
    return x


@program
def zero_dim() -> Any:
    s = torch.tensor(3.0)
    s.add_(1)
    v = s.view(1)
    v.mul_(2)
    x = base(4)
    x[0] += s
    x[1].copy_(s)
    y = x[2]
    y.fill_(s)
    return s, v, x, y, s * x, s.expand(3), (s + torch.tensor(2, dtype=torch.int32)).dtype is torch.float32


@program
def tensor_factory_alias() -> Any:
    x = base(4)
    return (
        torch.as_tensor(x) is x,
        x.to(torch.float32) is x,
        x.contiguous() is x,
        x.reshape(4).data_ptr() == x.data_ptr(),
    )


@program
def reshape_view_or_copy() -> Any:
    x = base().view(4, 6)
    a, b = x.reshape(24), x.t().reshape(24)
    x.add_(1)
    a.mul_(2)
    b.zero_()
    return x, a, b, x.flatten(), x.t().flatten(), x.ravel()


@program
def pixel_through_many_views() -> Any:
    x = base()
    v = x.view(2, 3, 4)[1].t()[2].unsqueeze(0).expand(1, 3)[0][1:]
    v.sub_(50)
    return x, v


@program
def foreach_in_place() -> Any:
    a, b = base(4), base(4) * 2
    torch._foreach_add_([a, b], 1.5)
    torch._foreach_mul_([a, b], [2.0, 3.0])
    torch._foreach_addcdiv_([a, b], [a, a], [b + 1, b + 2], 0.5)
    torch._foreach_lerp_([a, b], [b, b], 0.25)
    return a, b, torch._foreach_norm([a, b]), torch._foreach_sqrt([a, b])


@program
def foreach_the_same_tensor_twice() -> Any:
    a = base(4)
    torch._foreach_add_([a, a], 1.0)
    return a


@program
def foreach_crossed() -> Any:
    a, b = base(4), base(4) * 2
    torch._foreach_add_([a, b], [b, a])
    return a, b


@program
def foreach_views_of_one_storage() -> Any:
    x = base(8)
    torch._foreach_mul_([x[:4], x[4:]], [2.0, 3.0])
    torch._foreach_add_([x[:4], x[2:6]], 1.0)
    return x


@program
def batch_norm_buffers() -> Any:
    torch.manual_seed(0)
    m = torch.nn.BatchNorm1d(3)
    x = torch.randn(5, 3)
    for _ in range(3):
        y = m(x)
    m.eval()
    return y, m(x), dict(m.named_buffers()), m.running_mean._version


@program
def swap_tensors() -> Any:
    a, b = base(4) + 1, base(4) * 2
    torch.utils.swap_tensors(a, b)
    a.add_(1)
    return a, b


@program
def swap_values_by_clone() -> Any:
    x = base(4)
    tmp = x[0].clone()
    x[0] = x[3]
    x[3] = tmp
    x[[1, 2]] = x[[2, 1]]
    return x


@program
def alias_by_view_as() -> Any:
    x = base(6)
    a = x.view_as(torch.zeros(2, 3))
    b = x.unflatten(0, (3, 2))
    a.add_(1)
    b.mul_(2)
    return x, a, b, torch.broadcast_tensors(x[:1], torch.zeros(3))[0]


@program
def write_after_death_of_the_base() -> Any:
    x = base(8) * 2
    v = x[2:5]
    del x
    v.add_(1)
    return v, v.untyped_storage().nbytes()


@program
def copy_between_dtypes() -> Any:
    x = torch.zeros(4, dtype=torch.int32)
    x.copy_(base(4) + 0.9)
    y = torch.zeros(4, dtype=torch.bool)
    y.copy_(base(4))
    z = torch.zeros(2, 4, dtype=torch.float64)
    z.copy_(base(4))
    return x, y, z


@program
def in_place_promotion_refused() -> Any:
    return torch.arange(4).add_(1.5)


@program
def in_place_shape_refused() -> Any:
    return base(4).add_(torch.zeros(2, 4))


@program
def in_place_chain_on_views_of_a_parameter() -> Any:
    p = torch.nn.Parameter(base(8))
    with torch.no_grad():
        p[:4].mul_(2)
        p.view(2, 4)[1].fill_(1)
        p.clamp_(max=4)
    return p, p._version


@program
def named() -> Any:
    x = torch.zeros(2, 3, names=("N", "C"))
    return (x + 1).names, x.sum("C").names, x.rename(None) + 1


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore")
def test_program(name: str, mode: str) -> None:
    check(PROGRAMS[name], mode)


def test_a_moving_slice_of_finished_memory_is_one_compilation() -> None:
    def sliced() -> Any:
        x = native(64)
        return [(x[i : i + 4] * 2).sum().item() for i in range(2, 12)]

    run(lambda: (native(64)[0:4] * 2).sum().item(), "fused")
    with compilations(at_most=3):
        check(sliced, "fused")


def test_a_moving_slice_of_a_computed_value_is_one_compilation() -> None:
    def sliced() -> Any:
        x = base(64) * 3
        return [(x[i : i + 4] * 2).sum().item() for i in range(2, 12)]

    with compilations(at_most=4):
        check(sliced, "fused")


def test_a_moving_write_is_one_compilation() -> None:
    def filled() -> Any:
        x = native(64)
        for i in range(10):
            x[i : i + 4] += 1
            x.sum().item()
        return x

    with compilations(at_most=4):
        check(filled, "fused")


def test_a_moving_index_is_one_compilation() -> None:
    def picked() -> Any:
        x = native(64)
        return [(x[i] * 2 + 1).item() for i in range(10)]

    with compilations(at_most=3):
        check(picked, "fused")
