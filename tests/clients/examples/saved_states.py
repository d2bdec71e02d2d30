"""Checkpoints by torch.distributed.checkpoint and torch.save: written on one device, read on another and back."""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful


class App(Stateful):
    def __init__(self, device, seed):
        torch.manual_seed(seed)
        self.device = device
        self.model = nn.Sequential(nn.Embedding(20, 12), nn.Flatten(), nn.Linear(48, 16, bias=False))
        self.model.extend([nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 20)]).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02, amsgrad=True)
        self.steps = 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "steps": self.steps}

    def load_state_dict(self, state):
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.steps = state["steps"]

    def train(self, steps):
        losses = []
        for _ in range(steps):
            x = ((torch.arange(24).view(6, 4) * 7 + self.steps) % 20).to(self.device)
            loss = nn.functional.cross_entropy(self.model(x), x[:, 0])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.steps += 1
            losses.append(loss.item())
        return losses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        there = App(args.device, 0)
        found["there"] = there.train(3)
        dcp.save({"app": there}, checkpoint_id=folder + "/there")
        here = App("cpu", 1)
        dcp.load({"app": here}, checkpoint_id=folder + "/there")
        assert all(p.device.type == "cpu" for p in here.model.parameters())
        found["here"] = here.train(3)
        saving = dcp.async_save({"app": here}, checkpoint_id=folder + "/here")
        saving.result()
        back = App(args.device, 2)
        dcp.load({"app": back}, checkpoint_id=folder + "/here")
        assert all(p.device == next(there.model.parameters()).device for p in back.model.parameters())
        found["back"] = back.train(3)

        pending = dcp.async_save({"app": back}, checkpoint_id=folder + "/late")  # trained on as it is written
        found["on"] = back.train(2)
        pending.result()
        late = App(args.device, 3)
        dcp.load({"app": late}, checkpoint_id=folder + "/late")
        found["late"] = late.train(2)

        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(back.model, back.optimizer, options=whole)
        assert all(v.device.type == "cpu" for v in model.values())
        path = Path(folder) / "whole.pt"
        torch.save({"model": model, "optimizer": optimizer}, path)
        read = torch.load(path, mmap=True)
        last = App(args.device, 4)
        both = {"model_state_dict": read["model"], "optim_state_dict": read["optimizer"]}
        set_state_dict(last.model, last.optimizer, **both, options=whole)
        last.steps = back.steps
        found["last"], found["same"] = last.train(2), back.train(2)
        torch.save(last.model, Path(folder) / "model.pt")
        loaded = torch.load(Path(folder) / "model.pt", map_location="cpu", weights_only=False).eval()
        found["loaded"] = loaded(torch.arange(8).view(2, 4)).detach()
        found["state"] = {k: v.cpu() for k, v in last.model.state_dict().items()}
    print("step", found["last"])
    if args.out:
        torch.save(found, args.out)


if __name__ == "__main__":
    main()
