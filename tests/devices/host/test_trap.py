"""A trapped storage refuses every access to its data, and gives its values back unharmed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fused_eager.devices.host import trap
from fused_eager.devices.storage import storage_of

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
    trap.arm(storage_of(x))
    return x


def test_the_self_test_finds_nothing() -> None:
    assert trap.self_test() is None


@pytest.mark.parametrize("name", ACCESSES)
def test_every_access_raises(trapped: torch.Tensor, name: str) -> None:
    with pytest.raises(RuntimeError, match=r"[Cc]annot access data"):
        ACCESSES[name](trapped)
    trap.disarm(storage_of(trapped))
    assert trapped.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("name", VIEWS)
def test_views_work_and_are_trapped_too(trapped: torch.Tensor, name: str) -> None:
    view = VIEWS[name](trapped)
    expected = VIEWS[name](torch.arange(4.0))
    assert (view.shape, view.stride(), view.dtype) == (expected.shape, expected.stride(), expected.dtype)
    with pytest.raises(RuntimeError):
        view.clone()
    trap.disarm(storage_of(trapped))
    assert torch.equal(view, expected)


def test_armed_is_visible_and_undone() -> None:
    storage = storage_of(torch.zeros(2))
    seen = [trap.is_armed(storage)]
    trap.arm(storage)
    seen.append(trap.is_armed(storage))
    trap.disarm(storage)
    seen.append(trap.is_armed(storage))
    assert seen == [False, True, False]


def test_each_storage_has_its_own_trap(trapped: torch.Tensor) -> None:
    other = torch.ones(4)
    assert (other + 1).tolist() == [2.0] * 4
    assert trap.is_armed(storage_of(trapped))
