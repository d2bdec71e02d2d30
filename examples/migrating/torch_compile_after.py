"""The same step in a context: no function to choose, backward pass and optimizer included."""

import torch
from torch import nn

from fused_eager import fused_eager

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
images, labels = torch.randn(64, 32), torch.randint(0, 10, (64,))


def forward(x, y):
    return nn.functional.cross_entropy(model(x), y)


with fused_eager():
    for _ in range(4):
        optimizer.zero_grad()
        loss = forward(images, labels)
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f}")
