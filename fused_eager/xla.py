"""XLA: the device and the options that regions are compiled with, whatever XLA_FLAGS say, and jax's switch for 64-bit
numbers."""

from __future__ import annotations

import functools
import importlib.util
import io
import os
import re
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np

from fused_eager.fusion_rules.deferred import Deferred, jax, xla_client
from fused_eager.fusion_rules.platforms import family

compiler, pxla = Deferred("jax._src.compiler"), Deferred("jax._src.interpreters.pxla")
xla_bridge = Deferred("jax._src.xla_bridge")
_experimental = Deferred("jax.experimental")

T = TypeVar("T")


def enable_x64(on: bool) -> AbstractContextManager[None]:
    """Traces and arrays with 64-bit numbers, or without, in the body."""
    where = jax if hasattr(jax, "enable_x64") else _experimental  # as it was before jax 0.8
    found: AbstractContextManager[None] = where.enable_x64(on)
    return found


# XLA:CPU leaves products and, from jaxlib 0.10.2 on, sums and extrema to YNNPACK, which gets some sums wrong without a
# word (jax#39103, XNNPACK#11243) and crashes or hangs on others (jax#39257). Its products are right, and up to 4 times
# as fast as XLA's own where the right side is transposed. The first that jaxlib knows holds.
_LIBRARIES: list[dict[str, str]] = [  # but for those that have been found unknown
    {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"},
    {"xla_cpu_experimental_ynn_fusion_type": ""},
    {},
]
# A conversion to a narrow dtype and back is a rounding that the program asked for, and no detour.
_OPTIONS: dict[str, dict[str, bool]] = {"gpu": {"xla_allow_excess_precision": False}}
_UNKNOWN = re.compile("No such compile option|While setting option")


@functools.cache
def device() -> Any:
    """The device that regions are compiled for: JAX's CPU, whose memory is the host's."""
    return start("cpu")[0]


@functools.cache
def inline() -> Any:
    """The same once more, of a client that computes on the thread that calls it. JAX's own hands a program of more than
    a thousand operations to another thread: to wake that, and then the caller, takes longer than many a program."""
    device()
    return xla_client.make_cpu_client(asynchronous=False).devices()[0]


def lower_once() -> None:
    """Lower a function, so that what JAX imports for its first one is there."""
    with jax.default_device(device()):
        jax.jit(lambda: 0).lower()


def start(platform: str | None = None) -> list[Any]:
    """JAX's devices of a platform, or of the best that it finds: those of this process, if it knows others' as well.

    Where this is what starts JAX, its warning of every fork is kept back: a DataLoader's workers would each bring one,
    and what is forked from a process of ours uses torch alone. A program that has started JAX itself is still warned.

    Raises:
        RuntimeError: JAX cannot start that platform.
    """
    was = getattr(xla_bridge, "_at_fork_handler_installed", True)
    have_libtpu_load_quietly()
    try:
        return list(jax.local_devices(backend=platform))
    finally:
        if not was and hasattr(os, "register_at_fork"):
            # After JAX's own hook, so that it is called before that.
            os.register_at_fork(before=_forking, after_in_parent=_forked, after_in_child=_forked)


# Without these libtpu asks a metadata server of Google's which machine this is, complains on stderr about the answer,
# writes log files and takes a lock that keeps a second process out.
_WITHOUT_A_TPU = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
}


def has_libtpu() -> bool:
    """Whether XLA's compiler for TPUs is installed. Loads nothing."""
    return os.path.isfile(os.environ.get("TPU_LIBRARY_PATH", "")) or importlib.util.find_spec("libtpu") is not None


def have_libtpu_load_quietly() -> None:
    """Have libtpu, where it is installed, load quietly on a host without a TPU, which JAX has found out as it was
    imported: JAX loads it as it starts, and so does a target. It reads some of the variables late, so they stay."""
    if os.environ.get("TPU_SKIP_MDS_QUERY") == "1" and has_libtpu():
        for name, value in _WITHOUT_A_TPU.items():
            os.environ.setdefault(name, value)


_silences: list[warnings.catch_warnings[None]] = []


def _forking() -> None:
    silence: warnings.catch_warnings[None] = warnings.catch_warnings()
    silence.__enter__()
    _silences.append(silence)
    warnings.filterwarnings("ignore", r"os\.fork\(\) was called.*JAX", RuntimeWarning)


