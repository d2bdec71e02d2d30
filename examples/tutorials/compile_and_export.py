"""The tutorial "Compile and export": a model and its optimizer's step under torch.compile; the model without torch."""

import importlib.util
import subprocess
import sys

import torch
from torch import nn

from fused_eager import expect, explain, report
from fused_eager.frontends.compiler.backend import compile_graph

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters())
images, labels = torch.randn(256, 64), torch.randint(0, 10, (256,))

# By its name, "fused_eager", where the package is installed; here the tutorial runs from a checkout as well.
forward = torch.compile(model, backend=compile_graph)
update = torch.compile(optimizer.step, backend=compile_graph)


def step():
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(forward(images), labels)
    loss.backward()
    update()
    return loss.item()


losses = [step() for _ in range(3)]
print("losses", [f"{value:.4f}" for value in losses])
print("compiled regions:", report().compilations)

with expect(max_compiles=0):
    step()
print("the fourth step compiled nothing")

torch._dynamo.reset()
print("ended by", set(explain(torch.compile(model, backend=compile_graph), images).syncs))

if importlib.util.find_spec("flatbuffers"):  # what JAX writes programs with
    from fused_eager import export

    model.eval()
    program = export(model, (images,), "digits", dynamic_batch=True)
    print(program)
    print("as torch computes it:", torch.allclose(program(images[:5]), model(images[:5]), atol=1e-5))

    WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # as where it is not installed
sys.path.insert(0, "digits")
import numpy as np
from load import load
scores, = load("digits")(np.zeros((3, 64), "float32"))
print("without torch:", scores.shape)
"""
    print(subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True).stdout.strip())
