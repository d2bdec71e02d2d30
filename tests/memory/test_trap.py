"""A trapped storage refuses every access to its data, and gives its values back unharmed."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from fused_eager.memory import trap

ACCESSES: dict[str, Callable[[torch.Tensor], object]] = {
    "read by an op": lambda x: x + 1,
    "written by an op": lambda x: x.fill_(1),
    "copied from": lambda x: x.clone(),
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "data_ptr": lambda x: x.data_ptr(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "dlpack": lambda x: torch.utils.dlpack.to_dlpack(x),
    "storage pointer": lambda x: x.untyped_storage().data_ptr(),
    "bool": lambda x: bool(x[0]),
    "repr": repr,
}
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda x: x.view(2, 2),
    "transpose": lambda x: x.view(2, 2).t(),
    "slice": lambda x: x[1:3],
    "expand": lambda x: x[:1].expand(3),
    "dtype": lambda x: x.view(torch.int32),
    "detach": lambda x: x.detach(),
    "as_strided": lambda x: x.as_strided((2,), (2,), 1),
}


@pytest.fixture
def trapped() -> torch.Tensor:
    x = torch.arange(4.0)
    trap.arm(trap.storage_of(x))
    return x


def test_the_self_test_finds_nothing() -> None:
    assert trap.self_test() is None


@pytest.mark.parametrize("name", ACCESSES)
def test_every_access_raises(trapped: torch.Tensor, name: str) -> None:
    with pytest.raises(RuntimeError, match=r"[Cc]annot access data"):
        ACCESSES[name](trapped)
    trap.disarm(trap.storage_of(trapped))
    assert trapped.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("name", VIEWS)
def test_views_work_and_are_trapped_too(trapped: torch.Tensor, name: str) -> None:
    view = VIEWS[name](trapped)
    expected = VIEWS[name](torch.arange(4.0))
    assert (view.shape, view.stride(), view.dtype) == (expected.shape, expected.stride(), expected.dtype)
    with pytest.raises(RuntimeError):
        view.clone()
    trap.disarm(trap.storage_of(trapped))
    assert torch.equal(view, expected)


def test_armed_is_visible_and_undone() -> None:
    storage = trap.storage_of(torch.zeros(2))
    seen = [trap.is_armed(storage)]
    trap.arm(storage)
    seen.append(trap.is_armed(storage))
    trap.disarm(storage)
    seen.append(trap.is_armed(storage))
    assert seen == [False, True, False]


def test_each_storage_has_its_own_trap(trapped: torch.Tensor) -> None:
    other = torch.ones(4)
    assert (other + 1).tolist() == [2.0] * 4
    assert trap.is_armed(trap.storage_of(trapped))


SWAPS = {"of torch": trap.swap_memory, "of bytes": trap._swap}


@pytest.mark.parametrize("name", SWAPS)
def test_two_storages_exchange_what_they_hold(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(trap, "swap_memory", SWAPS[name])
    assert trap._test_of_swapping() is None


@pytest.mark.parametrize("name", SWAPS)
def test_views_and_traps_go_with_what_is_exchanged(name: str) -> None:
    a, b = torch.arange(4.0), torch.full((4,), 7.0)
    view, base = a[2:], a.view(2, 2)
    trap.arm(trap.storage_of(b))
    SWAPS[name](trap.storage_of(a), trap.storage_of(b))
    assert (trap.is_armed(trap.storage_of(a)), trap.is_armed(trap.storage_of(b))) == (True, False)
    with pytest.raises(RuntimeError):
        view.clone()
    trap.disarm(trap.storage_of(a))
    assert view.tolist() == [7.0, 7.0]
    assert base.tolist() == [[7.0, 7.0], [7.0, 7.0]]
    del a, view, base  # the memory that was b's
    assert b.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_what_is_not_exchanged_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trap, "swap_memory", lambda a, b: None)
    assert trap.self_test() == "two storages did not exchange what they hold"


def test_what_another_thread_writes_behind_a_storage_is_no_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = itertools.count()
    string_at = ctypes.string_at

    def busy(address: int, size: int) -> bytes:
        found, n = string_at(address, size), next(reads)
        return found[:-4] + n.to_bytes(4, "little") if n < 6 else found

    monkeypatch.setattr(ctypes, "string_at", busy)
    assert trap._find_flags() == trap.FLAGS_AT
    assert next(reads) > 6
    monkeypatch.setattr(ctypes, "string_at", lambda address, size: next(reads).to_bytes(size, "little"))
    with pytest.raises(trap.TrapUnavailable, match="expected two neighbours"):
        trap._find_flags()
