"""What torchrun starts in a test: it trains, and in the first attempt a rank is killed. Arguments: a folder, a door."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fused_eager.tpu

STEPS, FAULT_AT = 6, 3


def main(folder: Path, door: str) -> None:
    device = "cpu" if door == "cpu" else "tpu"
    dist.init_process_group("fused_eager")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    checkpoint = folder / "checkpoint"
    weight, began = torch.zeros(4), 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        weight, began = state["weight"], state["step"]
    weight = weight.to(device)
    context: Any = contextlib.nullcontext() if device == "tpu" else fused_eager.fused_eager(compile="wait")
    with context:
        for step in range(began, STEPS):
            if attempt == 0 and step == FAULT_AT and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            gradient = torch.full((4,), float(rank + step), device=device)
            dist.all_reduce(gradient)
            weight = weight + gradient
            if rank == 0:
                torch.save({"weight": weight.cpu(), "step": step + 1}, folder / "new")
                (folder / "new").rename(checkpoint)
    (folder / f"{rank}.{attempt}").write_text(f"{began} {weight.cpu().tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
