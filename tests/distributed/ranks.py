"""Real process groups: `launch` starts one process for each rank, and each runs the same programs over gloo.

A process takes seconds to import torch and JAX, so many programs share a launch. Each has a process group of its own,
plain torch runs it first, and then the library in the same world; a rank that fails is waited for no longer than
the group's timeout.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

PATIENCE = 120.0  # seconds that a rank waits for another one
ROOT = Path(__file__).parents[2]

Context = Callable[[], AbstractContextManager[Any]]


def launch(
    names: Sequence[str],
    options: dict[str, Any],
    world: int = 2,
    environment: dict[str, str] | None = None,
    seconds: float = 300.0,
) -> list[dict[str, Any]]:
    """Run the programs on so many ranks, and return what each rank says: of each program what went wrong, if anything.

    Of a program that is named `...@mixed` every other rank runs without the library.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        task = {"names": list(names), "options": options, "store": f"{folder}/store"}
        processes = []
        for rank in range(world):
            with open(f"{folder}/{rank}.out", "wb") as out, open(f"{folder}/{rank}.err", "wb") as err:
                command = [sys.executable, "-m", "tests.distributed.ranks", str(rank), str(world), json.dumps(task)]
                # The options of the tests' own process are not those of the ranks; who follows is.
                kept = {"FUSED_EAGER_FOLLOWER"}
                own = {k: v for k, v in os.environ.items() if k in kept or not k.startswith("FUSED_EAGER_")}
                env = {**own, "OMP_NUM_THREADS": "1", **(environment or {})}
                processes.append(subprocess.Popen(command, stdout=out, stderr=err, cwd=ROOT, env=env))
        deadline = time.monotonic() + seconds
        try:
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(deadline - time.monotonic(), 0.1))
        finally:
            for process in processes:
                process.kill()
                process.wait()
        said = []
        for rank, process in enumerate(processes):
            out_text, err_text = (Path(f"{folder}/{rank}.{end}").read_text(errors="replace") for end in ("out", "err"))
            if process.returncode != 0:
                said_so = f"{out_text[-2000:]}\n{err_text[-6000:]}"
                raise AssertionError(f"rank {rank} ended with {process.returncode}:\n{said_so}")
            said.append(json.loads(out_text.splitlines()[-1]))
        return said


def _in_group(rank: int, world: int, store: Any, name: str, run: Callable[[], Any]) -> tuple[Any, str]:
    """What `run` returns in a process group of its own, and what it has raised."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=world, timeout=timedelta(seconds=PATIENCE)
    )
    try:
        return run(), ""
    except Exception:
        return None, traceback.format_exc()
    finally:
        dist.destroy_process_group()


def _difference(plain: Any, ours: Any) -> str:
    import torch

    try:
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    except Exception as error:
        return str(error)
    return ""


def main(rank: int, world: int, task: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    import fused_eager
    from tests.distributed import programs

    torch.set_num_threads(1)
    store = dist.FileStore(task["store"], world)

    def ours() -> AbstractContextManager[Any]:
        return fused_eager.fused_eager(**task["options"])

    found: dict[str, str] = {}
    began = time.monotonic()
    for name in task["names"]:
        print(f"{time.monotonic() - began:6.1f} s: {name}", file=sys.stderr, flush=True)
        called, _, mixed = name.partition("@")
        program = getattr(programs, called)
        results = []
        mine: Context = contextlib.nullcontext if mixed and rank % 2 else ours
        for way, context in (("plain", contextlib.nullcontext), ("ours", mine)):
            torch.manual_seed(7 + rank)
            out, error = _in_group(rank, world, store, f"{name}-{way}", lambda: program(rank, context))  # noqa: B023
            if error:
                found[name] = f"{way}: {error}"
                break
            results.append(out)
        else:
            found[name] = _difference(*results)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
