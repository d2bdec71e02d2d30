"""A program for TorchTPU."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).to("tpu")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
images, labels = torch.randn(64, 32, device="tpu"), torch.randint(0, 10, (64,), device="tpu")

with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
    for _ in range(4):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
torch.tpu.synchronize()
print(f"loss falls: {loss.item() < 2.3}")
