"""Vacating: the program's own memory goes back to the system while its values are on the device, and only where nobody
can tell but by reading an address that torch knows nothing of."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import pytest
import torch

import fused_eager as fe
from fused_eager import fused_eager
from fused_eager.devices.host import release_pages
from fused_eager.devices.host.buffers import TABLE
from fused_eager.devices.storage import storage_of
from fused_eager.executing import run
from fused_eager.frontends.context.threads import THREAD
from fused_eager.log.events import LOG
from fused_eager.log.reasons import Reason

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux alone")
N = 2 * release_pages.LEAST // 4


@pytest.fixture(autouse=True)
def at_every_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_pages, "EVERY", 0.0)
    monkeypatch.setattr(release_pages, "WATCH", release_pages.Watch())
    monkeypatch.setattr(release_pages, "DRIVERS", ())  # JAX loads one where there is a GPU


def in_memory(address: int) -> float:
    """The number in the middle of a value at an address, whatever torch says of it."""
    return ctypes.c_float.from_address(address + 2 * N).value


def add(x: torch.Tensor, times: int = 4) -> None:
    """Add one, a flush each time."""
    for _ in range(times):
        with torch.no_grad():
            x.add_(1)
        x.new_ones(1).mul(2).item()


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full((N,), 5.0))


def test_a_parameter_is_in_memory_once_and_comes_back_to_its_place() -> None:
    p = parameter()
    address = p.data_ptr()
    with fused_eager():
        add(p)
        assert in_memory(address) == 0 and TABLE[storage_of(p)._cdata].vacant
        fe.sync()
        assert in_memory(address) == 9
        add(p, 2)
        assert in_memory(address) == 9  # not at once: it may be read again soon
        add(p, 2)
        assert in_memory(address) == 0
        assert p.sum().item() == 13 * N
    assert p.data_ptr() == address and p.eq(13).all()


def test_what_an_op_made_goes_too() -> None:
    with fused_eager():
        x = torch.ones(N) * 5
        fe.sync()
        address = release_pages.trap.address_of(storage_of(x))
        add(x)
        assert in_memory(address) == 0
    assert x.eq(9).all()


def another_tensor(p: torch.nn.Parameter) -> object:
    return p.data


def a_capsule(p: torch.nn.Parameter) -> object:
    return torch.utils.dlpack.to_dlpack(p.detach())


def a_storage(p: torch.nn.Parameter) -> object:
    return p.untyped_storage()


@pytest.mark.parametrize("view", [another_tensor, a_capsule, a_storage])
def test_memory_to_which_something_else_refers_stays(view: Callable[[torch.nn.Parameter], object]) -> None:
    p = parameter()
    address, seen = p.data_ptr(), view(p)
    with fused_eager():
        add(p)
        assert in_memory(address) == 5
        del seen
        add(p)
        assert in_memory(address) == 0
    assert p.eq(13).all()


@pytest.mark.parametrize("keep", [True, False])
def test_what_numpy_sees_is_written_at_once(keep: bool) -> None:
    x = torch.full((N,), 5.0)
    view = x.numpy()
    if not keep:
        del view
    address = x.data_ptr()
    with fused_eager():
        add(x)
        assert in_memory(address) == 9
    assert x.eq(9).all()


def test_what_a_value_does_not_cover_is_not_lost() -> None:
    whole = torch.arange(4 * N + 2, dtype=torch.uint8)
    with torch.no_grad():
        p = torch.nn.Parameter(torch.empty(0).set_(whole.untyped_storage(), 0, (N,)))
    expected, address = whole[-2:].tolist(), whole.data_ptr()
    del whole
    with fused_eager():
        add(p)
    assert list((ctypes.c_ubyte * 2).from_address(address + 4 * N)) == expected


def test_a_value_that_a_failure_brings_back_is_there() -> None:
    p = parameter()
    with fused_eager():
        index = torch.tensor([N + 7])
        with torch.no_grad(), pytest.raises(IndexError):
            for _ in range(4):
                p.index_add_(0, index, torch.ones(1))
                run.flush(THREAD.door.stream, Reason("cut.exit"))
            fe.sync()
    assert p.eq(5).all()


def test_small_ones_are_not_worth_it() -> None:
    before = LOG.counts["storages given back"]
    p = torch.nn.Parameter(torch.ones(100))
    with fused_eager():
        add(p)
    assert LOG.counts["storages given back"] == before and p.eq(5).all()


def test_with_a_driver_in_the_process_that_may_have_pinned_memory_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_pages, "DRIVERS", ("libcuda.so", "libtorch_python.so"))  # the latter stands for it
    p = parameter()
    address = p.data_ptr()
    with fused_eager():
        add(p)
        assert in_memory(address) == 5 and p.sum().item() == 9 * N


def test_a_loop_that_is_seldom_looked_at_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_pages, "EVERY", 1e9)
    p = parameter()
    address = p.data_ptr()
    with fused_eager():
        add(p)
        assert in_memory(address) == 5
