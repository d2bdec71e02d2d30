"""The same program, with one import."""

import torch
from torch import nn

import fused_eager.tpu

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).to("tpu")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
images, labels = torch.randn(64, 32, device="tpu"), torch.randint(0, 10, (64,), device="tpu")

for _ in range(4):  # fused is what the device does unless it is told otherwise
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
torch.tpu.synchronize()
print(f"loss falls: {loss.item() < 2.3}")
