"""What gloo takes between two processes of this host: the constants of the model by which collectives are predicted."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from ..targets.links import Link

SMALL, LARGE = 256, 4 << 20  # bytes
TIMES = 15  # of each, of which the median counts


class CannotMeasure(Exception):
    """The processes have not measured anything."""


def measured() -> Link:
    """The link between two processes of this host, by `all_reduce` of few and of many bytes. Raises CannotMeasure."""
    with tempfile.TemporaryDirectory(prefix="fused-eager-link-") as folder:
        command = [sys.executable, "-m", "fused_eager.commands.link_times", folder]
        processes = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
        try:
            said = processes[0].communicate(timeout=120)[0]
            processes[1].wait(timeout=30)
        except subprocess.TimeoutExpired as error:
            raise CannotMeasure("gloo has not answered between two processes of this host") from error
        finally:
            for process in processes:
                process.kill()
                process.wait()
    try:
        small, large = json.loads(said)
    except ValueError as error:
        raise CannotMeasure("gloo could not be measured between two processes of this host") from error
    return fitted(small, large)


def fitted(small: float, large: float) -> Link:
    """The link by which an `all_reduce` on two ranks takes so many seconds for `SMALL` and for `LARGE` bytes: two
    messages, and the bytes once."""
    bandwidth = (LARGE - SMALL) / max(large - small, 1e-9)
    return Link("gloo", max(small - SMALL / bandwidth, 0.0) / 2, bandwidth, "measured on this host")


def main(argv: list[str]) -> int:
    """One of the two processes; the first prints the seconds."""
    import torch
    from torch import distributed

    folder, rank = Path(argv[0]), int(argv[1])
    store = distributed.FileStore(str(folder / "store"), 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    found = []
    for nbytes in (SMALL, LARGE):
        values, seconds = torch.zeros(nbytes // 4), []
        for _ in range(TIMES):
            distributed.barrier()
            began = time.perf_counter()
            distributed.all_reduce(values)
            seconds.append(time.perf_counter() - began)
        found.append(sorted(seconds)[TIMES // 2])
    if not rank:
        print(json.dumps(found), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
