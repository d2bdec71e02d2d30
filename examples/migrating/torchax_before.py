"""A training step as it is written for torchax: a pure function of weights, compiled by hand."""

import jax
import optax
import torch
import torchax
from torch import nn
from torchax.interop import JittableModule, jax_view
from torchax.train import make_train_step

torchax.enable_globally()
torch.manual_seed(0)
model = JittableModule(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).to("jax"))
images, labels = torch.randn(64, 32).to("jax"), torch.randint(0, 10, (64,)).to("jax")


def forward(weights, buffers, args):
    return model.functional_call("forward", weights, buffers, args)


optimizer = optax.adamw(1e-2)
step = make_train_step(forward, nn.functional.cross_entropy, optimizer)
weights = model.params
state = torchax.interop.call_jax(optimizer.init, weights)
for _ in range(4):
    loss, weights, state = step(weights, model.buffers, state, images, labels)
jax.block_until_ready(jax_view(loss))
