"""A device whose memory is not the host's: how values get there and back, and how a lack of memory is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from fused_eager.fusion_rules.spec import JAX_DTYPE

from fused_eager.compiling import surroundings
from fused_eager.compiling.executable import NotPortable, families_of
from fused_eager.devices import accelerator
from fused_eager.devices.accelerator import LITTLE, Accelerator
from fused_eager.devices.buffer import Table
from fused_eager.devices.exhausted import out_of_memory


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    """One that takes the host for another device, as a GPU does."""
    found = Accelerator("tpu", 0, jax.devices("cpu")[0])
    monkeypatch.setattr(found, "_is_host", False)
    return found


@pytest.mark.parametrize("dtype", list(JAX_DTYPE), ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (LITTLE // 4, 5)], ids=str)
def test_all_bits_go_there_and_come_back(dtype: torch.dtype, shape: tuple[int, ...], apart: Accelerator) -> None:
    t = torch.randint(0, 2, shape).to(dtype)
    array = apart.put(t)
    assert array.dtype == JAX_DTYPE[dtype]
    back = apart.fetch(array)
    assert back.dtype is dtype and back.shape == t.shape
    assert bytes(back.flatten().view(torch.uint8)) == bytes(t.flatten().view(torch.uint8))


def test_jax_is_told_of_64_bits_where_it_would_narrow_them(apart: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two backends it does so unless x64 is on; between two of the CPU's it does not."""
    told: list[bool] = []

    def device_put(x: Any, to: Any) -> Any:
        told.append(jax.config.jax_enable_x64)
        return x

    monkeypatch.setattr(accelerator, "jax", SimpleNamespace(device_put=device_put))
    apart.fetch(apart.put(torch.arange(LITTLE)))
    assert told == [True, True]


def test_what_checks_have_found_is_on_its_way(apart: Accelerator) -> None:
    sent: list[str] = []
    array: Any = SimpleNamespace(copy_to_host_async=lambda: sent.append("flags"))
    apart.send(array)
    assert sent == ["flags"]
    apart._is_host = True
    apart.send(array)
    assert sent == ["flags"]


@pytest.mark.parametrize(
    "said, told",
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 256.00TiB with allocator GPU_0_bfc", "256.00 TiB"),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4096 bytes.", "4.00 KiB"),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2097152 bytes", "2.00 MiB"),
        ("Out of memory allocating 1.50GiB.", "1.50 GiB"),
    ],
)
def test_how_much_was_asked_for_is_told_in_whatever_words(said: str, told: str) -> None:
    text = str(out_of_memory(RuntimeError(said), "tpu:0", Table(), "an op"))
    assert text.startswith(f"tpu:0 out of memory. Tried to allocate {told}. It was for an op.")


def test_the_key_of_a_gpu_names_the_chip_and_not_the_hosts_processor() -> None:
    class Gpu:
        platform, device_kind, compute_capability = "gpu", "NVIDIA H200", "9.0"
        client = SimpleNamespace(platform_version="cuda 13000")

    found = surroundings._of_process(Gpu())
    assert found["backend"] == {"platform": "gpu", "version": "cuda 13000", "device": "NVIDIA H200"}
    assert found["chip"] == "9.0" and isinstance(found["libraries"], dict)
    assert not {"cpu", "threads", "topology"} & set(found)


def test_what_a_program_calls_comes_with_the_platform_unless_it_is_a_callback() -> None:
    def lowered(*targets: str) -> Any:
        return SimpleNamespace(as_text=lambda: "".join(f"stablehlo.custom_call @{t}(%0)\n" for t in targets))

    assert families_of(lowered("cusolver_getrf_ffi", "__cudnn$convForward"), "gpu") == ()
    with pytest.raises(NotPortable, match="cusolver"):
        families_of(lowered("cusolver_getrf_ffi"), "cpu")
    for platform in ("gpu", "tpu", "cpu"):
        with pytest.raises(NotPortable, match="xla_ffi_python_cpu_callback"):
            families_of(lowered("xla_ffi_python_cpu_callback"), platform)


def test_a_small_value_is_a_copy_of_its_own(apart: Accelerator) -> None:
    array = jax.numpy.asarray(np.arange(4, dtype=np.float32))
    t = apart.fetch(array)
    t[0] = 7
    assert float(array[0]) == 0


def test_an_error_that_is_not_of_memory_is_raised_as_it_is(apart: Accelerator) -> None:
    def failing() -> None:
        try:
            raise RuntimeError("INTERNAL: no such kernel")
        except RuntimeError as error:
            apart.fail(error, "an op")

    with pytest.raises(RuntimeError, match="no such kernel") as raised:
        failing()
    assert raised.value.__cause__ is None and apart.account.exhausted == 0
