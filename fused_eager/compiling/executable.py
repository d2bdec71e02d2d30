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

import jaxlib
import numpy as np

from fused_eager.fusion_rules import lapack
from fused_eager.fusion_rules.deferred import jax, xla_client
from fused_eager.fusion_rules.spec import JAX_DTYPE

from ..devices.home import Home
from ..devices.host.heap import keep_blocks
from ..devices.host.scratch import SCRATCH
from ..log.events import LOG
from ..xla import assigned, bytecode, device, enable_x64, options, with_libraries
from .strip import strip
from .subprocess_compiler import COMPILER, Refused, Unavailable

FORMAT = 1  # of the blobs; part of every key
STRIPPED_WITH = ("0.6.2", "0.10.2", "0.11.2", "0.12.0.1")  # versions of jaxlib with which all tests of it have run


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
    takes beside its arguments, for results and temporaries; 0 where XLA does not say.
    """

    call: Callable[..., Any]
    checks: tuple[RunCheck, ...]
    seconds: float
    name: str
    key: str = ""
    needs: int = 0


class NotPortable(Exception):
    """An executable that cannot be kept as bytes; the text says why."""


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
        # What it was compiled for is written in it: on another device of the kind it is told so.
        options = {"compile_options": assigned(on)} if on is not device() else {}
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
    loaded: Any, outputs: Sequence[Home], rows: int, scratch: Sequence[Home] = (), on: Any = None
) -> Callable[..., tuple[list[jax.Array], jax.Array]]:
    """The call of a loaded executable that returns `outputs` and `rows` rows of flags (one of zeros where it has none).

    It finds the `scratch` memory that it takes beside its arguments by itself, and runs on the device `on`.

    Nothing is checked but what XLA checks by itself: the number and the sizes of the arguments, and that none has been
    donated before.
    """
    sharding = jax.sharding.SingleDeviceSharding(on or device())

    def handler(shape: tuple[int, ...], dtype: np.dtype) -> Any:
        aval = jax.core.ShapedArray(shape, dtype)
        return xla_client._xla.array_result_handler(aval, sharding, committed=False, **_unchecked())

    with enable_x64(True):
        handlers = [handler(shape, JAX_DTYPE[dtype]) for dtype, shape in outputs]
        handlers.append(handler((max(rows, 1), 2), np.dtype(np.int64)))
    execute = loaded.execute_sharded
    keep_blocks()

    def call(*arrays: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        if scratch:
            arrays = (*arrays, *[SCRATCH.take(home) for home in scratch])
        made = execute(arrays).consume_with_handlers(handlers)
        flags = made.pop()
        return made, flags

    return call


def needs(loaded: Any) -> int:
    """The bytes that a call of a loaded executable takes beside its arguments; 0 where XLA does not say."""
    try:
        about = loaded.get_compiled_memory_stats()
        return max(about.temp_size_in_bytes + about.output_size_in_bytes - about.alias_size_in_bytes, 0)
    except (AttributeError, RuntimeError):
        return 0


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


def made_in_subprocess(lowered: Any, nice: int, on: Any = None) -> tuple[Any, Portable]:
    """What XLA makes of JAX's `Lowered` of a region in a process of its own: the executable, and its bytes.

    Raises:
        Unavailable: it has to be compiled in this process, and why.
        JaxRuntimeError: XLA cannot compile it.
        RuntimeError: as `settle`; or the process ended.
    """
    try:
        families = _families(lowered)
    except NotPortable as why:
        raise Unavailable("") from why  # what it calls is in this process
    if any(_PREPARE[family] is not nothing for family in families) or (on or device()).platform != "cpu":
        raise Unavailable("")
    problem = unstripped()

    def compile(library: dict[str, str]) -> bytes:
        try:
            return COMPILER.compile(program, options(library), not problem, nice)
        except Refused as error:
            raise jax.errors.JaxRuntimeError(str(error)) from None

    try:
        program = bytecode(lowered)
        options({})
    except (AttributeError, TypeError, ImportError) as error:
        raise Unavailable(f"this version of JAX is not known: {error}") from error
    portable = Portable(with_libraries(compile), families)
    try:
        loaded = portable.load(on)
    except RuntimeError as error:
        raise Unavailable(f"what was compiled apart cannot be loaded: {str(error)[:200]}") from error
    _check_order(loaded)
    return loaded, portable


def settle(lowered: Any, compiled: Any, on: Any = None) -> tuple[Any, Portable | NotPortable]:
    """What JAX's `Lowered` and `Compiled` of a region have come to: the executable to be called, and its bytes.

    What is called was loaded from the bytes, as in every other process, for they are stripped, and what XLA has just
    compiled keeps three times as much memory.

    Raises:
        RuntimeError: it takes or returns an array that lies otherwise in memory than by rows.
    """
    fresh = compiled.runtime_executable()
    platform = (on or device()).platform
    if platform == "cpu":
        _check_order(fresh)
    try:
        whole = as_portable(lowered, fresh, platform)
    except NotPortable as why:
        return fresh, why
    if platform != "cpu":
        return fresh, whole
    try:
        problem = unstripped()
        found = None if problem else _stripped(whole, fresh, on)
    except (RuntimeError, LookupError) as error:  # XLA needs more of this one: nothing is lost but memory
        problem, found = str(error)[:200], None
    if problem:
        LOG.count(f"executables that are not stripped: {problem}")
    return found or (fresh, whole)


def _check_order(fresh: Any) -> None:
    """Homes on the host lie by rows, and are handed over by address: in any other order their numbers would be other
    ones. (Elsewhere XLA hands its own arrays on, each in the order that it gives all of that shape.)"""
    for kind in ("parameter", "output"):
        for i, each in enumerate(getattr(fresh, f"get_{kind}_layouts", list)()):
            order = tuple(each._xla_layout().minor_to_major())
            if order != tuple(reversed(range(len(order)))):
                raise RuntimeError(f"XLA lays {kind} {i} out in memory by the dimensions {order[::-1]}, not by rows")


def _stripped(whole: Portable, fresh: Any, on: Any = None) -> tuple[Any, Portable] | None:
    code = strip(whole.code, fresh.cost_analysis().get("flops", 0.0))
    if code is None:
        return None
    portable = replace(whole, code=code)
    return portable.load(on), portable


@functools.cache
def unstripped() -> str:
    """Why this jaxlib's executables are left whole; empty if they are not.

    With a version that the tests have not run with it is tried once: what XLA refuses to load is noticed each time, but
    what it would refuse only when it runs, or compute wrongly, must not come to light in a program.
    """
    if jaxlib.__version__ in STRIPPED_WITH:
        return ""
    try:
        with enable_x64(True), jax.default_device(device()):
            compiled = jax.jit(_of_every_kind).lower(*[jax.ShapeDtypeStruct((48, 48), "float32")] * 2).compile()
            arrays = [jax.device_put(np.linspace(-1, end, 48 * 48, dtype="float32").reshape(48, 48)) for end in (1, 2)]
        fresh = compiled.runtime_executable()
        found = _stripped(Portable(fresh.client.serialize_executable(fresh), ()), fresh)
        if found is None:
            return "nothing that is known is found in their bytes"
        results = [each.execute_sharded(arrays).disassemble_into_single_device_arrays() for each in (fresh, found[0])]
        whole, stripped = ([np.asarray(array).tobytes() for (array,) in outputs] for outputs in results)
        return "" if whole == stripped else "one that was tried computed other values"
    except Exception as error:  # whatever a version to come may raise
        return f"one that was tried raised {type(error).__name__}: {str(error)[:200]}"


def _of_every_kind(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
    """A program with loops, a reduction, a product, a sort, and writing in place."""
    z = jax.lax.fori_loop(0, 3, lambda i, a: jax.numpy.sin(a) * y + a / (i + 1), jax.numpy.tanh(x @ y) * 2 + 1)
    return z, (z * y).sum(0), jax.numpy.sort(z * y - 1, 0), x.at[1].set(jax.numpy.exp(y[0]) * 2 + 1), x[3] * 2 + y[1]


def as_portable(lowered: Any, fresh: Any, platform: str = "cpu") -> Portable:
    """What XLA has compiled, as bytes. Raises NotPortable."""
    families = _families(lowered, platform)
    try:
        # What was compiled for a target belongs to no client, and writes itself.
        code = fresh.client.serialize_executable(fresh) if hasattr(fresh, "client") else fresh.serialize()
    except Exception as error:  # XLA's own error types differ from version to version
        raise NotPortable(f"XLA cannot serialise it: {str(error)[:200]}") from error
    return Portable(code, families)


def _families(lowered: Any, platform: str = "cpu") -> tuple[str, ...]:
    """The families of the functions that a program calls. Raises NotPortable where one is in none."""
    targets = sorted(set(_CUSTOM_CALL.findall(lowered.as_text())))
    if platform == "tpu":  # its compiler takes in whatever it knows by name, and there is nothing else to call
        targets = [t for t in targets if "callback" in t]
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
    blobs: Mapping[str, bytes], outputs: Sequence[Home], name: str, scratch: Sequence[Home] = (), on: Any = None
) -> Executable | Failure:
    """What the verified blobs of a cache entry hold, to be run on the device `on`. Neither traces nor lowers.

    Raises:
        Unloadable: nothing that this process can run.
    """
    try:
        about = json.loads(blobs["about"])
        if about["format"] != FORMAT:
            raise Unloadable(f"format {about['format']}, this version reads {FORMAT}")
        if "failed" in about:
            return Failure(int(about["failed"][0]), str(about["failed"][1]))
        checks = tuple(RunCheck(int(node), str(error), str(message)) for node, error, message in about["checks"])
        loaded = Portable(blobs["executable"], tuple(about["families"])).load(on)
        call = direct(loaded, outputs, len(checks), scratch, on)
        return Executable(call, checks, float(about["seconds"]), name, needs=needs(loaded))
    except (KeyError, IndexError, ValueError, TypeError, RuntimeError) as error:
        # RuntimeError is what XLA raises: JaxRuntimeError is one.
        raise Unloadable(f"{type(error).__name__}: {str(error)[:200]}") from error
