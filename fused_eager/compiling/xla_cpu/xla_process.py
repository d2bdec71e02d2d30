"""The program of the process in which XLA compiles (`subprocess_compiler`): it takes programs and gives
executables until nobody is at the other end, or nothing has come for a while.

Run as a file, so that the library and with it torch are not imported: jaxlib is all that it takes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def main() -> None:
    """Serve the connection whose file descriptor the command line names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    requests: queue.SimpleQueue[tuple[bytes, bytes, bytes]] = queue.SimpleQueue()
    try:
        about = json.loads(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)  # it is over already
    sys.path += about["path"]
    os.nice(about["nice"])  # before XLA starts its threads

    def listen() -> None:
        # Beside the compilation: who does not want it any more closes the connection.
        try:
            while True:
                requests.put((connection.recv_bytes(), connection.recv_bytes(), connection.recv_bytes()))
        finally:
            os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    try:
        compile, strip = _compiler(), _module("strip").strip
    except Exception as error:  # a version to come
        connection.send_bytes(_text(error=f"{type(error).__name__}: {error}"))
        os._exit(1)
    connection.send_bytes(_text())
    while True:
        try:
            wanted, options, program = requests.get(timeout=about["idle"])
        except queue.Empty:
            os._exit(0)
        try:
            executable = compile(program, options)
            code = executable.client.serialize_executable(executable)
            if json.loads(wanted)["strip"]:
                code = strip(code, executable.cost_analysis().get("flops", 0.0)) or code
        except Exception as error:  # XLA's own, which differ from version to version
            connection.send_bytes(_text(error=str(error)))
        else:
            connection.send_bytes(_text())
            connection.send_bytes(code)


def _text(**about: str) -> bytes:
    return json.dumps(about).encode()


def _compiler() -> Any:
    from jaxlib import xla_client

    client = xla_client.make_cpu_client()
    devices = xla_client._xla.DeviceList((client.devices()[0],))

    def compiled(program: bytes, options: bytes) -> Any:
        parsed = xla_client.CompileOptions.ParseFromString(options)
        return client.compile_and_load(program, executable_devices=devices, compile_options=parsed)

    return compiled


def _module(name: str) -> Any:
    """A module of this folder that needs no other."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
