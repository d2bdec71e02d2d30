"""torchao: weights in int8 and int4, dynamic activations, and training that knows it will be quantized."""

import argparse

import torch
from torch import nn
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)
from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 8))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).to(args.device)
    y = x[:, :8].argmax(1)
    found = {}
    for name, config in {
        "int8 weights": Int8WeightOnlyConfig(),
        "int8 activations": Int8DynamicActivationInt8WeightConfig(),
    }.items():
        model = make().to(args.device).eval()
        quantize_(model, config)
        kind = type(model[0].weight).__name__
        with torch.no_grad():
            found[name] = {"output": model(x).cpu(), "kind": kind}
            found[name]["again"] = model(x[:3]).cpu()
        print(name, kind)
    model = make().to(args.device)
    activations = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    weights = IntxFakeQuantizeConfig(torch.int8, group_size=16)
    quantize_(model, QATConfig(activation_config=activations, weight_config=weights, step="prepare"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(8):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    quantize_(model, QATConfig(step="convert"))
    with torch.no_grad():
        found |= {"losses": losses, "converted": model(x).cpu()}
    if args.out:
        torch.save(found, args.out)


if __name__ == "__main__":
    main()
