"""What a rank does: `python -m tests.distributed.suites.run STORE SUITE DOOR OPTIONS`, with RANK and WORLD_SIZE set.

Each program has a process group of its own. It runs on CPU tensors in plain torch, and then twice at the door: what the
second time runs may have been compiled meanwhile. What is not as in plain torch is printed as JSON, by name.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from . import PROGRAMS, RANK, WORLD, Program

TIMES = 2
# A hook that goes on in one of gloo's threads may be the last that knows of its group, and torch ends the process where
# a group ends in a thread of its own.
groups: list[Any] = []


def differ(a: Any, b: Any) -> str:
    """What is different in two results of the same shape."""
    try:
        if isinstance(a, (list, tuple)):
            return next((d for x, y in zip(a, b, strict=True) if (d := differ(x, y))), "")
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype, (a.dtype, b.dtype)
            torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-5, atol=1e-6)
        else:
            assert a == b, (a, b)
    except (AssertionError, ValueError):
        return traceback.format_exc()
    return ""


def in_group(store: Any, name: str, backend: str, run: Callable[[], Any]) -> Any:
    dist.init_process_group(
        backend, store=dist.PrefixStore(name, store), rank=RANK, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    groups.append(dist.group.WORLD)
    try:
        return run()
    finally:
        dist.destroy_process_group()


def outcome(name: str, program: Program, store: Any, door: str, options: dict[str, Any] | None) -> str:
    """What of a program is not as in plain torch."""
    import fused_eager

    device = "tpu" if door == "device" else "cpu"

    def context() -> contextlib.AbstractContextManager[Any]:
        return fused_eager.fused_eager(**options) if door == "context" and options is not None else plain()

    plain = contextlib.nullcontext
    said = ""
    backend = "fused_eager" if door == "device" else "gloo"
    try:
        torch.manual_seed(7 + RANK)
        expected = in_group(store, f"{name}-plain", backend, lambda: program("cpu"))
        for time_ in range(TIMES):

            def at_the_door() -> Any:
                with context():
                    return program(device)

            torch.manual_seed(7 + RANK)
            found = in_group(store, f"{name}-{time_}", backend, at_the_door)
            # Who finds a difference goes on nevertheless: the others do, and wait for this rank.
            said = said or differ(found, expected)
    except Exception:
        return said or traceback.format_exc()
    return said


def main() -> None:
    file, suite, door, given = sys.argv[1:5]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if door == "device":
        import fused_eager.tpu  # noqa: F401  (the device, and its backend)
    suite, _, wanted = suite.partition("/")
    importlib.import_module(f"tests.distributed.suites.{suite}")
    store, options = dist.FileStore(file, WORLD), json.loads(given)
    said = {}
    for name, program in PROGRAMS[suite].items():
        if wanted in name:
            began = time.monotonic()
            said[name] = outcome(name, program, store, door, options)
            print(f"{time.monotonic() - began:6.1f} s: {name} {said[name][-300:]}", file=sys.stderr, flush=True)
    print(json.dumps(said), flush=True)
    os._exit(0)  # a group that has lost a rank waits for it


if __name__ == "__main__":
    main()
