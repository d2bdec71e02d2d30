"""XLA: the options with which a region is compiled, whatever XLA_FLAGS say, and jax's switch for 64-bit numbers."""

from __future__ import annotations

import importlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import jax
from jaxlib import utils

# Traces and arrays with 64-bit numbers; before jax 0.8 it was elsewhere.
_jax = jax if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental")
enable_x64: Callable[[bool], AbstractContextManager[None]] = _jax.enable_x64

# XLA takes the temporaries of a region together, 135 MB for a small GPT, which glibc gets from the system anew in each
# run: with the page faults, a fourth of a training step. Blocks of this size it keeps (`heap`). With larger ones the
# end of a thread's heap (64 MB) is often free as a whole and goes back: of 34,000 faults 4,000 to 13,000 are left with
# blocks of 16 MB, 3,600 with 4 MB.
BLOCK = 4 << 20  # bytes, where no single temporary is larger
_BLOCKS = {"xla_multiheap_size_constraint_per_heap": BLOCK}
# XLA:CPU leaves products and, from jaxlib 0.10.2 on, sums and extrema to YNNPACK, which gets some sums wrong without a
# word (jax#39103, XNNPACK#11243) and crashes or hangs on others (jax#39257). Its products are right, and up to 4 times
# as fast as XLA's own where the right side is transposed. The first that jaxlib knows holds.
_LIBRARIES: tuple[dict[str, str], ...] = (
    {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"},
    {"xla_cpu_experimental_ynn_fusion_type": ""},
    {},
)
_UNKNOWN = re.compile("No such compile option|While setting option")
_ERRORS = 2  # of absl's log levels: 0 information, 1 warnings, 2 errors
# What jax itself calls for its option `jax_logging_level`.
_set_level: Callable[[int], None] | None = getattr(utils, "absl_set_min_log_level", None)


def compiled(lowered: jax.stages.Lowered, in_blocks: bool) -> jax.stages.Compiled:
    """What XLA makes of a lowered function, where no library that it calls is known to be wrong.

    Args:
        lowered: the function.
        in_blocks: whether its temporaries are to be taken in blocks of `BLOCK`.
    """
    if not in_blocks or _set_level is None:
        return _compiled(lowered, {})
    with _silent():
        return _compiled(lowered, _BLOCKS)


def _compiled(lowered: jax.stages.Lowered, also: dict[str, int]) -> jax.stages.Compiled:
    for library in _LIBRARIES:
        try:
            return lowered.compile(compiler_options={**library, **also})
        except jax.errors.JaxRuntimeError as error:
            if not (library and _UNKNOWN.search(str(error))):
                raise
    raise AssertionError("the last of the libraries is none")


class _Silence:
    """How many threads do not want to hear XLA's warnings."""

    lock = threading.Lock()
    depth = 0


@contextmanager
def _silent() -> Iterator[None]:
    """XLA prints errors only, and no warning for each temporary that is larger than a block."""
    assert _set_level is not None
    with _Silence.lock:
        _Silence.depth += 1
        _set_level(max(_level(), _ERRORS))
    try:
        yield
    finally:
        with _Silence.lock:
            _Silence.depth -= 1
            if not _Silence.depth:
                _set_level(_level())


def _level() -> int:
    """The level that the user or jax has set. There is no way to ask absl."""
    named = getattr(jax.config, "jax_logging_level", None)
    if named not in (None, "NOTSET"):
        return {"INFO": 0, "DEBUG": 0, "WARN": 1, "WARNING": 1, "ERROR": 2}.get(named, 3)
    try:
        return int(os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1"))  # which jax sets to 1 when it is imported
    except ValueError:
        return 1
