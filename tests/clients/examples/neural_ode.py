"""torchdiffeq: a neural ODE, trained by the adjoint method and through the steps of an adaptive solver."""

import argparse

import torch
from torch import nn
from torchdiffeq import odeint, odeint_adjoint


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 2))
        self.calls = 0

    def forward(self, t, y):
        self.calls += 1
        return self.net(y**3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.manual_seed(0)
    matrix = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]]).to(args.device)
    times = torch.linspace(0.0, 2.0, 12).to(args.device)
    start = torch.tensor([[2.0, 0.0]]).to(args.device)
    with torch.no_grad():
        true = odeint(lambda t, y: y**3 @ matrix, start, times, method="dopri5")
    found = {"true": true.cpu()}
    for way, solve in {"adjoint": odeint_adjoint, "through": odeint}.items():
        field = Field().to(args.device)
        optimizer = torch.optim.RMSprop(field.parameters(), lr=1e-3)
        losses = []
        for i in range(4):
            optimizer.zero_grad()
            options = {"method": "rk4"} if i % 2 else {"method": "dopri5", "rtol": 1e-4, "atol": 1e-5}
            loss = (solve(field, start, times, **options) - true).abs().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found[way] = losses
    if args.out:
        torch.save(found, args.out)


if __name__ == "__main__":
    main()
