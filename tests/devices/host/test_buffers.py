"""The table of pending storages: who is alive, what is released, and memory that crosses to JAX without a copy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fused_eager.fusion_rules.spec import JAX_DTYPE

from fused_eager.devices.buffer import Buffer, sweep, use_count
from fused_eager.devices.dlpack import to_array, to_tensor
from fused_eager.devices.home import home_of
from fused_eager.devices.host import buffers, trap
from fused_eager.devices.host.buffers import TABLE
from fused_eager.devices.storage import alias, storage_of
from fused_eager.xla import device


@pytest.fixture(autouse=True)
def own_table() -> Iterator[None]:
    """What these tests enter by hand goes away with them."""
    before = set(TABLE)
    yield
    for cdata in set(TABLE) - before:
        trap.disarm(TABLE.pop(cdata).storage)


def with_array(t: torch.Tensor, value: torch.Tensor, born_native: bool) -> Buffer:
    """A buffer for the storage of `t` whose value is on the device."""
    b = buffers.open_buffer(storage_of(t), born_native)
    b.array = to_array(value, device())
    return b


def test_a_buffer_is_found_through_every_view_and_traps_them() -> None:
    t = torch.zeros(4, 4)
    view = t.t()[1:]
    assert buffers.buffer_of(t) is None
    b = buffers.open_buffer(storage_of(t), born_native=True)
    assert buffers.buffer_of(t) is b and buffers.buffer_of(view) is b
    assert buffers.open_buffer(storage_of(view), born_native=False) is b and b.born_native
    with pytest.raises(RuntimeError):
        view.clone()


def test_release_opens_the_memory_as_it_is() -> None:
    t = torch.arange(3.0)
    buffers.open_buffer(storage_of(t), born_native=True).release()
    assert buffers.buffer_of(t) is None
    assert t.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("holder", ["tensor", "view", "autograd", "python storage"])
def test_alive_as_long_as_anything_refers_to_the_storage(holder: str) -> None:
    t = torch.zeros(8)
    b = buffers.open_buffer(storage_of(t), born_native=False)
    kept: object = None
    if holder == "view":
        kept = t[2:4]
    elif holder == "autograd":
        other = torch.ones(8, requires_grad=True)
        trap.disarm(b.storage)
        kept = (other * t).grad_fn
        trap.arm(b.storage)
    elif holder == "python storage":
        kept = storage_of(t)
    if holder != "tensor":
        del t
    assert b.is_alive()
    if holder == "tensor":
        del t
    del kept
    if holder == "autograd":
        del other
    assert not b.is_alive()


def test_sweep_forgets_only_the_dead_on_the_device() -> None:
    t, dead = torch.zeros(4), torch.zeros(4)
    kept, gone = with_array(t, torch.ones(4), False), with_array(dead, torch.ones(4), False)
    del dead
    sweep(TABLE)
    assert TABLE.get(kept.cdata) is kept
    assert TABLE.get(gone.cdata) is not gone


@pytest.mark.parametrize("dtype", JAX_DTYPE, ids=str)
def test_arrays_cross_with_their_dtype_and_bits(dtype: torch.dtype) -> None:
    bits = torch.arange(64, dtype=torch.uint8)
    t = (bits % 2).bool() if dtype is torch.bool else bits.view(dtype)
    array = to_array(t, device())
    assert array.dtype == JAX_DTYPE[dtype]
    assert home_of(array) == (dtype, tuple(t.shape))
    back = to_tensor(array)
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), t.view(torch.uint8))


def test_the_border_copies_nothing() -> None:
    t = torch.zeros(1024)
    assert t.data_ptr() % 64 == 0, "torch no longer aligns its memory: imports would copy"
    array = to_array(t, device())
    assert array.unsafe_buffer_pointer() == t.data_ptr()
    assert to_tensor(array).data_ptr() == t.data_ptr()


def test_an_alias_is_part_of_the_memory_and_holds_no_reference() -> None:
    t = torch.arange(8.0)
    storage = storage_of(t)
    before = use_count(storage._cdata)
    part = alias(storage, 8, (torch.float32, (2, 2)))
    assert part.tolist() == [[2.0, 3.0], [4.0, 5.0]]
    assert use_count(storage._cdata) == before
    part[0, 0] = 9
    assert t[2] == 9


def test_bind_keeps_the_address_of_memory_that_was_native() -> None:
    t = torch.zeros(8)
    address = t.data_ptr()
    with_array(t, torch.ones(8), born_native=True).bind()
    assert t.data_ptr() == address and t.tolist() == [1.0] * 8 and buffers.buffer_of(t) is None


LIMIT = buffers.COPIED // 4  # elements of float32


@pytest.mark.parametrize("size", [8, LIMIT, LIMIT + 1, 4 * LIMIT])
def test_bind_swaps_the_memory_of_what_was_born_pending(size: int) -> None:
    t = torch.empty(size)
    address, view, value = t.data_ptr(), t[2:], torch.arange(float(size))
    storage, version = storage_of(t), t._version
    with_array(t, value, born_native=False).bind()
    taken_over = t.data_ptr() == value.data_ptr()
    assert taken_over == (size > LIMIT), "small results are copied, large ones never"
    assert t.data_ptr() != address and storage_of(t) is storage
    assert view.data_ptr() == t.data_ptr() + 8 and torch.equal(view, torch.arange(2.0, size))
    assert t._version == version and buffers.buffer_of(t) is None


def test_a_small_bound_result_is_torch_s_own() -> None:
    t, value = torch.empty(8), torch.arange(8.0)
    with_array(t, value, born_native=False).bind()
    t.resize_(4000)[8:] = 1
    assert t[:9].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 1.0]


def test_bind_of_nothing() -> None:
    t = torch.empty(0)
    with_array(t, torch.empty(0), born_native=False).bind()
    assert t.tolist() == []


@pytest.mark.parametrize("size", [1000, 2 * LIMIT])
def test_bound_memory_outlives_the_array_and_the_source(size: int) -> None:
    t = torch.empty(size)
    value = torch.full((size,), 3.0)
    with_array(t, value, born_native=False).bind()
    del value
    torch.full((size,), 7.0)
    assert t.eq(3.0).all()
