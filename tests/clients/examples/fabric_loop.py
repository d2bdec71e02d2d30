"""A loop of one's own with Lightning Fabric: set up, accumulate, clip, save and load."""

import argparse
import tempfile
from pathlib import Path

import lightning as L
import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--out")
    args = parser.parse_args()
    fabric = L.Fabric(accelerator=args.accelerator, strategy=args.strategy, devices=1, precision=args.precision)
    fabric.launch()
    fabric.seed_everything(3)
    with fabric.init_module():
        model = nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    x = torch.randn(64, 12)
    data = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=16))
    path = Path(tempfile.mkdtemp()) / "state.ckpt"
    losses, norms = [], []
    for epoch in range(4):
        for i, (inputs, targets) in enumerate(loader):
            with fabric.no_backward_sync(model, enabled=i % 2 == 0):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                fabric.backward(loss)
            if i % 2:
                norms.append(fabric.clip_gradients(model, optimizer, max_norm=1.0).item())
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        if epoch == 1:
            fabric.save(path, {"model": model, "optimizer": optimizer, "epoch": epoch})
    rest = fabric.load(path, {"model": model, "optimizer": optimizer}, weights_only=False)
    with torch.no_grad():
        output = model(loader.dataset.tensors[0][:4].to(fabric.device)).cpu()
    mean = fabric.all_reduce(torch.tensor(losses[-1], device=fabric.device), reduce_op="mean").item()
    print(losses[-3:], rest, fabric.device)
    if args.out:
        found = {"losses": losses, "norms": norms, "output": output, "rest": rest["epoch"], "mean": mean}
        torch.save(found | {"placed": fabric.device.type == args.device}, args.out)


if __name__ == "__main__":
    main()
