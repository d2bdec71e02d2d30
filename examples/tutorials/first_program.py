"""The tutorial "A first program": the same training step, plain and fused, and what became of its lines."""

import torch
from torch import nn

from fused_eager import explain, fused_eager, report

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters())
images, labels = torch.randn(256, 64), torch.randint(0, 10, (256,))


def step():
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


start = [tensor.clone() for tensor in model.parameters()]
plain = [step().item() for _ in range(5)]

with torch.no_grad():
    for parameter, value in zip(model.parameters(), start, strict=True):
        parameter.copy_(value)
optimizer.state.clear()

with fused_eager(compile="wait"):
    losses = [step() for _ in range(5)]

print("plain", [f"{value:.4f}" for value in plain])
print("fused", [f"{value:.4f}" for value in losses])
print("ordinary tensors:", type(losses[0]) is torch.Tensor)
print("compiled regions:", report().compilations)


def scaled_sum(x):
    y = torch.sin(x) * 2
    z = y + 1
    return z.sum()


print(explain(scaled_sum, torch.ones(1000)))
