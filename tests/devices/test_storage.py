"""Storages exchange what they hold, with torch's own function and without, and their flags are found."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from fused_eager.devices import storage
from fused_eager.devices.host import trap
from fused_eager.devices.storage import storage_of

SWAPS = {"of torch": storage.swap_memory, "of bytes": storage._swap}


@pytest.mark.parametrize("name", SWAPS)
def test_two_storages_exchange_what_they_hold(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(storage, "swap_memory", SWAPS[name])
    assert storage.self_test() is None


@pytest.mark.parametrize("name", SWAPS)
def test_views_and_traps_go_with_what_is_exchanged(name: str) -> None:
    a, b = torch.arange(4.0), torch.full((4,), 7.0)
    view, base = a[2:], a.view(2, 2)
    trap.arm(storage_of(b))
    SWAPS[name](storage_of(a), storage_of(b))
    assert (trap.is_armed(storage_of(a)), trap.is_armed(storage_of(b))) == (True, False)
    with pytest.raises(RuntimeError):
        view.clone()
    trap.disarm(storage_of(a))
    assert view.tolist() == [7.0, 7.0]
    assert base.tolist() == [[7.0, 7.0], [7.0, 7.0]]
    del a, view, base  # the memory that was b's
    assert b.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_what_is_not_exchanged_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "swap_memory", lambda a, b: None)
    assert storage.self_test() == "two storages did not exchange what they hold"


def test_what_another_thread_writes_behind_a_storage_is_no_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = itertools.count()
    string_at = ctypes.string_at

    def busy(address: int, size: int) -> bytes:
        found, n = string_at(address, size), next(reads)
        return found[:-4] + n.to_bytes(4, "little") if n < 6 else found

    monkeypatch.setattr(ctypes, "string_at", busy)
    assert storage.find_flags() == storage.FLAGS_AT
    assert next(reads) > 6
    monkeypatch.setattr(ctypes, "string_at", lambda address, size: next(reads).to_bytes(size, "little"))
    with pytest.raises(storage.FlagsNotFound, match="expected two neighbours"):
        storage.find_flags()
