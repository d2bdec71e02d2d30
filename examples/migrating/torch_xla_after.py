"""The same loop on the device."""

import torch
from torch import nn

import fused_eager
import fused_eager.tpu

torch.manual_seed(0)
device = torch.device("tpu")
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.utils.data.TensorDataset(torch.randn(64, 32), torch.randint(0, 10, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=16)

for epoch in range(2):
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.3f}")

torch.save(model.state_dict(), "model.pt")
print(fused_eager.report())
