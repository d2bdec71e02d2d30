"""Tensors of the device: made, moved, viewed, written, looked at raw, kept and loaded, as on any other device."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import nn

from fused_eager.frontends.device.doors import DOORS
from fused_eager.log.events import LOG

from .compare import TPU, check, same

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.complex32),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.float8_e4m3fn),
)


def grid() -> torch.Tensor:
    return torch.arange(6.0, device=TPU).reshape(2, 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_goes_there_and_back(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 0, 1, 1]).to(dtype)
    there = x.to(TPU)
    assert (there.device, there.dtype, there.shape) == (TPU, dtype, x.shape)
    assert there.cpu().view(torch.uint8).tolist() == x.view(torch.uint8).tolist()


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.tensor([[1, 2], [3, 4]], device=device),
        lambda device: torch.zeros(2, 3, device=device),
        lambda device: torch.full((2,), 3, device=device),
        lambda device: torch.arange(1, 9, 3, device=device),
        lambda device: torch.linspace(0, 1, 4, device=device),
        lambda device: torch.eye(3, device=device),
        lambda device: torch.scalar_tensor(2.5, device=device),
        lambda device: torch.ones(2, device=device).new_full((3,), 2.0),
        lambda device: torch.empty(2, 3, device=device).zero_(),
        lambda device: torch.empty(2, 3, 4, 4, device=device, memory_format=torch.channels_last).fill_(1),
        lambda device: torch.asarray([1.0, 2.0], device=device),
        lambda device: torch.kaiser_window(5, device=device, dtype=torch.float16),
    ],
)
def test_factories_make_what_they_make_on_the_cpu(make: Callable[[Any], torch.Tensor]) -> None:
    want, got = make("cpu"), make(TPU)
    assert (got.device, got.dtype, got.stride()) == (TPU, want.dtype, want.stride())
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("other", ["cpu", "meta", "tpu:1"])
def test_a_device_that_is_named_is_where_it_is_made(other: str) -> None:
    if other == "tpu:1" and torch.tpu.device_count() == 1:
        pytest.skip("one device")
    x = torch.ones(2, 3, device=TPU).t()
    for _ in range(3):  # followed or not
        torch.zeros_like(x), x.new_full((2,), 4.0)
    made = [
        *(torch.zeros_like(x, device=other), torch.ones_like(x, device=other), torch.full_like(x, 4.0, device=other)),
        *(x.new_zeros(2, device=other), x.new_ones(2, device=other), x.new_full((2,), 4.0, device=other)),
        torch.linspace(x[0, 0], 4, 3, device=other),
    ]
    assert [str(t.device) for t in made] == [other] * 7 and made[0].stride() == x.stride()
    if other != "meta":
        assert [t.sum().item() for t in made] == [0, 6, 24, 0, 2, 8, 7.5]
    assert torch.zeros_like(x).device == x.new_full((2,), 4.0).device == TPU


def test_a_device_that_is_not_there_is_refused_in_words() -> None:
    for call in (lambda: torch.ones(1).to("tpu:9"), lambda: torch.ones(1, device=TPU).new_zeros(1, device="tpu:9")):
        with pytest.raises(RuntimeError, match="no device 9"):
            call()
    with pytest.raises(RuntimeError, match="no device 9"):
        torch.UntypedStorage(4, device="tpu:9")


def test_sizes_beyond_all_memory_are_refused_at_their_line() -> None:
    with pytest.raises(RuntimeError, match="Storage size calculation overflowed"):
        torch.empty(2**62, device=TPU)
    with pytest.raises(torch.OutOfMemoryError, match=r"test_tensors\.py"):
        torch.empty(2**55, device=TPU)
    with pytest.raises(torch.OutOfMemoryError, match="grows"):
        torch.ones(2, device=TPU).resize_(2**50)


def test_the_type_alone_means_the_current_device() -> None:
    assert torch.ones(1, device="tpu").device == TPU
    with torch.device("tpu"):
        assert torch.nn.Linear(2, 2).weight.device == TPU
    assert torch.nn.Linear(2, 2).tpu().weight.is_tpu


def test_copies_keep_their_layout() -> None:
    x = torch.arange(24.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last)
    for there in (x.to(TPU), x.T.to(TPU).T, x.to(TPU, torch.float64)):
        assert torch.equal(there.cpu().float(), x)
    assert x.to(TPU).stride() == x.stride() == x.to(TPU).cpu().stride()


def test_what_is_written_on_the_cpu_later_is_not_seen() -> None:
    x = torch.ones(4)
    there = x.to(TPU)
    x.zero_()
    here = there.cpu()
    there.zero_()
    assert here.tolist() == [1] * 4 and there.tolist() == [0] * 4


def test_copies_between_a_device_and_parts_of_tensors() -> None:
    there = torch.zeros(3, 4, device=TPU)
    there[:, 1:3].copy_(torch.arange(6).reshape(3, 2))
    here = torch.full((4, 4), 9.0)
    here[1:].copy_(there)
    assert here.tolist() == [[9] * 4, [0, 0, 1, 0], [0, 2, 3, 0], [0, 4, 5, 0]]


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x[1:, ::2].add_(1),
        lambda x: (x.t()[0].fill_(7), x)[1],
        lambda x: (x.view(-1)[2:5].mul_(3), x)[1],
        lambda x: (x.as_strided((2, 2), (1, 1)).clone().add_(x[:, :2]), x),
        lambda x: (x[x > 2], x.nonzero(), torch.unique(x)),
        lambda x: x.masked_fill_(x > 2, -1),
        lambda x: x.index_put_((torch.tensor([0, 1], device=x.device),), x[0] * 2),
        lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
        lambda x: torch.sort(x, 1, descending=True),
        lambda x: x.clone().resize_(3, 2),
        lambda x: x.unfold(1, 2, 1).contiguous(),
        lambda x: torch.view_as_real(torch.complex(x, x).conj().resolve_conj()),
        lambda x: x.view(torch.int32).bitwise_and_(0x7FFFFFFF),
        lambda x: x.detach().clone().data.add_(1),
        lambda x: torch.stack(x.split(1, 1)[::-1]).squeeze_(),
        lambda x: x.expand(2, 2, 3).sum((0, 2)),
    ],
)
def test_views_and_writes(program: Callable[[torch.Tensor], Any]) -> None:
    check(program, torch.arange(6.0).reshape(2, 3))


def test_a_storage_has_an_identity() -> None:
    x, y = grid(), grid()
    assert x.data_ptr() == x.view(-1).data_ptr() != y.data_ptr()
    assert x[1:].data_ptr() - x.data_ptr() == 12 and x.untyped_storage().nbytes() == 24
    z = torch.empty(0, device=TPU).set_(x)
    z.add_(1)
    assert x.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_a_storage_grows_and_shrinks() -> None:
    x = torch.arange(4.0, device=TPU)
    x.resize_(6)
    assert x.tolist()[:4] == [0, 1, 2, 3]
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0
    x.untyped_storage().resize_(24)
    x.copy_(torch.ones(6))
    assert x.tolist() == [1] * 6


def test_the_bytes_of_a_storage_are_turned_and_a_new_one_is_made() -> None:
    x = torch.arange(4.0, device=TPU)
    storage = x.untyped_storage()
    storage.byteswap(torch.float32)
    assert x.cpu().numpy().byteswap().tolist() == [0, 1, 2, 3]
    made = storage.new()
    assert (made.nbytes(), made.device) == (0, TPU)


def test_raw_access() -> None:
    x = grid()
    assert (x[1, 2].item(), x.tolist(), bool((x > -1).all())) == (5, [[0, 1, 2], [3, 4, 5]], True)
    with pytest.raises(TypeError, match=r"can't convert tpu:0 device type tensor to numpy"):
        x.numpy()
    assert "device='tpu:0'" in repr(x)


def test_memory_of_a_device_is_sent_to_no_other_process() -> None:
    with pytest.raises(RuntimeError, match=r"tpu:0 cannot be sent to another process.*send t.cpu"):
        ForkingPickler.dumps(torch.ones(3, device=TPU))


@pytest.mark.parametrize(
    "again",
    [
        lambda x: pickle.loads(pickle.dumps(x)),
        copy.deepcopy,
        lambda x: _saved(x),
        lambda x: _saved(x.cpu(), map_location="tpu"),
        lambda x: _saved(x, map_location="cpu").to(TPU),
    ],
    ids=["pickle", "deepcopy", "saved", "brought", "fetched"],
)
def test_copies_of_tensors_that_are_kept(again: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = grid()
    y = again(x)
    assert y.device == TPU and torch.equal(x, y)
    y.add_(1)
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]


def _saved(thing: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, **options)


def test_tensors_that_share_a_storage_share_it_when_loaded() -> None:
    x = grid()
    loaded = _saved({"all": x, "row": x[1]})
    loaded["row"].zero_()
    assert loaded["all"].tolist() == [[0, 1, 2], [0, 0, 0]]


def test_a_state_dict_is_one_of_any_device() -> None:
    torch.manual_seed(0)
    here = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    there = copy.deepcopy(here).to("tpu")
    there.load_state_dict(_saved(here.state_dict()))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here.parameters(), there.parameters(), strict=True))


def test_errors_come_at_their_own_line() -> None:
    x = grid()
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        x @ x
    with pytest.raises(RuntimeError, match=r"same device.*tpu:0 and cpu"):
        x + torch.ones(2, 3)
    with pytest.raises(RuntimeError, match="more than one element"):
        torch.zeros(1, 3, device=TPU).expand(2, 3).add_(1)
    with pytest.raises(RuntimeError, match=r"single memory|overlap|same memory"):
        x.view(-1)[1:].copy_(x.view(-1)[:-1]).index_add_(0, torch.tensor([0], device=TPU), x.view(-1)[1:2])


def test_an_index_out_of_range_is_told_with_its_line_and_nothing_else_is_lost() -> None:
    x, before = grid(), torch.ones(2, device=TPU)
    wrong = x[torch.tensor([5], device=TPU)] + 1
    with pytest.raises(IndexError, match=r"index 5 is out of bounds.*test_tensors.py"):
        wrong.cpu()
    assert before.tolist() == [1, 1] and x.sum().item() == 15


def test_a_loader_that_pins_memory_works() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(6.0))
    loader = torch.utils.data.DataLoader(data, 2, pin_memory=True)
    found = [batch.to(TPU, non_blocking=True).sum().item() for (batch,) in loader]
    assert found == [1, 5, 9]


def test_a_number_of_the_cpu_may_be_an_operand() -> None:
    assert (grid() * torch.tensor(2.0)).tolist() == [[0, 2, 4], [6, 8, 10]]


def test_the_numbers_of_a_list_op_are_on_the_cpu() -> None:
    t, numbers = torch.arange(1.0, 4.0, device=TPU), torch.tensor([2.0, 3.0])
    out = torch._foreach_addcdiv([t, t], [t, t], [t, t], numbers)
    torch._foreach_addcmul_([t], [t], [t], numbers[1:])
    numbers.zero_()
    assert [o.tolist() for o in out] == [[3, 4, 5], [4, 5, 6]]
    assert t.tolist() == [4, 14, 30]


def test_an_op_without_a_lowering_is_named_in_the_report() -> None:
    from fused_eager import report

    report(reset=True)
    check(torch.linalg.eigvals, torch.tensor([[2.0, 0.0], [0.0, 3.0]]))
    assert "eigvals" in str(report()) or "linalg_eig" in str(report())


def test_what_has_no_form_on_the_device_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"returns a tensor of the kind .* call it on the CPU"):
        torch.eye(3, device=TPU).to_mkldnn()


def test_an_op_of_values_writes_no_tensor_elsewhere() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.nonzero(torch.eye(3, device=TPU), out=torch.empty(0, dtype=torch.long))


def test_a_dtype_that_xla_has_not_can_be_made_and_written() -> None:
    t = torch.empty(3, 4, dtype=torch.complex32, device=TPU)
    torch.view_as_real(t).fill_(2)
    assert t.cpu().to(torch.complex64).tolist() == [[2 + 2j] * 4] * 3


def test_numbers_that_are_kept_on_the_device_are_told_apart_to_the_bit() -> None:
    x = torch.ones(2, device=TPU)
    for _ in range(2):
        for n in (0.0, -0.0, 1, 1.0, True, float("inf"), 2**53 + 1):
            want = torch.ones(2) * n
            got = (x * n).cpu()
            assert torch.equal(got, want) and torch.equal(torch.signbit(got), torch.signbit(want))
    device = DOORS[0].device
    assert device.numbers([1.5], torch.float64, []) is device.numbers([1.5], torch.float64, [])


def test_quantized_tensors_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="tpu has no quantized tensors"):
        torch._empty_affine_quantized([2], scale=1.0, dtype=torch.quint8, device=TPU)


def test_a_storage_is_emptied_and_filled_again_without_waiting_for_who_reads_it() -> None:
    """As FSDP2 does with the parameters of each layer."""
    x = torch.arange(6.0, device=TPU)
    x.sum().item()
    flushes = len(LOG.of("flush"))
    y, storage = x * 2, x.untyped_storage()
    storage.resize_(0)
    storage.resize_(24)
    x.copy_(y + 1)
    z = x * 1
    storage.resize_(0)
    assert len(LOG.of("flush")) == flushes or DOORS[0].stream.config.mode != "fused"
    assert storage.nbytes() == 0 and z.tolist() == [1.0, 3.0, 5.0, 7.0, 9.0, 11.0] and y.tolist()[1] == 2.0
    storage.resize_(24)
    assert x.tolist() == [0.0] * 6
    part = x[2:4]
    part.add_(3)
    storage.resize_(48)  # and what is there stays where it grows
    assert x.tolist() == [0.0, 0.0, 3.0, 3.0, 0.0, 0.0]
    half = torch.ones(4, dtype=torch.float16, device=TPU).untyped_storage()
    half.resize_(0)
    half.resize_(7)
    assert half.nbytes() == 7 and half.cpu().tolist() == [0] * 7


def test_lists_of_tensors_that_share_memory_are_recorded_one_by_one() -> None:
    """As FSDP2 copies parameters into what it gathers."""

    def changed(d: Any) -> list[torch.Tensor]:
        whole = torch.arange(12.0, device=d)
        parts = list(whole.split([3, 4, 5]))
        source = [torch.sin(torch.arange(float(n), device=d)) for n in (3, 4, 5)]
        torch._foreach_copy_(parts, source)
        torch._foreach_add_(parts, [p * 2 for p in parts], alpha=3)
        torch._foreach_addcmul_(parts, source, source, [1.0, 2.0, 3.0])
        torch._foreach_mul_([whole[:6], whole[3:9]], 2.5)  # one after the other
        return [whole]

    islands = len(LOG.of("island"))
    same(changed("cpu"), changed(TPU))
    assert len(LOG.of("island")) == islands


def test_autocast_of_the_host_is_none_of_the_devices() -> None:
    layer, x = nn.Linear(4, 4).to(TPU), torch.ones(2, 4, device=TPU)
    plain = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x), plain) and layer(x).dtype is torch.float32
        assert nn.functional.layer_norm(plain @ plain.t(), (2,)).dtype is torch.float32
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16


@pytest.mark.parametrize("default", ["tpu", "meta", "cpu"])
def test_a_default_device_is_that_of_the_program_alone(default: str) -> None:
    x = torch.ones(3, device=TPU) * 2
    torch.set_default_device(default)
    try:
        written = io.BytesIO()
        torch.save({"x": x, "part": x[1:]}, written)
        written.seek(0)
        loaded = torch.load(written)
        x.requires_grad_()
        (x * copy.deepcopy(x.detach())).sum().backward()
        layer = torch.nn.LSTM(3, 2).to_empty(device=TPU)
        out, _ = layer(loaded["x"][None])
        torch.nn.functional.scaled_dot_product_attention(out[None], out[None], out[None]).sum().backward()
        one = torch.randperm(1, device=TPU)
        resized = torch.arange(6.0, device=TPU)
        resized.untyped_storage().resize_(16)
        assert resized[:4].cpu().tolist() == [0, 1, 2, 3]
        assert torch.UntypedStorage(8, device=TPU).device == TPU
        found = [loaded["x"], loaded["part"], x.grad, torch.unique(loaded["x"]), x[x > 0], one]
        assert all(t is not None and t.device == TPU for t in found)
        assert [t.tolist() for t in found] == [[2] * 3, [2] * 2, [2] * 3, [2], [2] * 3, [0]]  # type: ignore[union-attr]
        assert torch.empty(0).device.type == default and layer.weight_ih_l0.grad is not None
    finally:
        torch.set_default_device(None)


DETERMINISTIC = (
    lambda d: [torch.empty(3, dtype=t, device=d) for t in (torch.float32, torch.bfloat16, torch.complex64)],
    lambda d: [torch.empty(3, dtype=t, device=d) for t in (torch.int64, torch.int8, torch.uint8, torch.bool)],
    lambda d: [torch.empty_like(torch.ones(2, 2, device=d)), torch.ones(2, device=d).new_empty(3)],
    lambda d: [torch.empty_strided((2, 2), (1, 2), device=d), torch.empty_permuted((2, 3), (1, 0), device=d)],
    lambda d: [torch.ones(2, device=d).resize_(4), torch.ones(4, device=d).resize_(2)],
    lambda d: torch.ones(2, device=d)[1:].resize_(3),
    lambda d: [torch.empty(0, device=d).resize_(2, 2), torch.zeros(2, device=d), torch.empty(2, device=d).fill_(1)],
    lambda d: torch.add(torch.ones(2, device=d), 1, out=torch.empty(2, device=d)),
)


@pytest.mark.parametrize("program", DETERMINISTIC)
def test_what_nobody_has_written_shows_up_where_algorithms_are_deterministic(program: Callable[..., Any]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        same(program("cpu"), program(TPU))
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[assignment]
        assert torch.empty(2, device=TPU).tolist() == [0, 0]
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[assignment]
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.int8], ids=str)
def test_a_median_of_nothing_is_what_aten_has(dtype: torch.dtype) -> None:
    for median in (torch.median, torch.nanmedian):
        check(median, torch.empty(0, dtype=dtype))


def test_no_numbers_are_drawn_for_any_dtype() -> None:
    assert torch.empty(0, dtype=torch.complex64, device=TPU).random_().shape == (0,)
    with pytest.raises(NotImplementedError, match="random"):
        torch.empty(1, dtype=torch.complex64, device=TPU).random_()


def test_a_copy_that_does_not_fit_is_refused_as_on_the_cpu() -> None:
    for d in ("cpu", TPU):
        with pytest.raises(RuntimeError, match=r"size of tensor a \(3\) must match the size of tensor b \(2\)"):
            torch.zeros(3, device=d).copy_(torch.ones(2))


OUTSIDE: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x.as_strided((3, 3), (6, 2)),
    lambda x: x.as_strided((3,), (1,), 100),
    lambda x: x[1:].as_strided((3, 3), (3, 1)),
    lambda x: x.slice_inverse(torch.zeros(40, dtype=x.dtype, device=x.device)[:36].view(6, 6)[::2, ::2]),
]


@pytest.mark.parametrize("outside", OUTSIDE)
def test_a_view_beyond_the_storage_is_refused_at_its_own_line(outside: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.arange(9).view(3, 3)
    with pytest.raises(RuntimeError, match="out of bounds for storage of size 72") as eagers:
        outside(x)
    with pytest.raises(RuntimeError) as ours:
        outside(x.to(TPU))
    assert str(ours.value).partition("\n")[0] == str(eagers.value).partition("\n")[0]
    assert x.to(TPU).as_strided((2, 2), (6, 2)).cpu().tolist() == [[0, 2], [6, 8]]


def test_data_of_the_device_may_be_put_into_a_parameter_of_the_cpu_and_back() -> None:
    p = nn.Parameter(torch.ones(3))
    called: list[int] = []
    p.register_post_accumulate_grad_hook(lambda _: called.append(1))
    optimizer = torch.optim.SGD([p], lr=0.1)
    for value, there in ((0.8, "tpu"), (0.6, "cpu")):
        (p * 2).sum().backward()
        p.data = p.data.to(there)
        p.grad = None
        (p * 2).sum().backward()  # by another accumulator
        optimizer.step()
        assert p.device.type == there and p.is_leaf and p.requires_grad
        torch.testing.assert_close(p.detach().cpu(), torch.full((3,), value))
    assert called == [1] * 4
    q, elsewhere = torch.ones(2, device="tpu"), torch.ones(2, device="meta")
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        q.data = elsewhere
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        q.data = torch.eye(2).to_sparse()