def _forked() -> None:
    while _silences:
        _silences.pop().__exit__(None, None, None)


_children: list[int] = []  # this process, if it has not the threads of the XLA that it knows


def is_forked() -> bool:
    """Whether this process was forked from one that had started XLA's CPU: whoever calls that waits for ever."""
    return bool(_children)


def refuse_fork(what: str) -> None:
    """What cannot do without XLA says so in such a process.

    Raises:
        RuntimeError: this is one.
    """
    if is_forked():
        raise RuntimeError(
            f"{what} cannot run here: this process was forked from one that had started XLA, whose threads it has not. "
            "Start it with multiprocessing's method 'spawn' or 'forkserver', or fork before the first such call"
        )


def _in_child() -> None:
    if device.cache_info().currsize:
        _children.append(os.getpid())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def use_the_cpu_alone() -> None:
    """Have JAX start the CPU's platform and no other, unless JAX_PLATFORMS says what to start: a process that compiles
    for targets needs no more, and others take time, memory, and the device. Before anything asks JAX for devices."""
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")


def let_go(traced: jax.stages.Traced) -> None:
    """Have JAX forget a function that was traced with `keep_unused` and has been lowered.

    From 0.11 on a cache of its own, made to forget what nobody holds, holds that itself: what it remembers of such a
    function is the function. With it stays all that was made of it, the executable too.
    """
    forget = getattr(getattr(pxla, "_dce_jaxpr", None), "evict_weakref", None)
    if forget is not None:
        forget(traced.jaxpr)


def compiled(lowered: jax.stages.Lowered, platform: str = "cpu") -> jax.stages.Compiled:
    """What XLA makes of a lowered function, where no library that it calls is known to be wrong."""
    if platform != "cpu":  # the libraries are the CPU's
        return lowered.compile(compiler_options=_OPTIONS.get(family(platform)))
    return with_libraries(lambda library: lowered.compile(compiler_options=library))


def with_libraries(compile: Callable[[dict[str, str]], T]) -> T:
    """What `compile` makes with the options that keep XLA from calling libraries that are known to be wrong.

    Raises:
        JaxRuntimeError: as `compile` does, but where it knows no such option.
    """
    for library in list(_LIBRARIES):
        try:
            return compile(library)
        except jax.errors.JaxRuntimeError as error:
            if not (library and _UNKNOWN.search(str(error))):
                raise
            # Each try counts as a compilation of JAX's. (Another thread may have found it out meanwhile.)
            _LIBRARIES[:] = [known for known in _LIBRARIES if known != library]
    raise AssertionError("the last of the libraries is none")


def bytecode(lowered: jax.stages.Lowered) -> bytes:
    """A lowered function as MLIR bytecode."""
    written = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(written)
    return written.getvalue()


@functools.cache
def assigned(on: Any) -> Any:
    """The options that assign an executable to a device."""
    return compiler.get_compile_options(1, 1, np.array([[on.id]]), backend=on.client)


def options(library: dict[str, str]) -> bytes:
    """What `compiled` compiles with, as JAX's switches and XLA_FLAGS have it, serialised."""
    first = np.array([[0]])  # where it is compiled, and in each key: which one it runs on is said when it is loaded
    made = compiler.get_compile_options(1, 1, first, env_options_overrides=library, backend=device().client)
    return bytes(made.SerializeAsString())


@functools.cache
def _tracebacks() -> Callable[[bool], Any] | None:
    return getattr(xla_client._xla, "set_tracebacks_enabled", None)


class untraced:
    """In the body, JAX does not note the stack on which an array is made: an array that is kept would keep all code on
    it alive, and what hangs on that: a graph of Dynamo's. Several threads may be in it."""

    __slots__ = ()
    _lock = threading.Lock()
    _inside = 0
    _was = False

    def __enter__(self) -> None:
        with untraced._lock:
            untraced._inside += 1
            if untraced._inside == 1:
                untraced._was = _tracebacks() is not None and xla_client._xla.tracebacks_enabled()
                if untraced._was:
                    _tracebacks()(False)  # type: ignore[misc]

    def __exit__(self, *error: Any) -> None:
        with untraced._lock:
            untraced._inside -= 1
            if not untraced._inside and untraced._was:
                _tracebacks()(True)  # type: ignore[misc]
