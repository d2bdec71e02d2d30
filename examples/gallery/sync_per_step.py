"""A number is read in every step, so the host waits for the device before it may go on."""

from __future__ import annotations

import torch
from torch import nn


def train(steps: int = 30) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(64, 16), torch.randn(64, 1)
    running = 0.0
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        running += loss.item()  # <-
    return running / steps


if __name__ == "__main__":
    print(train())
