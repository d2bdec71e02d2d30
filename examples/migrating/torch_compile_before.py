"""A training step under torch.compile."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
images, labels = torch.randn(64, 32), torch.randint(0, 10, (64,))


@torch.compile
def forward(x, y):
    return nn.functional.cross_entropy(model(x), y)


for _ in range(4):
    optimizer.zero_grad()
    loss = forward(images, labels)
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}")
