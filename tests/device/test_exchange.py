"""DLPack: other libraries get a copy of a tensor's value, torch a second tensor over its storage."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
from torch.utils import dlpack

from fused_eager import fused_eager
from fused_eager.frontends.device.doors import DOORS
from fused_eager.frontends.device.exchange import array_of

from .compare import TPU


def matrix() -> torch.Tensor:
    return torch.arange(12.0, device=TPU).reshape(3, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64, torch.uint8], ids=str)
def test_numpy_gets_a_copy(dtype: torch.dtype) -> None:
    x = matrix().to(dtype).t()[1:]
    found = np.from_dlpack(x)
    assert found.tolist() == x.cpu().tolist() and found.dtype == x.cpu().numpy().dtype
    found[...] = 0
    assert x.cpu().to(torch.complex64).sum() != 0


def test_jax_gets_a_copy_of_what_is_pending() -> None:
    x = matrix()
    found = jax.dlpack.from_dlpack((x + 1).bfloat16()[:, 1])
    x.zero_()
    assert found.tolist() == [2, 6, 10] and found.dtype == jax.numpy.bfloat16


@pytest.mark.parametrize("cut", [lambda x: x, lambda x: x[1], lambda x: x[1:, 2], lambda x: x.t()], ids=str)
@pytest.mark.parametrize("by", ["tensor", "capsule"])
def test_torch_shares_the_memory(by: str, cut: object) -> None:
    """A capsule tells where a tensor begins, not its storage: what torch lays there read zeros behind the beginning."""
    x = cut(matrix().clone())  # type: ignore[operator]
    y = torch.from_dlpack(x) if by == "tensor" else dlpack.from_dlpack(dlpack.to_dlpack(x))
    assert y.device == x.device and y.stride() == x.stride() and torch.equal(y, x)
    x.add_(1)
    y.mul_(2)
    assert torch.equal(y, x) and torch.equal(x.cpu(), (cut(matrix().cpu()) + 1) * 2)  # type: ignore[operator]


def test_a_tensor_that_nobody_has_written_shares_its_memory() -> None:
    x = torch.empty(3, device=TPU)
    y = dlpack.from_dlpack(dlpack.to_dlpack(x))
    x.fill_(2)
    assert y.tolist() == [2, 2, 2]


def test_where_a_copy_goes() -> None:
    x = matrix()
    host, other = torch.from_dlpack(x, device="cpu"), torch.from_dlpack(x, copy=True)
    host.zero_()
    other.zero_()
    assert host.is_cpu and other.device == x.device and x.sum().item() == 66
    assert torch.from_dlpack(np.ones(2), device=TPU).device == TPU
    assert torch.from_dlpack(jax.numpy.ones(2)).is_cpu
    with pytest.raises(ValueError, match="without copying"):
        torch.from_dlpack(x, device="cpu", copy=False)


@pytest.mark.parametrize(
    ("x", "what"),
    [
        (torch.ones(2, device=TPU, requires_grad=True), "require gradient"),
        (torch.ones(2, dtype=torch.complex64, device=TPU).conj(), "conjugate bit"),
        (torch.eye(2, device=TPU).to_sparse(), "layout"),
    ],
    ids=["gradient", "conjugated", "sparse"],
)
def test_what_no_capsule_can_say_is_refused(x: torch.Tensor, what: str) -> None:
    for take in (np.from_dlpack, torch.from_dlpack):
        with pytest.raises(BufferError, match=what):
            take(x)


def test_shared_memory_is_refused_to_others() -> None:
    with pytest.raises(BufferError, match="handed out as a copy"):
        matrix().__dlpack__(copy=False)
    with pytest.raises(BufferError, match="on it or on the host"):
        matrix().__dlpack__(dl_device=(2, 0))


def test_in_a_context_the_hosts_tensors_are_finished_first() -> None:
    with fused_eager():
        x = torch.ones(3) + 1
        assert np.from_dlpack(x.to(TPU) * 2).tolist() == [4, 4, 4] and np.from_dlpack(x).tolist() == [2, 2, 2]


@pytest.mark.parametrize("x", [matrix().t(), torch.tensor(3, device=TPU), matrix()[:0]], ids=["t", "number", "empty"])
def test_as_an_array_of_jaxs(x: torch.Tensor) -> None:
    found = array_of(x)
    assert found.shape == tuple(x.shape) and np.asarray(found).tolist() == x.tolist()
    assert str(found.dtype) == str(x.dtype).removeprefix("torch.")


def test_what_is_handed_out_is_where_the_tensor_is() -> None:
    """JAX computes with what a region has made on its default device, wherever that is: a reshape took it there."""
    last = torch.device(TPU.type, torch.tpu.device_count() - 1)  # type: ignore[attr-defined]
    for shape in ((3,), (1, 3), ()):
        found = array_of(torch.ones(shape, device=last) + 1)
        assert found.shape == shape and found.devices() == {DOORS[last.index].device.xla}
        assert found.tolist() == torch.full(shape, 2.0).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("cut", [lambda x: x, lambda x: x.t(), lambda x: x[1:, 2], lambda x: x[:0]], ids=str)
def test_a_copy_from_one_device_to_another(cut: object, dtype: torch.dtype) -> None:
    assert callable(cut)
    last = torch.device(TPU.type, torch.tpu.device_count() - 1)  # type: ignore[attr-defined]
    x = cut((matrix() % 5).to(dtype))
    there, into = x.to(last, copy=True), torch.zeros_like(cut(matrix().to(dtype).to(last)))
    into.copy_(x)
    expected = x.cpu()
    x.zero_()
    for found in (there, into):
        assert found.device == last and found.dtype == dtype and found.shape == expected.shape
        assert torch.equal(found.cpu().to(torch.complex64), expected.to(torch.complex64))
    assert there.stride() == expected.to("cpu", copy=True).stride()


def test_a_conjugate_goes_to_another_device_as_it_is_seen() -> None:
    last = torch.device(TPU.type, torch.tpu.device_count() - 1)  # type: ignore[attr-defined]
    x = torch.complex(matrix(), matrix() + 1)
    assert torch.equal(x.conj().to(last).cpu(), x.cpu().conj()) and torch.equal(x.mH.to(last).cpu(), x.cpu().mH)
    into = torch.zeros(3, 4, dtype=torch.complex64, device=last)
    into.copy_(x.conj())
    assert torch.equal(into.cpu(), x.cpu().conj())
