"""Building the compiled prototype with the C++ compiler of this machine, and switching it on."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils import cpp_extension

_SOURCE = Path(__file__).with_name("follower.cpp")
_COMPILER = os.environ.get("CXX", "g++")
_PYTHON = sysconfig.get_paths()["include"]


def obstacle() -> str:
    """Why the prototype cannot be built here, in words; empty if it can."""
    if shutil.which(_COMPILER) is None:
        return f"there is no C++ compiler called {_COMPILER}"
    if not Path(_PYTHON, "Python.h").exists():
        return "there is no Python.h"
    if "\nFake:" in torch._C._dispatch_dump_table("aten::add.Tensor"):
        return "the dispatch key Fake is taken: by a later torch, or by a prototype that was loaded before"
    return ""


class Follower:
    """The prototype, built in `folder`. One per process: a dispatch key takes one fallback.

    Raises RuntimeError where there is an obstacle, and with what the compiler wrote if it does not build.
    """

    def __init__(self, folder: Path):
        why = obstacle()
        if why:
            raise RuntimeError(why)
        library = folder / "follower.so"
        includes = [*cpp_extension.include_paths(), _PYTHON]
        libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
        flags = ["-O2", "-std=c++20", "-fPIC", "-shared", abi, *(f"-isystem{path}" for path in includes)]
        command = [_COMPILER, *flags, str(_SOURCE), "-o", str(library), *libraries, "-ltorch_cpu", "-lc10"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        self._calls = ctypes.PyDLL(str(library))  # PyDLL: Python code may run inside, so the lock stays
        for name in ("steps", "followed", "missed"):
            getattr(self._calls, f"follower_{name}").restype = ctypes.c_int64

    @contextmanager
    def record(self) -> Iterator[None]:
        """The body's ops become the remembered stream; they run as they would without."""
        self._calls.follower_record()
        try:
            yield
        finally:
            self._calls.follower_off()

    @contextmanager
    def follow(self, check_place: bool = True, allocate: bool = True) -> Iterator[None]:
        """The body's ops are compared with it. At the end what was handed out is computed.

        `allocate`: outputs get memory when they are handed out, as in the library; else with their value.
        """
        self._calls.follower_follow(check_place, allocate)
        try:
            yield
        finally:
            self._calls.follower_off()

    def flush(self) -> None:
        """Compute what was handed out; the next op is compared with the beginning of the stream again."""
        self._calls.follower_flush()

    def forget(self) -> None:
        """Go back to the beginning without computing anything: what was handed out stays unwritten."""
        self._calls.follower_forget()

    @property
    def steps(self) -> int:
        """Ops of the remembered stream."""
        return int(self._calls.follower_steps())

    @property
    def followed(self) -> int:
        """Ops that were handed out, since the process started."""
        return int(self._calls.follower_followed())

    @property
    def missed(self) -> int:
        """How often an op was another one than expected."""
        return int(self._calls.follower_missed())
