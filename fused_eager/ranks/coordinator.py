"""The program of the process that JAX's runtimes of all ranks meet at (`multi_controller`).

JAX has the first rank hold that service, and ends every process of the job where it is gone, past any error of the
program's. So it is in a process of its own, which ends when the last rank has: each holds a connection to it.

Run as a file, so that the library and with it torch are not imported: jaxlib is all that it takes.
"""

from __future__ import annotations

import json
import selectors
import signal
import socket
import sys
import time
from typing import Any

TRIES = 5  # ports: another process may take one that was free
ARRIVAL = 300.0  # seconds for a first rank to come


def main() -> None:
    """Serve the job that the command line describes, and say where on stdout: the port of the service, and that of the
    connections that ranks hold."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    about = json.loads(sys.argv[1])
    sys.path += about["path"]
    lifeline = socket.create_server(("", 0), family=socket.AF_INET)
    service, port = _serve(about["port"], about["size"])
    print(port, lifeline.getsockname()[1], flush=True)
    sys.stdout.close()
    _await_end(lifeline)
    del service


def _serve(port: int, size: int) -> tuple[Any, int]:
    """JAX's service for so many ranks, and its port.

    Arguments:
        port: the one that it has to have; 0: any.
    """
    from jaxlib import _jax

    for tried in range(TRIES):
        chosen = port or _free()
        try:
            # Who is lost is found out by the library's own heartbeat, which ends nobody's process.
            made = _jax.get_distributed_runtime_service(
                f"[::]:{chosen}", size, heartbeat_timeout=24 * 3600, shutdown_timeout=1, recoverable=True
            )
            return made, chosen
        except Exception:
            if port or tried == TRIES - 1:
                raise
    raise AssertionError


def _free() -> int:
    with socket.create_server(("", 0)) as found:
        return int(found.getsockname()[1])


def _await_end(lifeline: socket.socket) -> None:
    """Return when all ranks that have come are gone."""
    until = time.monotonic() + ARRIVAL
    with selectors.DefaultSelector() as selector:
        selector.register(lifeline, selectors.EVENT_READ)
        while len(selector.get_map()) > 1 or time.monotonic() < until:
            for key, _ in selector.select(1.0):
                if key.fileobj is lifeline:
                    selector.register(lifeline.accept()[0], selectors.EVENT_READ)
                    until = 0.0
                    continue
                held: Any = key.fileobj
                try:
                    is_open = bool(held.recv(1))
                except OSError:
                    is_open = False
                if not is_open:
                    selector.unregister(held)
                    held.close()


if __name__ == "__main__":
    main()
