"""Executables: what XLA made of a region, as a thing to call, to keep as bytes, and to load again.

Calling goes past `jax.stages.Compiled`: what a region takes and returns was checked when it was planned, and checking
it again costs a quarter of the call's time. Bytes hold XLA's own serialisation of machine code and a JSON text with
the rest, never a pickle; whoever loads them must have verified where they came from.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fused_eager.fusion_rules import lapack
from fused_eager.fusion_rules.deferred import jax, xla_client
from fused_eager.fusion_rules.platforms import lowering_for, variants
from fused_eager.fusion_rules.spec import JAX_DTYPE

from ..devices.device import Device
from ..devices.home import Home, nbytes_of
from ..xla import assigned, device, enable_x64

FORMAT = 1  # of the blobs; part of every key


@dataclass(frozen=True, slots=True)
class RunCheck:
    """What a row of a region's flags means: the node (its position in the region), and eager's error."""

    node: int
    error: str
    message: str


@dataclass(frozen=True, eq=False)
class Executable:
    """A compiled region: `call(*inputs, floats, ints)` returns (outputs, flags). `seconds` is what compiling took.

    `key` is the digest of its key in the compile cache; empty where it has none. `needs` are the bytes that a call
    takes beside its arguments, for results and temporaries; 0 where XLA does not say. One that `is_shared` has memory
    of its own, and is called by one thread at a time: under the runtime's lock. The arguments at `tensors` may be
    tensors of the host, which it copies. `code` is what was compiled in this process, for another device of the kind.
    """

    call: Callable[..., Any]
    checks: tuple[RunCheck, ...]
    seconds: float
    name: str
    key: str = ""
    needs: int = 0
    is_shared: bool = False
    tensors: frozenset[int] = frozenset()
    code: Portable | None = None


class NotPortable(Exception):
    """An executable that cannot be kept as bytes; the text says why."""


class Abandoned(BaseException):
    """The program ends, and what it wanted to be compiled is wanted no more. No error that anybody handles."""


class Unavailable(Exception):
    """It has to be compiled in this process; the text says why, where that is worth telling."""


class Unloadable(Exception):
    """Verified bytes that are no executable for this process; the text says why."""


@dataclass(frozen=True, slots=True)
class Portable:
    """An executable as XLA's own bytes, and the families of functions that must be there before it is loaded."""

    code: bytes
    families: tuple[str, ...]

    def load(self, on: Any = None) -> Any:
        """XLA's executable, to be called by `direct`, on a device of another client if one is given.

        Raises:
            KeyError: an unknown family.
            RuntimeError: what XLA raises where the bytes are none of its own.
        """
        for family in self.families:
            _PREPARE[family]()
        on = on or device()
        # What it was compiled for is written in it: on another device of the kind it is told so. (Where the client has
        # several processes' devices, another one may have compiled it.)
        is_told = on is not device() or on.client.device_count() > on.client.local_device_count()
        options = {"compile_options": assigned(on)} if is_told else {}
        devices = xla_client._xla.DeviceList((on,))
        return on.client.deserialize_executable(self.code, executable_devices=devices, **options)


@dataclass(frozen=True, slots=True)
class Made:
    """A fresh compilation: the executable, JAX's object that it came from, its bytes or why there are none, the seconds
    in JAX, how its rows were cut into blocks, in words, and whether it was compiled in a process of its own."""

    executable: Executable
    lowered: Any
    portable: Portable | NotPortable
    tracing: float
    blocks: str = ""
    in_subprocess: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """Instead of an executable: the node (its position in the region) that has no lowering after all, and why."""

    node: int
    reason: str


