"""What an executable with LAPACK calls needs before it may run in a process that did not compile it."""

from __future__ import annotations

import functools

import numpy as np


@functools.cache
def prepare() -> None:
    """Let jaxlib find LAPACK. Lowering a linear algebra op does so by itself; loading a finished executable does not,
    and its first call would jump to address 0. Takes 0.1 s, once.
    """
    from jaxlib import lapack

    lapack.prepare_lapack_call("potrf", np.dtype(np.float32))
