"""Checkpoints of sharded models, saved by some ranks and loaded by others: as many or not, on the device or the CPU.

`python -m tests.distributed.checkpoints TASK`, as `tests.distributed.faults`, with a folder in the variable CHECKPOINTS
that the cases of several calls share.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from . import faults
from .faults import Case, case

FOLDER = Path(os.environ.get("CHECKPOINTS", "."))


class Trained:
    """A sharded model with its optimizer."""

    def __init__(self, c: Case, seed: int):
        torch.manual_seed(seed)
        self.c, mesh = c, init_device_mesh(c.device, (c.world,))
        self.model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6), nn.Linear(6, 3)).to(c.device)
        for layer in self.model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def train(self, steps: int) -> None:
        """The same data on every rank, so that it does not matter how many there are."""
        for step in range(steps):
            x = torch.sin(torch.arange(32.0).reshape(4, 8) + step).to(self.c.device)
            self.optimizer.zero_grad()
            self.model(x).square().mean().backward()
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def whole(self) -> dict[str, Any]:
        """All of it, on the CPU of rank 0."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer.get("state", {})}

    def load(self, name: str) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=FOLDER / name)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _save_whole(trained: Trained, name: str) -> None:
    whole = trained.whole()
    if trained.c.rank == 0:
        torch.save(whole, FOLDER / name)


@case
def save(c: Case) -> None:
    """At once, and in the background while the training goes on."""
    # What saves in the background has collectives of its own, which must be apart from those of the training.
    c.backend = "cpu:gloo,tpu:fused_eager" if c.door == "tpu" else ""
    c.start()
    apart = None if c.door == "tpu" else dist.new_group()
    with c.context():
        trained = Trained(c, 1)
        trained.train(2)
        dcp.save(trained.state(), checkpoint_id=FOLDER / "now")
        saving = dcp.async_save(trained.state(), checkpoint_id=FOLDER / "later", process_group=apart)
        _save_whole(trained, "whole.pt")
        trained.train(2)
        saving.result()
        _save_whole(trained, "trained_on.pt")
    dist.barrier()
    c.say("done")


@case
def load(c: Case) -> None:
    """Both are what was there when they were saved, and the training goes on from there as it did."""
    c.start()
    with c.context():
        for name in ("now", "later"):
            trained = Trained(c, 2)
            trained.train(1)
            trained.load(name)
            for steps, of in ((0, "whole.pt"), (2, "trained_on.pt")):
                trained.train(steps)
                whole = trained.whole()
                if c.rank == 0:
                    torch.testing.assert_close(whole, torch.load(FOLDER / of), rtol=1e-4, atol=1e-6)
        dist.barrier()
    c.say("done")


@case
def kill_in_a_save(c: Case) -> None:
    """One checkpoint is saved; in the middle of the next a rank is killed."""
    from torch.distributed.checkpoint import filesystem

    c.start()
    with c.context():
        trained = Trained(c, 1)
        trained.train(1)
        dcp.save(trained.state(), checkpoint_id=FOLDER / "step-1")
        _save_whole(trained, "whole.pt")
        trained.train(1)
        write = filesystem.FileSystemWriter.write_data

        def killed(self: Any, *args: Any) -> Any:
            if c.rank == c.victim:
                os.kill(os.getpid(), signal.SIGKILL)
            return write(self, *args)

        filesystem.FileSystemWriter.write_data = killed  # type: ignore[method-assign]
        c.say("fault")
        dcp.save(trained.state(), checkpoint_id=FOLDER / "step-2")
    c.say("done")


@case
def load_after_it(c: Case) -> None:
    """The former one is whole, and the one that was not finished is refused."""
    c.start()
    with c.context():
        trained = Trained(c, 2)
        trained.train(1)
        try:
            trained.load("step-2")
        except CheckpointException as error:
            assert "metadata" in str(error), error
        else:
            raise AssertionError("it has been loaded")
        trained.load("step-1")
        whole = trained.whole()
        if c.rank == 0:
            torch.testing.assert_close(whole, torch.load(FOLDER / "whole.pt"), rtol=1e-5, atol=1e-7)
        dist.barrier()
    c.say("done")


if __name__ == "__main__":
    faults.main()
