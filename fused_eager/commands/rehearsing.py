"""A program run as one rank of many, without the others: what `forecast --ranks` starts, in a process of its own.

torch's fake process group stands for theirs: it answers at once, and each value is this rank's own. The program has the
device `tpu`, simulated by the CPU. What is noted is when its steps end, and when it starts and uses each collective.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .launch import prepare
from .meeting import Enough, run_steps

WARM = 4  # steps before those that are noted: what they compile is there from then on


class Notes:
    """What the run notes. Times are those of `time.perf_counter`."""

    def __init__(self, steps: int):
        self.steps = steps
        self.ends: list[float] = []
        self.sent: list[dict[str, Any]] = []
        self._waited: list[dict[str, Any]] = []  # for these C++ waits, at the end of the backward pass at the latest
        self._first: list[Any] = []

    def told(self, event: Any) -> None:
        """The event log has something to say."""
        if event.kind != "collective":
            return
        data = event.data
        start, waited = event.time - data["seconds"], data["wait_s"]
        use = event.time if waited is None else max(start, event.time - waited)
        each = {"op": data["op"], "bytes": data["bytes"], "ranks": data["ranks"], "start": start, "use": use}
        self.sent.append(each)
        if waited is None:
            self._waited.append(each)

    def begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """An optimizer's step begins."""
        for each in self._waited:
            each["use"] = time.perf_counter()
        self._waited.clear()

    def ended(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """An optimizer's step has ended; of several, one round of all is a step."""
        import fused_eager

        self._first[:] = self._first or [optimizer]
        if optimizer is self._first[0]:
            fused_eager.sync()
            self.ends.append(time.perf_counter())
            if self.steps and len(self.ends) > WARM + self.steps:
                raise Enough

    def write(self, ranks: int, memory: int, to: Path) -> None:
        """Write down the steps after the first ones."""
        from ..reporting.scaling import Rehearsal, Sent

        ends = self.ends[WARM:]
        begin = ends[0] if ends else 0.0
        sent = [
            Sent(e["op"], e["bytes"], e["ranks"], e["start"] - begin, e["use"] - begin)
            for e in self.sent
            if ends and begin < e["start"] <= ends[-1]
        ]
        run = Rehearsal(ranks, [end - begin for end in ends], sent, memory)
        to.write_text(json.dumps({**asdict(run), "steps": len(self.ends)}), encoding="utf-8")


def pretend(ranks: int) -> None:
    """Have this process be rank 0 of so many, of which there is no other."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    first, further, backend = distributed.init_process_group, distributed.new_group, "cpu:fake,tpu:fake"

    @functools.wraps(first)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        first(backend, store=FakeStore(), rank=0, world_size=ranks)  # type: ignore[no-untyped-call]

    @functools.wraps(further)
    def new_group(of: Any = None, timeout: Any = None, theirs: Any = None, *args: Any, **kwargs: Any) -> Any:
        return further(of, timeout, backend, *args, **{k: v for k, v in kwargs.items() if k != "backend"})

    for function in (init_process_group, new_group):
        for module in (distributed, distributed.distributed_c10d):
            setattr(module, function.__name__, function)


def main(argv: list[str]) -> int:
    """Run the program; returns its exit code."""
    split = argv.index("--")
    given, theirs = _parser().parse_args(argv[:split]), argv[split + 1 :]
    if given.ranks:
        own = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ.update(own, WORLD_SIZE=str(given.ranks), MASTER_ADDR="localhost", MASTER_PORT="29500")
    script, module = (None, theirs.pop(0)) if given.module else (theirs.pop(0), None)
    program = prepare(script, module, theirs)

    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    import fused_eager

    from ..frontends.device import memory
    from ..log.events import LOG

    fused_eager.register("tpu")
    memory.reset_peak_memory_stats()
    if given.ranks:
        pretend(given.ranks)
    notes = Notes(given.steps)
    register_optimizer_step_pre_hook(notes.begins)
    register_optimizer_step_post_hook(notes.ended)
    LOG.sinks.append(notes.told)
    code = run_steps(program)
    ranks = given.ranks or int(os.environ.get("WORLD_SIZE", "1"))
    if os.environ.get("RANK", "0") == "0":
        notes.write(ranks, memory.max_memory_allocated(), Path(given.to))
    sys.stdout.flush()
    os._exit(code)  # threads of the program's would go on


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, required=True, help="0: the others are there")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--to", required=True)
    parser.add_argument("--module", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
