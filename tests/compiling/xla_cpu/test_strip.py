"""Strip: without the bodies of fusions an executable is smaller, and runs as it did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fused_eager.compiling.executable import Portable
from fused_eager.compiling.xla_cpu import finishing
from fused_eager.compiling.xla_cpu.strip import OPAQUE, strip
from fused_eager.log.events import LOG
from fused_eager.xla import device, enable_x64

CHEAP = 1000  # operations from which on XLA leaves a program to a thread of its own


def chain(x: jax.Array, y: jax.Array) -> Any:
    for i in range(10):
        x = jnp.where(x > 0.1 * i, x * 1.01 + y, jnp.exp(x) * 0.5)
    return x, x.sum(0), x.max()


def in_a_loop(x: jax.Array, y: jax.Array) -> Any:
    return jax.lax.fori_loop(0, 5, lambda i, a: jnp.sin(a) * y + jnp.tanh(a) / (i + 1), x)


def by_index(x: jax.Array, y: jax.Array) -> Any:
    rows = (y[:, 0] * 7).astype("int32") % x.shape[0]
    return x[rows] * 2 + 1, x.at[rows].add(jnp.cos(y) * 3 + 1), jnp.sort(x * y + y, 0), jnp.cumsum(x * y - 1, 1)


def in_place(x: jax.Array, y: jax.Array) -> Any:
    return jax.lax.dynamic_update_slice(x, jnp.exp(y[:2] * 2) + y[:2], (1, 0)), x[3] * 2 + 1


def products(x: jax.Array, y: jax.Array) -> Any:
    z = jnp.tanh(x @ y.T) * 2 + 1
    return z, jax.nn.softmax(z * 3 + z), jnp.linalg.cholesky(z @ z.T + 100 * jnp.eye(z.shape[0]))


def images(x: jax.Array, y: jax.Array) -> Any:
    image, kernel = x.reshape(1, 1, *x.shape), y[:3, :3].reshape(1, 1, 3, 3)
    out = jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME") * 2 + 1
    return jax.nn.relu(out), jax.lax.reduce_window(out * 3, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def made(function: Callable[..., Any], rows: int, dtype: str = "float32") -> tuple[Any, Any, list[np.ndarray]]:
    """A function of two arrays of (rows, rows) as JAX's two objects, and arguments for it."""
    with enable_x64(True):
        lowered = jax.jit(function).lower(*[jax.ShapeDtypeStruct((rows, rows), dtype)] * 2)
    rng = np.random.default_rng(0)
    return lowered, lowered.compile(), [rng.uniform(-1, 1, (rows, rows)).astype(dtype) for _ in range(2)]


def run(loaded: Any, arguments: list[np.ndarray]) -> list[bytes]:
    with enable_x64(True):
        arrays = [jax.device_put(a) for a in arguments]
    outputs = loaded.execute_sharded(arrays).disassemble_into_single_device_arrays()
    return [np.asarray(array).tobytes() for (array,) in outputs]


def instructions(loaded: Any) -> int:
    return sum(m.to_string().count(" = ") for m in loaded.hlo_modules())


@pytest.mark.parametrize("rows", [8, 96])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("function", [chain, in_a_loop, by_index, in_place, products, images])
def test_a_stripped_executable_computes_the_same_to_the_bit(function: Any, dtype: str, rows: int) -> None:
    if function is products and dtype == "bfloat16":
        dtype = "float32"  # LAPACK has no bfloat16
    lowered, compiled, arguments = made(function, rows, dtype)
    fresh = compiled.runtime_executable()
    loaded, portable = finishing.stripped(lowered, compiled, device())
    assert isinstance(portable, Portable) and OPAQUE in portable.code, "stripped"
    assert loaded is not fresh and instructions(loaded) < instructions(fresh)
    assert run(loaded, arguments) == run(fresh, arguments)


def test_most_of_a_long_chain_is_gone() -> None:
    lowered, compiled, _ = made(chain, 50)
    fresh, (loaded, portable) = compiled.runtime_executable(), finishing.stripped(lowered, compiled, device())
    assert isinstance(portable, Portable)
    assert instructions(loaded) < 0.4 * instructions(fresh)
    assert len(portable.code) < len(fresh.client.serialize_executable(fresh))


