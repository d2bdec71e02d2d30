"""Sentences come in three lengths, in turns, and each length is compiled for itself."""

from __future__ import annotations

import torch
from torch import nn


def train(steps: int = 30) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 100))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [torch.randint(0, 100, (8, length)) for length in (12, 17, 23)]
    loss = torch.zeros(())
    for step in range(steps):
        tokens = batches[step % 3]
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])  # <-
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
    return loss.detach()


if __name__ == "__main__":
    print(train())
