"""`python -m tests.distributed.endings WAY START FOLDER`: two ranks of `multiprocessing`, of which one ends earlier.

What rank 0 has found is in `found` in the folder.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from datetime import timedelta
from pathlib import Path


def rank(rank: int, way: str, folder: str) -> None:
    """One rank, which has imported nothing before."""
    import torch
    import torch.distributed as dist

    import fused_eager.tpu  # noqa: F401

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("fused_eager", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=5))
    total = torch.full((10,), rank + 1.0, device="tpu")
    if (rank == 0) is not (way == "lost"):
        time.sleep(0.5)
    if rank == 0:
        pass
    elif way == "raise":
        raise ValueError("the data of this rank are broken")
    elif way == "lost":
        os._exit(7)
    try:
        dist.all_reduce(total)
        found = "nothing"
        if rank == 0 and way != "lost":  # the other one does not look at it
            found = str(total.tolist())
    except RuntimeError as error:
        found = str(error)
    if rank == 0:
        Path(folder, "found").write_text(found)


if __name__ == "__main__":
    way, start, folder = sys.argv[1:]
    context = multiprocessing.get_context(start)
    processes = [context.Process(target=rank, args=(number, way, folder)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    print([process.exitcode for process in processes])
