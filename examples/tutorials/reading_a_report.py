"""The tutorial "Reading a report": a loop with a mistake, and what the report says of it."""

import torch
from torch import nn

from fused_eager import explain

torch.manual_seed(0)
inputs, targets = torch.randn(330, 16), torch.randn(330, 1)


def train(batches):
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    total = 0.0
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total


batches = [(inputs[i : i + 33], targets[i : i + 33]) for i in range(0, 330, 33)]


def better(batches):
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).sum().item()


found = explain(train, batches).report
for advice in found.advice:
    print(f"{advice.kind}: {advice.source}")
    print(f"    {advice.cure}")

print("after the change:", explain(better, batches).report.advice)
