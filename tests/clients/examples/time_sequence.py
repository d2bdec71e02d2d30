"""Sine waves continued: LSTM cells in double, LBFGS with its closure, plotted through NumPy."""

import argparse

import numpy as np
import torch
from torch import nn, optim


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, 8)
        self.lstm2 = nn.LSTMCell(8, 8)
        self.linear = nn.Linear(8, 1)

    def forward(self, input, future=0):
        outputs = []
        h_t = torch.zeros(input.size(0), 8, dtype=torch.double, device=input.device)
        c_t = torch.zeros(input.size(0), 8, dtype=torch.double, device=input.device)
        h_t2 = torch.zeros(input.size(0), 8, dtype=torch.double, device=input.device)
        c_t2 = torch.zeros(input.size(0), 8, dtype=torch.double, device=input.device)
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        for _ in range(future):
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        return torch.cat(outputs, dim=1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--length", type=int, default=16)
    args = parser.parse_args()
    np.random.seed(0)
    torch.manual_seed(0)
    device = torch.device(args.device)
    x = np.arange(args.length) + np.random.randint(-80, 80, 10).reshape(10, 1)
    data = np.sin(x / 1.0 / 5).astype("float64")
    input = torch.from_numpy(data[3:, :-1]).to(device)
    target = torch.from_numpy(data[3:, 1:]).to(device)
    test_input = torch.from_numpy(data[:3, :-1]).to(device)
    test_target = torch.from_numpy(data[:3, 1:]).to(device)
    seq = Sequence()
    seq.double().to(device)
    criterion = nn.MSELoss()
    optimizer = optim.LBFGS(seq.parameters(), lr=0.8, max_iter=6)
    losses, tests, curves = [], [], []
    for i in range(args.steps):
        print("STEP:", i)

        def closure():
            optimizer.zero_grad()
            out = seq(input)
            loss = criterion(out, target)
            losses.append(loss.item())
            print(f"step {len(losses)} loss: {losses[-1]}")
            loss.backward()
            return loss

        optimizer.step(closure)
        with torch.no_grad():
            future = 8
            pred = seq(test_input, future=future)
            loss = criterion(pred[:, :-future], test_target)
            tests.append(loss.item())
            y = pred.detach().cpu().numpy()
        curves.append(torch.from_numpy(y[0, : input.size(1)]))
    if args.out:
        torch.save({"losses": losses, "tests": tests, "curves": curves}, args.out)


if __name__ == "__main__":
    main()
