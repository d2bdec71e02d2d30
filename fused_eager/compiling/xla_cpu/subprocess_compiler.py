"""Apart: XLA compiles in a process of its own, which takes programs and gives executables, one after the other.

While XLA compiles it cannot be interrupted, a crash of it ends the process, a process that ends under it crashes, and
some hundred megabytes are taken, of which tens never go back. So a process of its own has that, as torch.compile's
workers do (`torch/_inductor/compile_worker`) for the same reasons: Ctrl-C and the end of the program end it at once, a
crash costs a region that runs natively, and its memory is the system's again when it has had nothing to do for a while.

It imports jaxlib and nothing else (`xla_process`), which takes a quarter of a second. Not `multiprocessing`: a spawned
process imports the program's main module again, and a forked one may not touch XLA.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import jaxlib
import ml_dtypes
import numpy

from fused_eager.cache.exits import call_at_exit
from fused_eager.fusion_rules.cores import usable_cores

from ..executable import Abandoned, Unavailable

IDLE = 10.0  # seconds without anything to do after which it ends
LATE = 60.0  # seconds after which one that has not begun will not
GLANCE = 1.0  # seconds between two looks whether it is still there: what it is connected by may be open elsewhere
_PROGRAM = Path(__file__).with_name("xla_process.py")
# Ctrl-C is the program's. A new session would have its own share of the processor, whatever its priority.
_OUT_OF_REACH: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}


class Refused(Exception):
    """XLA cannot compile the program; the text is its own."""


class Ended(RuntimeError):
    """The process ended while it compiled; the text says how."""


class Compiler:
    """The process, started when first needed. Any thread may ask; one is answered at a time."""

    def __init__(self) -> None:
        self._closed = False
        self._refusal = ""  # why there can be none
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self.forget()

    def forget(self) -> None:
        """In a forked child: the process is the parent's, and its end of the connection as well."""
        self._lock = threading.Lock()
        self._starting = threading.RLock()  # nobody forks meanwhile: the child would hold the connection open
        process, connection = self._process, self._connection
        self._process = self._connection = None
        self._greeted = False
        if connection is not None:
            connection.close()
        if process is not None:
            process.returncode = 0  # or Python would warn of a process that nobody has waited for

    def before_fork(self) -> None:
        """Nothing is being started when this returns, until `after_fork`."""
        self._starting.acquire()

    def after_fork(self) -> None:
        """In the process that has forked."""
        self._starting.release()

    def start(self, nice: int = 0) -> None:
        """Start it if it is not there, with its priority lowered by `nice`; return without waiting for it.

        Raises:
            Unavailable: it cannot be started here.
        """
        if self._lock.acquire(blocking=False):  # else it is there, and at work
            try:
                self._start(nice)
            finally:
                self._lock.release()

    def compile(self, program: bytes, options: bytes, strip: bool, nice: int = 0) -> bytes:
        """XLA's serialisation of the executable that it makes of a program for the host's processor.

        Args:
            program: MLIR bytecode of a StableHLO module.
            options: a serialised `CompileOptions`.
            strip: without the bodies of loops, where that is possible.
            nice: as for `start`.

        Raises:
            Unavailable: as for `start`.
            Refused: XLA raised.
            Ended: XLA crashed, or somebody ended the process.
            Abandoned: this process ends.
        """
        with self._lock:
            for last in (False, True):
                try:
                    return self._ask(self._start(nice), program, options, strip)
                except (EOFError, OSError):
                    if not self._greeted:
                        raise self._not_started() from None
                    how = self._end()
                    if how or last:
                        raise Ended(f"the process in which XLA compiled {how or 'ended'}") from None
                    # It had just ended for want of work.
                except (Refused, Unavailable):
                    raise
                except BaseException:
                    self._end()  # an interrupt: its answer would be taken for the next one
                    raise
        raise AssertionError

    def close(self) -> None:
        """End the process for good; whoever waits for it is told so."""
        self._closed = True
        with self._starting:
            process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def _start(self, nice: int) -> Connection:
        if self._closed:
            raise Abandoned
        if self._connection is not None:
            return self._connection
        self._refusal = self._refusal or _unavailable()
        if self._refusal:
            raise Unavailable(self._refusal)
        about = json.dumps({"path": _folders(), "nice": nice, "idle": IDLE}).encode()
        try:
            with self._starting:
                ours = self._connection = self._begin()
        except (OSError, ValueError) as error:  # which may pass, as a want of file descriptors does
            raise Unavailable(f"it cannot be started: {error}") from error
        try:
            ours.send_bytes(about)
        except OSError:
            raise self._not_started() from None
        except BaseException:
            self._end()  # an interrupt: what is asked for next would be taken for what it is to know first
            raise
        return ours

    def _begin(self) -> Connection:
        ours, its = map(_above_standard, Pipe())
        # XLA cuts loops for as many threads as it has, there as here.
        environment = {**os.environ, "NPROC": os.environ.get("NPROC") or str(usable_cores())}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_PROGRAM), str(its.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
                **_OUT_OF_REACH,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            its.close()
        return ours

    def _not_started(self) -> Unavailable:
        self._refusal = f"it did not start: {self._end() or 'it ended'}"
        return Unavailable(self._refusal)

    def _ask(self, connection: Connection, program: bytes, options: bytes, strip: bool) -> bytes:
        for part in (json.dumps({"strip": strip}).encode(), options, program):
            connection.send_bytes(part)
        if not self._greeted:
            greeting = json.loads(self._receive(connection, LATE))
            if "error" in greeting:
                self._end()
                self._refusal = f"it did not start: {greeting['error']}"
                raise Unavailable(self._refusal)
            self._greeted = True
        answer = json.loads(self._receive(connection))
        if "error" in answer:
            raise Refused(answer["error"])
        return self._receive(connection)

    def _receive(self, connection: Connection, seconds: float = float("inf")) -> bytes:
        limit = time.monotonic() + seconds
        while not connection.poll(GLANCE):
            process = self._process
            if process is None or process.poll() is not None or time.monotonic() > limit:
                if connection.poll(0):
                    break
                raise EOFError
        return connection.recv_bytes()

    def _end(self) -> str:
        """End it, or take note that it has ended. Returns how, in words; empty where it had nothing to do."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        self._greeted = False
        if connection is not None:
            connection.close()  # it ends by itself then
        if process is None:
            return ""
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._closed:
            raise Abandoned
        code = process.returncode
        if code < 0:
            return f"was ended by signal {-code} ({_name(-code)})"
        return f"ended with exit code {code}" if code else ""


def _unavailable() -> str:
    if os.name != "posix":
        return "this system hands no connections on"
    name = os.path.basename(sys.executable or "")
    if getattr(sys, "frozen", False) or "python" not in name:
        return f"what runs here is no Python that could be started again ({name or 'it has no name'})"
    return ""


def _folders() -> list[str]:
    """Where it finds what it imports beside Python's own library: the program's path may hold other things."""
    files = [module.__file__ for module in (jaxlib, ml_dtypes, numpy)]
    found = [str(Path(file).parent.parent) for file in files if file]
    if not any(Path(folder, "google", "protobuf").is_dir() for folder in found):
        # Looking for it imports `google`, which may be a module of the program's.
        with contextlib.suppress(ImportError, AttributeError, ValueError):
            spec = importlib.util.find_spec("google.protobuf")
            if spec is not None and spec.origin:
                found.append(str(Path(spec.origin).parent.parent.parent))
    return list(dict.fromkeys(found))


def _above_standard(connection: Connection) -> Connection:
    """The connection, or where the program has closed its standard streams one whose number is none of theirs."""
    if connection.fileno() > 2:
        return connection
    import fcntl

    number = fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)
    connection.close()
    return Connection(number)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


COMPILER = Compiler()
call_at_exit(COMPILER.close)  # at once, so that it comes after whoever waits for it first
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=COMPILER.before_fork, after_in_parent=COMPILER.after_fork, after_in_child=COMPILER.forget
    )
