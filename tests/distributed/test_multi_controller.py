"""Where JAX's runtimes of the ranks meet: a process that ends when the last rank has, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jaxlib
import numpy

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "fused_eager" / "ranks" / "coordinator.py"


@contextmanager
def coordinator(port: int = 0) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The process, and what it says of itself."""
    path = [str(Path(str(module.__file__)).parent.parent) for module in (jaxlib, numpy)]
    about = json.dumps({"path": path, "port": port, "size": 2})
    command = [sys.executable, "-I", "-S", str(PROGRAM), about]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().split()
        finally:
            process.kill()


def test_the_coordinator_ends_with_the_last_rank() -> None:
    with coordinator() as (process, said):
        service, lifeline = map(int, said)
        socket.create_connection(("localhost", service), 10).close()  # it is there
        ranks = [socket.create_connection(("localhost", lifeline), 10) for _ in range(2)]
        process.send_signal(signal.SIGINT)  # of a terminal, to all: the ranks are told of it, and end in their own way
        ranks.pop().close()
        time.sleep(1.5)
        assert process.poll() is None, "a rank is still there"
        ranks.pop().close()
        assert process.wait(10) == 0


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("", 0)) as taken, coordinator(taken.getsockname()[1]) as (process, said):
        assert process.stderr is not None
        assert not said and process.wait(30) and "ddress" in process.stderr.read()


def refused(program: str, **given: str) -> str:
    """What a rank of two says that cannot meet the other."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FUSED_EAGER_", "TORCHELASTIC_"))}
    env = {**kept, "RANK": "1", "WORLD_SIZE": "2", "FUSED_EAGER_COLLECTIVES": "xla", **given}
    out = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert out.returncode == 1, out.stderr
    return out.stderr.splitlines()[-1]


def test_nothing_says_where_to_meet() -> None:
    said = refused("import fused_eager.tpu")
    assert "FUSED_EAGER_COLLECTIVES=xla" in said and "torchrun" in said and "JAX_COORDINATOR_ADDRESS" in said


def test_jax_has_started() -> None:
    said = refused("import jax; jax.devices(); import fused_eager.tpu", JAX_COORDINATOR_ADDRESS="localhost:1")
    assert "JAX has started" in said


def test_a_process_alone_meets_nobody() -> None:
    program = "import fused_eager.tpu, torch; print(torch.ones(2, device='tpu').sum().item())"
    env = {**os.environ, "FUSED_EAGER_COLLECTIVES": "xla", "FUSED_EAGER_CACHE": "off"}
    env.pop("WORLD_SIZE", None)
    out = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert out.stdout == "2.0\n", out.stderr
