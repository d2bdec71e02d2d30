"""Finishing: what XLA:CPU has made of a region, as it is called and kept: made in a process of its own where that can
be, and stripped of what only its compiler reads."""

from __future__ import annotations

import functools
from contextlib import suppress
from dataclasses import replace
from typing import Any

import jaxlib
import numpy as np

from fused_eager.fusion_rules.deferred import jax

from ...log.events import LOG
from ...xla import bytecode, device, enable_x64, options, with_libraries
from ..executable import (
    NotPortable,
    Portable,
    Unavailable,
    as_portable,
    brought_along,
    calls_out,
    families_of,
    finalize,
    get_ready,
    made_in_subprocess,
    misfit,
)
from .strip import strip
from .subprocess_compiler import COMPILER, Refused

STRIPPED_WITH = ("0.6.2", "0.10.2", "0.11.2", "0.12.0.1")  # versions of jaxlib with which all tests of it have run


@get_ready.on("cpu")
def start(nice: int) -> None:
    """That process starts while JAX traces."""
    with suppress(Unavailable):
        COMPILER.start(nice)


@brought_along.on("cpu")
def all_of_them(targets: list[str]) -> list[str]:
    """All: LAPACK's are registered by whoever runs the program first."""
    return targets


@made_in_subprocess.on("cpu")
def in_subprocess(lowered: Any, nice: int, on: Any) -> tuple[Any, Portable]:
    """What XLA makes of JAX's `Lowered` of a region in a process of its own: the executable, and its bytes.

    Raises:
        Unavailable: it has to be compiled in this process, and why.
        JaxRuntimeError: XLA cannot compile it.
        RuntimeError: as `finalize`; or the process ended.
    """
    try:
        families = families_of(lowered, "cpu")
    except NotPortable as why:
        raise Unavailable("") from why  # what it calls is in this process
    if calls_out(families):
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


@finalize.on("cpu")
def stripped(lowered: Any, compiled: Any, on: Any) -> tuple[Any, Portable | NotPortable]:
    """What JAX's `Lowered` and `Compiled` of a region have come to: the executable to be called, and its bytes.

    What is called was loaded from the bytes, as in every other process, for they are stripped, and what XLA has just
    compiled keeps three times as much memory.

    Raises:
        RuntimeError: it takes or returns an array that lies otherwise in memory than by rows.
    """
    fresh = compiled.runtime_executable()
    _check_order(fresh)
    try:
        whole = as_portable(lowered, fresh, "cpu")
    except NotPortable as why:
        return fresh, why
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


@misfit.on("cpu")
def accounted(loaded: Any, takes: int, returns: int) -> str:
    """The same, by XLA's own account of it, which is exact here: nothing is padded."""
    try:
        about = loaded.get_compiled_memory_stats()
        found = about.argument_size_in_bytes, about.output_size_in_bytes
    except (AttributeError, RuntimeError):
        return ""
    if found == (takes, returns):
        return ""
    return f"it takes {found[0]} bytes and returns {found[1]}, and the region {takes} and {returns}"


def _stripped(whole: Portable, fresh: Any, on: Any) -> tuple[Any, Portable] | None:
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
        found = _stripped(Portable(fresh.client.serialize_executable(fresh), ()), fresh, device())
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
