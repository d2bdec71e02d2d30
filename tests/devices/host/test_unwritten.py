"""Unwritten memory: pending tensors of some size take none, look like any other, and get some before they are used."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch
from fused_eager.fusion_rules.spec import JAX_DTYPE

from fused_eager import fused_eager, sync
from fused_eager.devices.buffer import LOCK
from fused_eager.devices.dlpack import to_array
from fused_eager.devices.host import buffers, heap, trap, unwritten
from fused_eager.devices.storage import storage_of
from fused_eager.xla import device

N = unwritten.LEAST // 4  # floats


def lies_nowhere(t: torch.Tensor) -> bool:
    """Whether a pending tensor has no memory of its own."""
    storage = storage_of(t)
    assert trap.is_armed(storage)
    trap.disarm(storage)
    try:
        return unwritten.holds(storage)
    finally:
        trap.arm(storage)


@pytest.mark.parametrize("dtype", list(JAX_DTYPE), ids=str)
def test_it_is_a_tensor_like_any_other(dtype: torch.dtype) -> None:
    for shape, strides in (((N, 4), (4, 1)), ((4, N), (1, 4)), ((4, N), (N + 3, 1)), ((N, 1, 2, 2), (4, 4, 2, 1))):
        like = torch.empty_strided(shape, strides, dtype=dtype)
        t = unwritten.tensor(shape, strides, dtype, storage_of(like).nbytes())
        assert lies_nowhere(t)
        assert (t.shape, t.stride(), t.dtype, t.device) == (like.shape, like.stride(), like.dtype, like.device)
        assert (t.storage_offset(), t._version, t.requires_grad) == (0, 0, False) and not t._is_view()
        assert storage_of(t).nbytes() == storage_of(like).nbytes()
        with pytest.raises(RuntimeError, match="data pointer"):
            t.data_ptr()


def test_small_tensors_have_memory_of_their_own() -> None:
    assert not lies_nowhere(unwritten.tensor((N - 1,), (1,), torch.float32, 4 * (N - 1)))
    assert lies_nowhere(unwritten.tensor((N,), (1,), torch.float32, 4 * N))


def test_where_no_addresses_can_be_reserved_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unwritten, "address", lambda: 0)
    monkeypatch.setattr(unwritten, "_described", {})
    t = unwritten.tensor((N,), (1,), torch.float32, 4 * N)
    assert not lies_nowhere(t)
    trap.disarm(storage_of(t))
    assert torch.equal(t.fill_(2), torch.full((N,), 2.0))


def test_there_may_be_more_kinds_than_descriptions_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unwritten, "_described", {})
    monkeypatch.setattr(unwritten, "KEPT", 2)
    made = [unwritten.tensor((N + k, 2), (2, 1), torch.float32, 8 * (N + k)) for k in range(8)]
    assert all(map(lies_nowhere, made)) and [t.shape[0] - N for t in made] == list(range(8))
    assert len(unwritten._described) == 2
    del made  # each reads its description once more
    gc.collect()


def test_an_inference_tensor_is_one() -> None:
    with torch.inference_mode():
        assert unwritten.tensor((N,), (1,), torch.float32, 4 * N).is_inference()
    x = torch.ones(N)
    with fused_eager(), torch.inference_mode():
        y = x * 2
        assert y.is_inference() and lies_nowhere(y)


def test_values_come_to_memory_before_anybody_sees_them() -> None:
    x = torch.arange(4.0 * N).view(4, N)
    with fused_eager():
        y, z = (x * 2).t(), x + 1
        assert lies_nowhere(y) and lies_nowhere(z)
        z[1].mul_(3)
        view = z[1:3]
        assert lies_nowhere(view)
    assert torch.equal(y, (x * 2).t()) and torch.equal(view, torch.stack([(x[1] + 1) * 3, x[2] + 1]))
    y.add_(1)  # by plain torch, after the context
    assert torch.equal(y, (x * 2 + 1).t())


def test_random_numbers_are_drawn_into_memory() -> None:
    x = torch.ones(N)
    torch.manual_seed(0)
    expected = torch.empty(N).uniform_()
    torch.manual_seed(0)
    with fused_eager():
        y = x * 2
        assert lies_nowhere(y)
        y.uniform_()
        assert torch.equal(y, expected)


def test_a_lost_tensor_that_is_overwritten_gets_memory() -> None:
    x, wrong = torch.ones(N), torch.tensor([N])
    with fused_eager():
        y = x.index_select(0, wrong).expand(N) * 2
        assert lies_nowhere(y)
        with pytest.raises(IndexError):
            y.sum().item()
        y.copy_(x)
        z = y * 3
        assert torch.equal(z, x * 3)
    assert torch.equal(y, x)


@pytest.mark.parametrize("born_native", [False, True])
@pytest.mark.parametrize("rest", [0, 64])
def test_whatever_is_bound_has_memory(born_native: bool, rest: int) -> None:
    """Also where the value does not fill the storage."""
    value = torch.arange(float(N))
    t = unwritten.tensor((N + rest,), (1,), torch.float32, 4 * (N + rest))
    with LOCK:
        buffer = buffers.HostBuffer(storage_of(t), born_native)
        buffers.TABLE[buffer.cdata] = buffer
        buffer.array = to_array(value, device())
        buffer.bind()
    assert torch.equal(t[:N], value) and not unwritten.holds(storage_of(t))
    t += 1
    assert torch.equal(t[:N], torch.arange(float(N)) + 1)


def test_pending_values_take_no_memory() -> None:
    x = torch.ones(4 << 20)
    with fused_eager():
        sync()
        gc.collect()
        before = heap.resident()
        kept = [x * k for k in range(64)]  # a gigabyte, once computed
        assert all(map(lies_nowhere, kept))
        assert heap.resident() - before < 64 << 20
        del kept


def test_touching_it_without_torch_ends_the_process_and_reads_nothing() -> None:
    program = (
        "import ctypes, torch\n"
        "from fused_eager.devices.host import unwritten\n"
        f"t = unwritten.tensor(({N},), (1,), torch.float32, {4 * N})\n"
        "print(ctypes.string_at(unwritten.address(), 4))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode < 0 and not done.stdout
