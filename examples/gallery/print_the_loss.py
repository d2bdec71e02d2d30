"""The loss is printed in every step."""

from __future__ import annotations

import sys

import torch
from torch import nn


def train(steps: int = 30) -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(64, 16), torch.randn(64, 1)
    for step in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss}", file=sys.stderr)  # <-


if __name__ == "__main__":
    train()
