"""The tutorial "On the device": a model for a TPU, written and tried where there is none."""

import io

import torch
from torch import nn

import fused_eager.tpu  # noqa: F401 - from here on this process has the device
from fused_eager import report

print("there is a device:", torch.tpu.is_available())

x = torch.arange(6.0, device="tpu").reshape(2, 3)
y = x.mT @ x + 1
print("on", y.device, "as", type(y).__name__, "with sum", y.sum().item())


def train(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(device)
    images, labels = torch.randn(256, 64).to(device), torch.randint(0, 10, (256,)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found).cpu(), model


plain, _ = train("cpu")
before = report().compilations
losses, model = train("tpu")
print("the same numbers:", torch.allclose(losses, plain, rtol=1e-4))
print("regions compiled:", 0 < report().compilations - before <= 5)

before = report().compilations
train("tpu")
print("compiled the second time:", report().compilations - before)

file = io.BytesIO()
torch.save(model.state_dict(), file)
file.seek(0)
state = torch.load(file, map_location="cpu")
print("loaded on", {value.device.type for value in state.values()})

try:
    x + torch.ones(2, 3)
except RuntimeError as error:
    print("RuntimeError:", str(error).split(",")[0])
