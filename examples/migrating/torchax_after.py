"""The same step as PyTorch has it, and a function of JAX's inside."""

import jax
import torch
from torch import nn

import fused_eager
import fused_eager.tpu


@fused_eager.jax_op
def smooth(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(1.7 * x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(32, 64), nn.Linear(64, 10)

    def forward(self, x):
        return self.out(smooth(self.into(x)))


torch.manual_seed(0)
model = Net().to("tpu")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
images, labels = torch.randn(64, 32).to("tpu"), torch.randint(0, 10, (64,)).to("tpu")

for _ in range(4):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
print(f"loss falls: {loss.item() < 2.3}")
