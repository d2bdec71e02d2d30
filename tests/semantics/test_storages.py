"""A storage that somebody has kept is read, written, resized and handed out as in eager."""

from __future__ import annotations

import copy
import ctypes
import io
from collections import UserList, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fused_eager import fused_eager
from fused_eager.recording.native import is_volatile


def floats(address: int, count: int) -> list[float]:
    return list((ctypes.c_float * count).from_address(address))


def resized_under_a_pending_read() -> Any:
    x = torch.ones(100_000)
    kept = x.untyped_storage()
    y = x * 2  # reads x's own memory, later
    kept.resize_(0)
    others = [torch.full((100_000,), 7.0) for _ in range(3)]
    return y.mean().item(), len(others)


def emptied_and_filled_again() -> Any:
    x = torch.arange(100_000.0) * 2
    x.untyped_storage().resize_(0)
    left = x.untyped_storage().nbytes()
    x.untyped_storage().resize_(400_000)
    return left, x.copy_(torch.ones(100_000)).sum().item()


def written_after_its_address_was_asked_for() -> Any:
    x = torch.ones(100_000) * 2
    address = x.untyped_storage().data_ptr()
    x.add_(1)
    return floats(address, 4)


def written_through_its_address() -> Any:
    x = torch.ones(1000) * 2
    memory = np.ctypeslib.as_array((ctypes.c_float * 1000).from_address(x.untyped_storage().data_ptr()))
    memory[:] = 5
    y = x * 2
    memory[:] = 7
    return y.sum().item(), x.sum().item()


def read_by_bytes() -> Any:
    x = torch.arange(1000.0)
    kept = x.untyped_storage()
    found = []
    for read in (list, lambda s: list(s.clone()), lambda s: list(copy.deepcopy(s)), torch.UntypedStorage.tolist):
        x.mul_(2)
        found.append(read(kept)[:40])
    x.mul_(2)
    kept.byteswap(torch.float32)
    return found, x[:4].tolist()


def saved() -> Any:
    x = torch.arange(1000.0)
    kept, file = x.untyped_storage(), io.BytesIO()
    x.mul_(2)
    torch.save(kept, file)
    return x.numpy().tobytes() in file.getvalue()


def written_by_bytes() -> Any:
    x = torch.arange(1000.0)
    y = x * 2
    kept = x.untyped_storage()
    kept[3] = 63
    z = x + 0
    kept.fill_(0)
    x.add_(1)
    other = torch.zeros(1000).untyped_storage()
    other.copy_(kept)
    return y.tolist(), z.tolist(), x.tolist(), list(other)[:8]


def shared() -> Any:
    x = torch.arange(1000.0)
    kept = x.untyped_storage()
    x.mul_(2)
    kept.share_memory_()
    x.add_(1)
    return x.sum().item(), kept.is_shared()


def pending() -> torch.Tensor:
    return (torch.ones(3) * 2 + 1)[1]


def made_of_numbers() -> Any:
    """Which constructors read on their way, through keywords and sequences of any kind."""
    index = torch.tensor([0, 1]) + 1
    return (
        torch.as_tensor(data=[pending(), pending()]), torch.asarray([pending(), pending()]),
        torch.as_tensor(deque([pending(), pending()])), torch.tensor(deque([pending(), pending()])),
        torch.tensor(UserList([pending(), pending()])), torch.ones(2).new_tensor(deque([pending(), pending()])),
        torch.ones(2).new([pending(), pending()]),
        torch.sparse_coo_tensor([[index[0], index[1]]], torch.ones(2), (6,)).to_dense(),
    )  # fmt: skip


@pytest.mark.parametrize("program", [
    resized_under_a_pending_read, emptied_and_filled_again, written_after_its_address_was_asked_for,
    written_through_its_address, read_by_bytes, saved, written_by_bytes, shared, made_of_numbers,
], ids=lambda program: program.__name__)  # fmt: skip
@pytest.mark.parametrize("native", ["never", "measured"])
def test_as_in_eager(program: Callable[[], Any], native: str, mode: str) -> None:
    expected = program()
    with fused_eager(mode=mode, native=native):
        found = [program() for _ in range(3)]
    assert [str(each) for each in found] == [str(expected)] * 3


def test_saving_does_not_hand_memory_out(mode: str) -> None:
    """torch.save asks for addresses: what is saved would be written at once and alone from then on."""
    layer = torch.nn.Linear(300, 300)
    with fused_eager(mode=mode):
        layer(torch.ones(2, 300)).sum().backward()
        torch.save(layer.state_dict(), io.BytesIO())
        assert not any(is_volatile(p.untyped_storage()) for p in layer.parameters())
        assert layer.weight.untyped_storage().data_ptr()
        assert is_volatile(layer.weight.untyped_storage())
