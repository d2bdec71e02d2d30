"""Stochastic weight averaging and an exponential moving average beside a model with batch norm, as torch has them."""

import argparse
import copy

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(5)
    device = torch.device(args.device)
    x, noise = torch.randn(64, 1, 8, 8), torch.randn(64)
    y = x.mean((1, 2, 3)) + 0.1 * noise
    loader = torch.utils.data.DataLoader(list(zip(x, y, strict=True)), batch_size=16, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(24, 1)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    swa_model = AveragedModel(model)
    ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    best = copy.deepcopy(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    swa_start, swa_scheduler = 2, SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
    losses, best_loss = [], float("inf")
    for epoch in range(args.epochs):
        for inputs, targets in loader:
            inputs, targets = inputs.to(device), targets.to(device)
            optimizer.zero_grad()
            loss = nn.functional.huber_loss(model(inputs).squeeze(-1), targets)
            loss.backward()
            optimizer.step()
            ema_model.update_parameters(model)
            losses.append(loss.item())
            print(f"step {len(losses)} loss {losses[-1]:.5f} lr {optimizer.param_groups[0]['lr']:.4f}")
        if losses[-1] < best_loss:
            best_loss, best = losses[-1], copy.deepcopy(model)
        if epoch >= swa_start:
            swa_model.update_parameters(model)
            swa_scheduler.step()
        else:
            scheduler.step()
    update_bn(loader, swa_model, device=device)
    swa_model.eval(), ema_model.eval(), best.eval()
    with torch.no_grad():
        outputs = [m(x[:8].to(device)).cpu() for m in (swa_model, ema_model, best)]
    if args.out:
        states = {"swa": swa_model.state_dict(), "ema": ema_model.state_dict()}
        torch.save({"losses": losses, "outputs": outputs, "averages": int(swa_model.n_averaged), **states}, args.out)


if __name__ == "__main__":
    main()
