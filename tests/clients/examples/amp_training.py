"""Mixed precision as torch's recipe has it: a scaler, clipped gradients, loader processes, a checkpoint."""

import argparse
import io

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Waves(Dataset):
    def __init__(self, count=48):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        at = torch.linspace(0, 6.28, 32)
        return {"wave": torch.sin(at * (1 + index % 4) + index), "kind": index % 4, "name": f"wave {index}"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 8, 5, padding=2)
        self.norm = nn.GroupNorm(2, 8)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 32, 32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, x):
        return self.head(nn.functional.silu(self.norm(self.conv(x.unsqueeze(1)))))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)
    device, dtype = args.device, getattr(torch, args.dtype)
    kind = torch.device(device).type
    loader = DataLoader(
        Waves(), batch_size=8, shuffle=True, num_workers=2, persistent_workers=True,
        pin_memory=kind != "cpu", generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=args.epochs * len(loader))
    scaler = torch.amp.GradScaler(kind, init_scale=2.0**12, growth_interval=5, enabled=args.dtype == "float16")
    losses, norms, scales = [], [], []
    for epoch in range(args.epochs):
        for batch in loader:
            x, y = (batch[k].to(device, non_blocking=True) for k in ("wave", "kind"))
            with torch.autocast(kind, dtype=dtype):
                out = model(x)
                loss = nn.functional.cross_entropy(out.float(), y, label_smoothing=0.05)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
            scales.append(scaler.get_scale())
        if epoch == 0:  # what is trained goes through a checkpoint
            kept = io.BytesIO()
            parts = {"model": model, "optimizer": optimizer, "scaler": scaler, "schedule": schedule}
            torch.save({name: part.state_dict() for name, part in parts.items()}, kept)
            kept.seek(0)
            read = torch.load(kept, map_location=device)
            for name, part in parts.items():
                part.load_state_dict(read[name])
        print(f"step {len(losses)} loss {losses[-1].item():.4f} scale {scales[-1]}")
    model.eval()
    with torch.inference_mode(), torch.autocast(kind, dtype=dtype):
        right = sum((model(b["wave"].to(device)).argmax(-1).cpu() == b["kind"]).sum().item() for b in loader)
    if args.out:
        found = {"losses": torch.stack(losses).cpu(), "norms": torch.stack(norms).cpu(), "scales": scales}
        torch.save({**found, "right": right, "dtype": str(out.dtype)}, args.out)


if __name__ == "__main__":
    main()
