"""JAX's multi-controller runtime: each rank's JAX knows the devices of all ranks, so that a program of XLA's may go
over all of them (`across_processes`).

`jax.distributed.initialize` would have the first rank hold the service at which the ranks meet, and JAX ends every
process where that is gone. Here it is in a process of its own (`coordinator`), and that a rank is lost is left to the
library's heartbeat, so that the others get an error which names it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import jaxlib
import numpy
from torch import distributed

from fused_eager.fusion_rules.deferred import Deferred, jax

from ..errors import FusedEagerError
from ..progress import waiting
from ..xla import xla_bridge

_runtimes, _jax = Deferred("jax._src.distributed"), Deferred("jaxlib._jax")

ARRIVAL = 300  # seconds that a rank may come later than the others
_HOW = "start the program with torchrun, or give each rank the same JAX_COORDINATOR_ADDRESS (host:port)"
_joined: list[socket.socket] = []  # the connection by which the coordinator knows that this rank is there


def has_joined() -> bool:
    """Whether this process's JAX knows the devices of other ranks."""
    return bool(_joined)


def join(progress: bool) -> None:
    """Have JAX, which is about to start, know the devices of all ranks that a launcher has started. Does nothing where
    this process is the only one.

    Arguments:
        progress: whether it is said that others are waited for.

    Raises:
        FusedEagerError: nothing tells where the ranks meet; JAX has started already, or has another way to do this.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if size < 2 or _joined:
        return
    if xla_bridge._backends:
        raise FusedEagerError(
            "collectives are to run inside XLA (FUSED_EAGER_COLLECTIVES=xla), and JAX has started before it could be "
            "told of the other ranks: import fused_eager.tpu before anything uses JAX"
        )
    given = os.environ.get("JAX_COORDINATOR_ADDRESS", "")
    with waiting("waiting for the other ranks, whose devices JAX is to know", progress):
        store = None if given else _store(rank)
        if rank == 0:
            given = _start(given, size)
            if store is not None:
                store.set("address", given)
        elif store is not None:
            given = store.get("address").decode()
        _connect(given, rank, size)


def _store(rank: int) -> Any:
    """The launcher's, which is there before any group."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise FusedEagerError(
            f"collectives are to run inside XLA (FUSED_EAGER_COLLECTIVES=xla), and nothing says where rank {rank} "
            f"meets the others before it makes a group: {_HOW}"
        )
    made = distributed.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=ARRIVAL)
    )
    attempt = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return distributed.PrefixStore(f"fused_eager/jax/{'/'.join(attempt)}", made)


def _start(given: str, size: int) -> str:
    """Start the coordinator on this machine. Returns where it is: at the address that is `given`, if one is."""
    host, _, port = given.rpartition(":")
    path = {str(Path(str(module.__file__)).parent.parent) for module in (jaxlib, numpy)}
    about = {"path": sorted(path), "port": int(port or 0), "size": size}
    program = Path(__file__).with_name("coordinator.py")
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(program), json.dumps(about)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    ports = process.stdout.readline().split()
    if len(ports) != 2:
        said = process.stderr.read().decode(errors="replace").strip().splitlines()
        raise FusedEagerError(f"the process at which the ranks' JAX meet does not start: {said[-1] if said else '?'}")
    process.stdout.close()
    process.stderr.close()
    process.returncode = 0  # it outlives this one, and nobody waits for it
    host = host or os.environ.get("MASTER_ADDR", "localhost")
    _joined.append(socket.create_connection((host, int(ports[1])), 10.0))
    return f"{host}:{int(ports[0])}"


def publish(rank: int, process: int, device: int) -> None:
    """Tell the others which process of JAX's a rank of the default group is, and which of its devices serves the
    rank's collectives, by their numbers."""
    _runtimes.global_state.client.key_value_set(f"{_RANK}/{rank}", f"{process} {device}", allow_overwrite=True)


def published(rank: int) -> tuple[int, int]:
    """What a rank has told of itself, as `publish`. It has, if it is in a group."""
    process, device = _runtimes.global_state.client.blocking_key_value_get(f"{_RANK}/{rank}", ARRIVAL * 1000).split()
    return int(process), int(device)


_RANK, _LIFELINE = "fused_eager/rank", "fused_eager/lifeline"


def _connect(address: str, rank: int, size: int) -> None:
    """Have JAX's runtime of this process meet the others'. What `jax.distributed.initialize` does, but for the service
    that the first rank would hold."""
    state = _runtimes.global_state
    try:
        client = _jax.get_distributed_runtime_client(
            address, rank, init_timeout=ARRIVAL, heartbeat_timeout=24 * 3600, shutdown_timeout=1,
            shutdown_on_destruction=False, use_compression=True,
        )  # fmt: skip
        client.connect()
        if rank == 0:
            host, port = _joined[0].getpeername()[:2]
            client.key_value_set(_LIFELINE, f"{port}")
        else:
            host, port = address.rpartition(":")[0], client.blocking_key_value_get(_LIFELINE, ARRIVAL * 1000)
            _joined.append(socket.create_connection((host, int(port)), 10.0))
        state.client, state.process_id, state.num_processes = client, rank, size
        state.coordinator_address = address
    except (AttributeError, TypeError) as error:  # a version to come
        raise FusedEagerError(f"this jax cannot be told of other ranks as the library does it: {error}") from error
    except RuntimeError as error:
        raise FusedEagerError(f"rank {rank} does not reach the process at {address}: {error}") from error
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    local = os.environ.get("LOCAL_RANK", "")
    if local and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        for name in ("jax_cuda_visible_devices", "jax_rocm_visible_devices"):
            if jax.config.values.get(name, "all") == "all":
                jax.config.update(name, local)


__all__ = ["has_joined", "join", "publish", "published"]
