"""Building the compiled follower: once for each torch, Python and state of the sources, in a folder of the user's.

The compiler takes a quarter of a minute. It is a process of its own, at the lowest priority, that also puts the result
in its place, so that a program which ends meanwhile leaves it to the next one. Two that build at once make the same.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch

from fused_eager.cache.local import default_root, is_private

from ..errors import FusedEagerError
from . import spec

SOURCES = tuple(sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h")))
MAIN = "module.cpp"
NAME = "fused_eager_follower"
PATIENCE = 300.0  # seconds after which a build is taken for dead


class FollowerUnavailable(FusedEagerError, RuntimeError):
    """There is no compiled follower and there cannot be one; the text says why."""


def compiler() -> str:
    """The C++ compiler: $CXX, else `c++` or `g++`; "" if there is none."""
    given = os.environ.get("CXX", "")
    return next((found for name in ([given] if given else ["c++", "g++"]) if (found := shutil.which(name))), "")


def obstacle() -> str:
    """Why nothing can be built here, in words; "" if it can."""
    if sys.platform != "linux":
        return f"it was never tried on {sys.platform}"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "it needs the interpreter's lock"
    if not compiler():
        return "there is no C++ compiler" + (f" called {os.environ['CXX']}" if os.environ.get("CXX") else "")
    if not Path(_python(), "Python.h").exists():
        return "there is no Python.h (on Debian: python3-dev)"
    return ""


def _python() -> str:
    return sysconfig.get_paths()["include"]


def _torch() -> Path:
    return Path(torch.__file__).parent


@functools.cache
def digest() -> str:
    """What a built follower depends on."""
    found = hashlib.sha256()
    config = torch._C._GLIBCXX_USE_CXX11_ABI, torch.__version__, torch.version.git_version  # type: ignore[attr-defined]
    for text in (sysconfig.get_config_var("SOABI"), *config, os.environ.get("CXX", "")):
        found.update(f"{text}\0".encode())
    found.update(spec.header().encode())
    for path in SOURCES:
        found.update(path.read_bytes())
    return found.hexdigest()[:32]


def library(root: Path | None = None) -> Path:
    """Where the built follower is, once it is; `root`: in that cache folder instead of the user's."""
    return (root or default_root()) / "follower" / digest() / f"{NAME}.so"


def lend(root: Path) -> None:
    """Copy it, where it is built, to another cache folder: for processes that are to find nothing else there."""
    if is_built():
        shutil.copytree(library().parent, library(root).parent)


def is_built() -> bool:
    """Whether it is there, and nobody else can have put it there."""
    try:
        folder, file = library().parent.stat(), library().stat()
    except OSError:
        return False
    return is_private(folder) and is_private(file) and stat.S_ISREG(file.st_mode)


def command(target: Path) -> list[str]:
    """What builds it."""
    where = _torch()
    includes = [target.parent, where / "include", where / "include" / "torch" / "csrc" / "api" / "include", _python()]
    return [
        *shlex.split(compiler()),
        *("-O2", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-isystem{path}" for path in includes),
        str(Path(__file__).with_name(MAIN)),
        *("-o", str(target), f"-L{where / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"),
    ]


def build(patiently: bool = True) -> None:
    """Build it, if another process is not at it; else wait for that one.

    Arguments:
        patiently: the program goes on meanwhile, and has the processor first.

    Raises:
        FollowerUnavailable: it cannot be built; with what the compiler wrote.
    """
    why = obstacle()
    if why:
        raise FollowerUnavailable(f"no compiled follower: {why}")
    target = library()
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    mark = target.with_suffix(".building")
    deadline = time.monotonic() + PATIENCE
    while not _takes(mark):
        if is_built():
            return
        if time.monotonic() > deadline:
            raise FollowerUnavailable(f"no compiled follower: another process has {mark} and does not come to an end")
        time.sleep(0.1)
    try:
        if not is_built():
            _compile(target, patiently)
    finally:
        mark.unlink(missing_ok=True)


def _takes(mark: Path) -> bool:
    """Whether this process is the one to build. A mark of one that was killed is old."""
    try:
        if time.time() - mark.stat().st_mtime > PATIENCE:
            mark.unlink(missing_ok=True)
    except OSError:
        pass
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def _compile(target: Path, patiently: bool) -> None:
    made = target.with_suffix(f".{os.getpid()}.so")
    (target.parent / "spec.h").write_text(spec.header())  # the mark is ours: nobody else writes or reads it now
    nice = [found, "-n", "19"] if patiently and (found := shutil.which("nice")) else []
    compiling, moving = shlex.join([*nice, *command(made)]), shlex.join(["mv", str(made), str(target)])
    script = f"umask 077; {compiling} && {moving}"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        made.unlink(missing_ok=True)
        raise FollowerUnavailable(f"no compiled follower: {compiler()} failed: {done.stderr.strip()[-2000:]}")
