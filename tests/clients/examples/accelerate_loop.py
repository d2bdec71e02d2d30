"""A loop of one's own with accelerate: prepare, accumulate, clip, gather, save and load the state."""

import argparse
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=args.device == "cpu")
    x = torch.randn(48, 10)
    data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    model = nn.Sequential(nn.Linear(10, 16), nn.GELU(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses, right = [], []
    with tempfile.TemporaryDirectory() as folder:
        for epoch in range(3):
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    output = model(inputs)
                    loss = nn.functional.cross_entropy(output, targets)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                predictions, references = accelerator.gather_for_metrics((output.argmax(-1), targets))
                right.append((predictions == references).sum().item())
                losses.append(loss.item())
                print(f"step {len(losses)} loss {losses[-1]:.4f}")
            if epoch == 1:
                accelerator.save_state(folder)
        accelerator.load_state(folder)
    state = accelerator.get_state_dict(model)
    if args.out:
        placed = accelerator.device.type == args.device
        torch.save({"losses": losses, "right": right, "placed": placed, "model": state}, args.out)


if __name__ == "__main__":
    main()
