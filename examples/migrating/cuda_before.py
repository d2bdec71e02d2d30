"""A training step as it is written for CUDA, mixed precision and all."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cuda")
images, labels = torch.randn(64, 32), torch.randint(0, 10, (64,))

for _ in range(4):
    x, y = images.cuda(non_blocking=True), labels.to("cuda")
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
torch.cuda.synchronize()
print(f"loss {loss.item():.2f}, peak {torch.cuda.max_memory_allocated() > 0}")