def direct(
    loaded: Any, outputs: Sequence[Home], rows: int, of: Device, scratch: Sequence[Home] = ()
) -> Callable[..., tuple[list[jax.Array], jax.Array]]:
    """The call of a loaded executable that returns `outputs` and `rows` rows of flags (one of zeros where it has none).

    It runs on the device `of`, and asks that for the `scratch` memory that it takes beside its arguments.

    Nothing is checked but what XLA checks by itself: the number and the sizes of the arguments, and that none has been
    donated before.
    """
    sharding = jax.sharding.SingleDeviceSharding(of.xla)

    def handler(shape: tuple[int, ...], dtype: np.dtype) -> Any:
        aval = jax.core.ShapedArray(shape, dtype)
        return xla_client._xla.array_result_handler(aval, sharding, committed=False, **_unchecked())

    with enable_x64(True):
        handlers = [handler(shape, JAX_DTYPE[dtype]) for dtype, shape in outputs]
        handlers.append(handler((max(rows, 1), 2), np.dtype(np.int64)))
    execute = loaded.execute_sharded
    of.housekeeping.loaded()

    def call(*arrays: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        if scratch:
            arrays = (*arrays, *of.scratch(scratch))
        made = execute(arrays).consume_with_handlers(handlers)
        flags = made.pop()
        return made, flags

    return call


def loaded_for(found: Executable, outputs: Sequence[Home], of: Device, scratch: Sequence[Home]) -> Executable | None:
    """What was compiled in this process, on another device of the kind; None where it was not."""
    if found.code is None:
        return None
    loaded = found.code.load(of.xla)
    return replace(found, call=direct(loaded, outputs, len(found.checks), of, scratch))


def needs(loaded: Any) -> int:
    """The bytes that a call of a loaded executable takes beside its arguments; 0 where XLA does not say."""
    try:
        about = loaded.get_compiled_memory_stats()
        return max(about.temp_size_in_bytes + about.output_size_in_bytes - about.alias_size_in_bytes, 0)
    except (AttributeError, RuntimeError):
        return 0


@variants
def misfit(loaded: Any, takes: int, returns: int) -> str:
    """In what a loaded executable is another than one that takes and returns so many bytes, in words; "" where it is
    none, or XLA does not say."""
    return ""


def misfit_on(of: Device, loaded: Any, takes: int, outputs: Sequence[Home], rows: int) -> str:
    """The same on a device, of one that returns `outputs` and so many rows of flags."""
    with lowering_for(of.xla.platform):
        return misfit(loaded, takes, nbytes_returned(outputs, rows))


def nbytes_returned(outputs: Sequence[Home], rows: int) -> int:
    """The bytes that an executable returns: `outputs` and `rows` rows of flags, and where there are several results the
    address of each."""
    flags: Home = torch.int64, (max(rows, 1), 2)
    return sum(map(nbytes_of, (*outputs, flags))) + (_ADDRESS * (len(outputs) + 1) if outputs else 0)


_ADDRESS = np.dtype(np.uintp).itemsize


@functools.cache
def _unchecked() -> dict[str, bool]:
    """What keeps jaxlib from looking at the shape of each result, until 0.11: later ones do not look."""
    return {"_skip_checks": True} if "_skip_checks" in (xla_client._xla.array_result_handler.__doc__ or "") else {}


def nothing() -> None:
    """What is to be done for functions of XLA's own."""


# What calls out of XLA's own code, by the beginnings of the names. A finished executable finds these functions only in
# a process that has registered them, and jumps to address 0 elsewhere: what is in no row is not kept.
_PREPARE: dict[str, Callable[[], None]] = {
    "lapack_": lapack.prepare,
    "mhlo.": nothing,
    "chlo.": nothing,
    "TopK": nothing,
    "Sharding": nothing,
    "LayoutConstraint": nothing,  # the compiler has taken it out
}
_CUSTOM_CALL = re.compile(r"custom_call @([\w.]+)")


def _family(target: str) -> str | None:
    return next((family for family in _PREPARE if target.startswith(family)), None)


def calls_out(families: tuple[str, ...]) -> bool:
    """Whether functions of some families are not XLA's own."""
    return any(_PREPARE[family] is not nothing for family in families)


@variants
def finalize(lowered: Any, compiled: Any, on: Any) -> tuple[Any, Portable | NotPortable]:
    """What JAX's `Lowered` and `Compiled` of a region have come to on a device of JAX's: the executable to be called,
    and its bytes."""
    fresh = compiled.runtime_executable()
    try:
        return fresh, as_portable(lowered, fresh, on.platform)
    except NotPortable as why:
        return fresh, why


@variants
def get_ready(nice: int) -> None:
    """Something is about to be traced, and compiled in a process of its own if that can be."""


@variants
def made_in_subprocess(lowered: Any, nice: int, on: Any) -> tuple[Any, Portable]:
    """The same, made by XLA in a process of its own.

    Raises:
        Unavailable: it has to be compiled in this process, and why.
    """
    raise Unavailable("")


def as_portable(lowered: Any, fresh: Any, platform: str) -> Portable:
    """What XLA has compiled for a platform, as bytes. Raises NotPortable."""
    families = families_of(lowered, platform)
    try:
        # What was compiled for a target belongs to no client, and writes itself.
        code = fresh.client.serialize_executable(fresh) if hasattr(fresh, "client") else fresh.serialize()
    except Exception as error:  # XLA's own error types differ from version to version
        raise NotPortable(f"XLA cannot serialise it: {str(error)[:200]}") from error
    return Portable(code, families)


@variants
def brought_along(targets: list[str]) -> list[str]:
    """Those of the functions that a program calls, by name, which the process has to have. What else there is to call
    comes with the platform, or its compiler knows it by name."""
    return [t for t in targets if "callback" in t]


def families_of(lowered: Any, platform: str) -> tuple[str, ...]:
    """The families of the functions that a program calls. Raises NotPortable where one is in none."""
    with lowering_for(platform):
        targets = brought_along(sorted(set(_CUSTOM_CALL.findall(lowered.as_text()))))
    foreign = [t for t in targets if _family(t) is None]
    if foreign:
        raise NotPortable(f"it calls {', '.join(foreign)}, which another process may not have")
    return tuple(sorted({family for t in targets if (family := _family(t))}))


def to_blobs(portable: Portable | NotPortable, executable: Executable) -> dict[str, bytes]:
    """An executable as the blobs of a cache entry.

    Raises:
        NotPortable: it calls into this process, or XLA cannot serialise it.
    """
    if isinstance(portable, NotPortable):
        raise portable
    checks = [[c.node, c.error, c.message] for c in executable.checks]
    about = _text(checks=checks, families=portable.families, seconds=executable.seconds)
    return {"executable": portable.code, "about": about}


def failure_blobs(failure: Failure) -> dict[str, bytes]:
    """What keeps the next process from trying the same in vain."""
    return {"about": _text(failed=[failure.node, failure.reason])}


def _text(**about: Any) -> bytes:
    return json.dumps({"format": FORMAT, **about}).encode()


def from_blobs(
    blobs: Mapping[str, bytes],
    outputs: Sequence[Home],
    name: str,
    of: Device,
    scratch: Sequence[Home] = (),
    takes: int | None = None,
) -> Executable | Failure:
    """What the verified blobs of a cache entry hold, to be run on the device `of`. Neither traces nor lowers.

    `takes` are the bytes of its arguments, where they are known.

    Raises:
        Unloadable: nothing that this process can run, or none that takes and returns so much.
    """
    try:
        about = json.loads(blobs["about"])
        if about["format"] != FORMAT:
            raise Unloadable(f"format {about['format']}, this version reads {FORMAT}")
        if "failed" in about:
            return Failure(int(about["failed"][0]), str(about["failed"][1]))
        checks = tuple(RunCheck(int(node), str(error), str(message)) for node, error, message in about["checks"])
        loaded = Portable(blobs["executable"], tuple(about["families"])).load(of.xla)
        if takes is not None and (wrong := misfit_on(of, loaded, takes, outputs, len(checks))):
            raise Unloadable(wrong)
        call = direct(loaded, outputs, len(checks), of, scratch)
        return Executable(call, checks, float(about["seconds"]), name, needs=needs(loaded))
    except (KeyError, IndexError, ValueError, TypeError, RuntimeError) as error:
        # RuntimeError is what XLA raises: JaxRuntimeError is one.
        raise Unloadable(f"{type(error).__name__}: {str(error)[:200]}") from error
