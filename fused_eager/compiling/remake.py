"""Remaking: the region in a key is compiled again, to prove an entry or to warm a cache for this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch

from fused_eager.cache import Key, Miss
from fused_eager.fusion_rules import precision
from fused_eager.fusion_rules.deferred import jax
from fused_eager.fusion_rules.spec import JAX_DTYPE

from ..devices.device import Device
from ..devices.host.device import HOST
from ..lowering.failed import NodeFailed
from ..planning.room import wanted
from ..quiet import default_dtype
from ..xla import device, enable_x64
from . import surroundings
from .caching import Keeper
from .canonical import to_computation
from .compile import build
from .executable import Executable, Failure, Unloadable, from_blobs, to_blobs


def _default_dtype(key: Key) -> AbstractContextManager[None]:
    """The default dtype that was set when the key was made."""
    return default_dtype(getattr(torch, key.parts["numerics"]["default_dtype"].removeprefix("torch.")))


@contextmanager
def as_asked(key: Key) -> Iterator[None]:
    """In the body, torch's switches that lowering reads are those of the key."""
    wanted = key.parts["numerics"]
    with _default_dtype(key), precision.as_of(tuple((name, wanted[name]) for name, _ in precision.switches())):
        yield


def key_here(key: Key, salt: str | None = None, device: Device = HOST) -> Key:
    """The key that this process, now, would give the same region with the same options (the salt: unless given).

    Raises:
        ValueError: the key is not one of a region, or one of a region of an accelerator, which is remade there alone.
        Unencodable: as `surroundings.parts`.
    """
    if "memory" in key.parts and device.has_memory:
        raise ValueError("made for an accelerator: it is remade by a program that uses one")
    salt = key.parts["salt"] if salt is None else salt
    try:
        with _default_dtype(key):
            around = surroundings.parts(key.parts["check_bounds"], salt, device)
        return Key({"region": key.parts["region"], **around})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not the key of a region: {error}") from error


def prove(key: Key, blobs: Mapping[str, bytes], rounds: int = 3) -> str:
    """Compile the region of an entry again, and compare what both compute on the same random inputs, bit for bit.

    Returns:
        "" where they agree; else what differs, or why it cannot be said.
    """
    try:
        if key_here(key) != key:
            return "made by another version or for another machine: it cannot be remade here"
        computation = to_computation(key.parts["region"])
        region, homes = computation.region, computation.homes
        outputs = [homes[v] for v in region.outputs]
        kept = from_blobs(blobs, outputs, "kept", HOST, wanted(region, homes, HOST))
        with _default_dtype(key):
            made = build(computation, key.parts["check_bounds"]).executable
    except NodeFailed as failed:
        same = isinstance(kept, Failure) and (kept.node, kept.reason) == (failed.index, failed.reason)
        return "" if same else f"it cannot be compiled: {failed.reason}"
    except (ValueError, Unloadable) as error:
        return str(error)
    if isinstance(kept, Failure):
        return "it says that it cannot be compiled, and it can"
    if kept.checks != made.checks:
        return f"its checks are {kept.checks}, those of the remade one {made.checks}"
    kinds = computation.kinds
    shapes = [(JAX_DTYPE[homes[v][0]], homes[v][1]) for v in region.inputs]
    for seed in range(rounds):
        inputs = [_fill(np.random.default_rng([seed, i]), *shape) for i, shape in enumerate(shapes)]
        rng = np.random.default_rng(seed)
        inputs.append(rng.uniform(0.1, 2, kinds.count(float)))
        inputs.append(rng.integers(0, 2, kinds.count(int)))
        try:
            first = _run(kept, inputs)
        except RuntimeError as error:  # XLA's: it takes other arguments
            return f"it cannot be run: {str(error)[:200]}"
        second = _run(made, inputs)
        for number, (a, b) in enumerate(zip(first, second, strict=True)):
            if a != b:
                what = f"output {number}" if number < len(outputs) else "the flags"
                return f"{what} differs from that of the remade one"
    return ""


def _fill(rng: np.random.Generator, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    if dtype.kind in "iub":
        return rng.integers(0, 2, shape).astype(dtype)  # small: they may be indices
    values = rng.standard_normal(shape)
    return (values + 1j * rng.standard_normal(shape) if dtype.kind == "c" else values).astype(dtype)


def _run(executable: Executable, inputs: list[np.ndarray]) -> list[bytes]:
    with enable_x64(True):
        # may_alias: a donated argument must not be the array that the next executable gets
        arrays = [jax.device_put(a, device(), may_alias=False) for a in inputs]
    outputs, flags = executable.call(*arrays)
    return [np.asarray(a).tobytes() for a in [*outputs, flags]]


def warm(keeper: Keeper, key: Key) -> str:
    """Make the entry that this process would look for where another one met the region of `key`.

    Returns:
        What was done: "there already", "compiled", or "failed: " and why.
    """
    try:
        here = key_here(key, keeper.salt)
        keeper.describe_here()
        if not isinstance(keeper.cache.spread(here), Miss):  # in the shared stores as well
            return "there already"
        computation = to_computation(key.parts["region"])
        with _default_dtype(key):
            made = build(computation, key.parts["check_bounds"])
        blobs = to_blobs(made.portable, made.executable)
    except Exception as error:  # one region of many: the others are worth going on
        return f"failed: {error}"
    keeper.cache.publish(here, blobs, metadata={"seconds": made.executable.seconds})
    return "compiled"
