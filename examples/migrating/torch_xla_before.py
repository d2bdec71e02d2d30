"""A training loop as it is written for torch_xla."""

import torch
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.parallel_loader as pl
from torch import nn

torch.manual_seed(0)
device = xm.xla_device()
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.utils.data.TensorDataset(torch.randn(64, 32), torch.randint(0, 10, (64,)))
loader = pl.MpDeviceLoader(torch.utils.data.DataLoader(data, batch_size=16), device)

for epoch in range(2):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        xm.optimizer_step(optimizer)
        xm.mark_step()
    xm.master_print(f"epoch {epoch}: {loss.item():.3f}")

xm.save(model.state_dict(), "model.pt")
print(met.metrics_report())
