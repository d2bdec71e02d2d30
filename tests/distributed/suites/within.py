"""What a rank that is a thread runs: `python -m fused_eager run --device tpu --ranks-in-process N -m
tests.distributed.suites.within FOLDER SUITE tpu [xla]`. Each rank leaves in the folder what is not as in plain torch.

Plain torch's results are there before: processes have called the same with "cpu" and a store.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import PROGRAMS, RANK, WORLD, Program
from .run import differ, in_group


def expect(folder: Path, name: str, program: Program, store: Any) -> None:
    torch.manual_seed(7 + RANK)
    torch.save(in_group(store, name, "fused_eager", lambda: program("cpu")), folder / f"{name}.{RANK}")


def compare(folder: Path, name: str, program: Program) -> str:
    said = ""
    for _ in range(2):
        torch.manual_seed(7 + RANK)
        dist.init_process_group("fused_eager")
        try:
            found = program("tpu")
            said = said or differ(found, torch.load(folder / f"{name}.{RANK}", weights_only=False))
        except Exception:
            said = said or traceback.format_exc()
        finally:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
    return said


def main() -> None:
    folder, suite, device = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    suite, _, wanted = suite.partition("/")
    importlib.import_module(f"tests.distributed.suites.{suite}")
    if sys.argv[4:] == ["xla"]:  # as where the devices are chips
        from fused_eager.frontends.collectives import across

        across.ON_SIMULATED = True
    if device == "cpu":
        import fused_eager.tpu  # noqa: F401  (its backend has what gloo lacks)
    store = dist.FileStore(str(folder / "store"), WORLD) if device == "cpu" else None
    said = {}
    for name, program in PROGRAMS[suite].items():
        if wanted not in name:
            continue
        began = time.monotonic()
        said[name] = expect(folder, name, program, store) if store is not None else compare(folder, name, program)
        seconds = time.monotonic() - began
        print(f"rank {RANK}: {seconds:6.1f} s: {name} {(said[name] or '')[-300:]}", file=sys.stderr, flush=True)
    (folder / f"{suite}.{RANK}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
