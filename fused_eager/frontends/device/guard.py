"""The device's guard: torch asks it for the type of device around each node of a backward pass, also where a hook has
just raised.

Of a hook's exception torch's engine keeps nothing while it leaves a node: it is Python's error indicator, and a call of
Python's that returns while that is set is an error of its own, for which C++ ends the process. So the guard takes the
exception away, and who has started the pass raises it.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import torch

_TYPE: Any = torch._C._autograd.DeviceType.PrivateUse1
# Raises what the indicator is set to, and clears it.
_raise_what_is_set = ctypes.PyDLL(None).PyErr_Occurred
_raise_what_is_set.restype = ctypes.c_void_p


class _Taken(threading.local):
    error: BaseException | None = None


_TAKEN = _Taken()


class Guard(torch._C._acc.DeviceGuard):
    """Which type of device it is; from Python torch takes no more of a guard."""

    def type_(self) -> Any:
        try:
            _raise_what_is_set()
        except BaseException as error:
            of_hook = error.__traceback__ and error.__traceback__.tb_next  # without this function
            _TAKEN.error = error.with_traceback(of_hook)
        return _TYPE


@contextlib.contextmanager
def raising_what_was_taken() -> Iterator[None]:
    """Around a backward pass: it raises what a hook in it has raised."""
    try:
        yield
    except SystemError:  # "returned NULL without setting an exception"
        taken, _TAKEN.error = _TAKEN.error, None
        if taken is None:
            raise
        raise taken from None
    finally:
        _TAKEN.error = None


__all__ = ["Guard", "raising_what_was_taken"]