@pytest.mark.parametrize("rows", [2, 3, 4, 8, 30, 100])
def test_xla_runs_it_in_the_thread_in_which_it_would_run_the_whole_one(rows: int) -> None:
    """XLA decides by the operations that it counts, which are those of the bodies too."""
    lowered, compiled, _ = made(chain, rows)
    for each in (compiled.runtime_executable(), finishing.stripped(lowered, compiled, device())[0]):
        assert (each.cost_analysis()["flops"] >= CHEAP) == (rows > 4)


def test_what_has_no_body_stays_as_it_is() -> None:
    lowered, compiled, _ = made(lambda x, y: x + y, 8)
    fresh = compiled.runtime_executable()
    assert strip(fresh.client.serialize_executable(fresh), 64) is None
    loaded, portable = finishing.stripped(lowered, compiled, device())
    assert loaded is fresh and isinstance(portable, Portable)


@pytest.mark.parametrize("code", [b"", b"\x00", b"\xff" * 9, b"\x03abc", b"nonsense" * 99])
def test_what_is_no_executable_is_left_alone(code: bytes) -> None:
    assert strip(code, 0) is None


def test_stripping_twice_is_stripping_once() -> None:
    lowered, compiled, arguments = made(chain, 50)
    loaded, portable = finishing.stripped(lowered, compiled, device())
    assert isinstance(portable, Portable)
    again = strip(portable.code, loaded.cost_analysis()["flops"])
    assert again is None or run(Portable(again, ()).load(), arguments) == run(loaded, arguments)


def test_where_xla_does_not_load_it_the_whole_one_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered, compiled, arguments = made(chain, 50)
    monkeypatch.setattr(finishing, "strip", lambda code, flops: code[: len(code) // 2])
    told: list[str] = []
    monkeypatch.setattr(LOG, "count", told.append)
    loaded, portable = finishing.stripped(lowered, compiled, device())
    assert loaded is compiled.runtime_executable()
    assert isinstance(portable, Portable) and run(portable.load(), arguments) == run(loaded, arguments)
    assert [text.partition(":")[0] for text in told] == ["executables that are not stripped"]


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A version of jaxlib that no test has seen."""
    monkeypatch.setattr(finishing, "STRIPPED_WITH", ())
    jax.clear_caches()  # XLA cannot serialise a sort that has run, and JAX keeps the executable
    finishing.unstripped.cache_clear()
    yield
    finishing.unstripped.cache_clear()


def test_with_an_unknown_version_it_is_tried_once(unknown: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []
    monkeypatch.setattr(finishing, "strip", lambda code, flops: tried.append(flops) or strip(code, flops))
    assert [finishing.unstripped() for _ in range(2)] == ["", ""]
    assert len(tried) == 1


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (lambda code, flops: code[: len(code) // 2], "one that was tried raised "),
        (lambda code, flops: None, "nothing that is known is found in their bytes"),
    ],
)
def test_with_an_unknown_version_whole_ones_are_kept_where_that_fails(
    unknown: None, monkeypatch: pytest.MonkeyPatch, broken: Any, why: str
) -> None:
    monkeypatch.setattr(finishing, "strip", broken)
    told: list[str] = []
    monkeypatch.setattr(LOG, "count", told.append)
    lowered, compiled, _ = made(chain, 50)
    for _ in range(2):
        assert finishing.stripped(lowered, compiled, device())[0] is compiled.runtime_executable()
    assert [text.startswith(f"executables that are not stripped: {why}") for text in told] == [True, True]


def test_other_values_are_noticed(unknown: None, monkeypatch: pytest.MonkeyPatch) -> None:
    square = jax.ShapeDtypeStruct((48, 48), "float32")
    with enable_x64(True):
        other = jax.jit(lambda x, y: finishing._of_every_kind(x + 1, y)).lower(square, square)
        wrong = other.compile().runtime_executable()
    monkeypatch.setattr(finishing, "strip", lambda code, flops: wrong.client.serialize_executable(wrong))
    assert finishing.unstripped() == "one that was tried computed other values"
