"""Borrowed memory: every dtype bit for bit, empty values, and arrays that outlive the next borrowing."""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fused_eager.fusion_rules.spec import JAX_DTYPE

from fused_eager.devices.dlpack import to_array, to_tensor
from fused_eager.devices.host import unwritten
from fused_eager.devices.host.borrow import MAX_DIMS, _template, borrow, borrow_again
from fused_eager.xla import device, inline


@pytest.mark.parametrize("dtype", JAX_DTYPE, ids=str)
def test_every_dtype_arrives_bit_for_bit(dtype: torch.dtype) -> None:
    raw = torch.arange(64 * 16, dtype=torch.int64).to(torch.uint8) % 2
    array = borrow(raw.data_ptr(), (dtype, (4, 16)), device())
    assert array.dtype == JAX_DTYPE[dtype] and array.shape == (4, 16)
    assert np.asarray(array).tobytes() == raw.numpy().tobytes()[: 64 * dtype.itemsize]


def test_aligned_memory_is_not_copied() -> None:
    x = torch.zeros(1024)
    array = borrow(x.data_ptr(), (torch.float32, (1024,)), device())
    assert array.unsafe_buffer_pointer() == x.data_ptr()


@pytest.mark.parametrize("on", [device, inline])
def test_memory_that_is_not_aligned_is_copied_for_the_device_that_asks(on: Callable[[], Any]) -> None:
    x = torch.arange(9.0)
    for array in (borrow(x.data_ptr() + 4, (torch.float32, (8,)), on()), to_array(x[1:], on())):
        assert array.device.client is on().client and np.asarray(array).tolist() == x[1:].tolist()


def test_an_array_outlives_the_next_borrowing() -> None:
    x, y = torch.arange(6.0), torch.arange(12)
    first = borrow(x.data_ptr(), (torch.float32, (2, 3)), device())
    borrow(y.data_ptr(), (torch.int64, (12,)), device())
    assert first.shape == (2, 3) and np.asarray(first).ravel().tolist() == x.tolist()


@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_empty_values_and_scalars(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    array = borrow(x.data_ptr(), (torch.float32, shape), device())
    assert array.shape == shape and np.asarray(array).tolist() == x.tolist()


def test_too_many_dimensions_are_refused() -> None:
    with pytest.raises(ValueError, match=f"at most {MAX_DIMS}"):
        borrow(0, (torch.float32, (1,) * (MAX_DIMS + 1)), device())


def test_the_same_memory_is_the_same_array_until_it_is_donated() -> None:
    x = torch.zeros(1024)
    home = (torch.float32, (1024,))
    first = borrow_again(x.data_ptr(), home, device())
    assert borrow_again(x.data_ptr(), home, device()) is first
    assert borrow_again(x.data_ptr(), (torch.float32, (2, 512)), device()) is not first
    x.fill_(3.0)
    assert to_tensor(borrow_again(x.data_ptr(), home, device())).tolist() == x.tolist()
    first.delete()
    second = borrow_again(x.data_ptr(), home, device())
    assert not second.is_deleted() and second.unsafe_buffer_pointer() == x.data_ptr()


def test_a_copy_is_made_again() -> None:
    x = torch.zeros(1025)[1:]  # not as aligned as XLA asks for
    home = (torch.float32, (1024,))
    first = borrow_again(x.data_ptr(), home, device())
    assert first.unsafe_buffer_pointer() != x.data_ptr()
    x.fill_(3.0)
    assert np.asarray(borrow_again(x.data_ptr(), home, device())).tolist() == x.tolist()


def test_a_new_shape_leaves_nothing_for_the_collector() -> None:
    while gc.collect():  # of other tests: what a finalizer lets go of comes with the next round
        pass
    gc.disable()
    try:
        for rank in range(9, 14):
            _template((torch.float32, (1,) * rank))
            unwritten._description((1,) * rank, (1,) * rank, torch.float32)
        assert gc.collect() == 0
    finally:
        gc.enable()
