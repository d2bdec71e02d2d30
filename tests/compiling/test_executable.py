"""Executables: called past JAX's checks they return the same, and as bytes they come back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from fused_eager.fusion_rules.xla_cpu import turning
from jax.experimental import layout

from fused_eager.compiling import executable
from fused_eager.compiling.executable import (
    Executable,
    Failure,
    NotPortable,
    RunCheck,
    Unloadable,
    direct,
    finalize,
    from_blobs,
    to_blobs,
)
from fused_eager.devices.host.device import HOST
from fused_eager.devices.host.housekeeping import HostHousekeeping
from fused_eager.xla import device, enable_x64

OUTPUTS = [(torch.float32, (4, 3)), (torch.bool, (4,)), (torch.bfloat16, ())]


def function(x: jax.Array, n: jax.Array) -> Any:
    return [x * 2, x.sum(1) > 0, x.max().astype(jnp.bfloat16)], jnp.stack([jnp.stack([n[0], n[0] + 1])] * 2)


def made(donated: tuple[int, ...] = ()) -> tuple[Any, Any]:
    with enable_x64(True):
        specs = [jax.ShapeDtypeStruct((4, 3), "float32"), jax.ShapeDtypeStruct((1,), "int64")]
        lowered = jax.jit(function, donate_argnums=donated, keep_unused=True).lower(*specs)
        return lowered, lowered.compile()


def arguments() -> list[jax.Array]:
    with enable_x64(True):
        return [jnp.arange(12, dtype=jnp.float32).reshape(4, 3) - 5, jnp.array([7], dtype=jnp.int64)]


def checked(call: Any) -> Executable:
    return Executable(call, (RunCheck(0, "IndexError", "a"), RunCheck(3, "ValueError", "b {value}")), 1.5, "it")


def same(got: Any, expected: Any) -> None:
    flat = [*got[0], got[1]], [*expected[0], expected[1]]
    for a, b in zip(*flat, strict=True):
        assert (a.dtype, a.shape, a.sharding) == (b.dtype, b.shape, b.sharding)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_the_direct_call_returns_what_jax_s_own_does() -> None:
    _, compiled = made()
    same(direct(compiled.runtime_executable(), OUTPUTS, 2, HOST)(*arguments()), compiled(*arguments()))


def test_donated_arguments_are_taken_and_refused_afterwards() -> None:
    _, compiled = made((0,))
    call, args = direct(compiled.runtime_executable(), OUTPUTS, 2, HOST), arguments()
    call(*args)
    assert args[0].is_deleted() and not args[1].is_deleted()
    with pytest.raises(RuntimeError, match="deleted or donated"):
        call(*args)


def test_arguments_of_other_sizes_are_refused() -> None:
    call, args = direct(made()[1].runtime_executable(), OUTPUTS, 2, HOST), arguments()
    for wrong in ([args[0][:2], args[1]], args[:1], [*args, args[1]]):
        with pytest.raises(RuntimeError, match="INVALID_ARGUMENT"):
            call(*wrong)


def test_bytes_come_back() -> None:
    lowered, compiled = made((0,))
    blobs = to_blobs(finalize(lowered, compiled, device())[1], checked(None))
    again = from_blobs(blobs, OUTPUTS, "it", HOST)
    assert isinstance(again, Executable)
    assert (again.checks, again.seconds, again.name) == (checked(None).checks, 1.5, "it")
    args = arguments()
    same(again.call(*args), compiled(*arguments()))
    assert args[0].is_deleted()


def test_a_failure_comes_back() -> None:
    failure = Failure(3, "it has no lowering")
    assert from_blobs(executable.failure_blobs(failure), [], "", HOST) == failure


def test_a_region_that_asks_for_an_order_in_memory_comes_back() -> None:
    """What it asks XLA with looks like a call out of it, and is gone when it is compiled."""
    shape = (4, 3, 5, 5)

    def by_pixels(x: jax.Array) -> Any:
        return [x + 1, turning.in_pixels(x * 2)], jnp.zeros((1, 2), jnp.int64)

    with enable_x64(True):
        lowered = jax.jit(by_pixels).lower(jax.ShapeDtypeStruct(shape, "float32"))
    blobs = to_blobs(finalize(lowered, lowered.compile(), device())[1], checked(None))
    outputs = [(torch.float32, shape), (torch.float32, (4, 5, 5, 3))]
    loaded = from_blobs(blobs, outputs, "it", HOST)
    assert isinstance(loaded, Executable)
    x = np.arange(300, dtype="float32").reshape(shape)
    np.testing.assert_array_equal(loaded.call(jnp.asarray(x))[0][1], x.transpose(0, 2, 3, 1) * 2)


def test_what_does_not_lie_by_rows_is_refused() -> None:
    """It would be read in another order than it was written in."""
    formats = getattr(layout, "Format", layout.Layout)  # jax 0.6 has another `Layout`
    by_rows, other = [
        formats(turning._ORDER(order), jax.sharding.SingleDeviceSharding(device()))
        for order in ((0, 1, 2, 3), (3, 2, 1, 0))
    ]
    with enable_x64(True):
        function = jax.jit(lambda x: [x + 1, x * 2], out_shardings=[by_rows, other])
        lowered = function.lower(jax.ShapeDtypeStruct((4, 3, 5, 5), "float32"))
    with pytest.raises(RuntimeError, match=r"output 1 out in memory by the dimensions \(3, 2, 1, 0\), not by rows"):
        finalize(lowered, lowered.compile(), device())


def test_python_callbacks_are_not_portable() -> None:
    shape = jax.ShapeDtypeStruct((2,), "float32")
    lowered = jax.jit(lambda x: jax.pure_callback(lambda a: a, shape, x)).lower(shape)
    with pytest.raises(NotPortable, match="callback"):
        to_blobs(finalize(lowered, lowered.compile(), device())[1], checked(None))


@pytest.mark.parametrize("code", [b"", b"nonsense", None])
def test_what_is_no_machine_code_is_unloadable(code: bytes | None) -> None:
    lowered, compiled = made()
    blobs = to_blobs(finalize(lowered, compiled, device())[1], checked(None))
    blobs["executable"] = blobs["executable"][: len(blobs["executable"]) // 2] if code is None else code
    with pytest.raises(Unloadable):
        from_blobs(blobs, OUTPUTS, "", HOST)


def test_the_device_is_told_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a region that was never planned, as an op of the program's own in JAX is."""
    told: list[object] = []
    monkeypatch.setattr(HostHousekeeping, "loaded", lambda self: told.append(self))
    direct(made()[1].runtime_executable(), OUTPUTS, 2, HOST)
    assert told == [HOST.housekeeping]
