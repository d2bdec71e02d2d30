"""The data does not divide by the batch size, so the last batch of every epoch has a shape of its own."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(epochs: int = 1) -> torch.Tensor:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(330, 16), torch.randint(0, 4, (330,)))
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = torch.zeros(())
    for _ in range(epochs):
        for x, y in DataLoader(data, batch_size=32):  # <-
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    return loss.detach()


if __name__ == "__main__":
    print(train())
