"""The same step on whichever device there is: CUDA's, ours, any other of torch's."""

import torch
from torch import nn

import fused_eager.tpu

torch.manual_seed(0)
device = torch.accelerator.current_accelerator()
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler(device.type)
images, labels = torch.randn(64, 32), torch.randint(0, 10, (64,))

for _ in range(4):
    x, y = images.to(device, non_blocking=True), labels.to(device)
    optimizer.zero_grad()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
torch.accelerator.synchronize()
print(f"loss {loss.item():.2f}, peak {torch.tpu.max_memory_allocated() > 0}")
