"""Train a small ResNet on the 1,797 handwritten digits (8x8 pixels) that scikit-learn carries.

    python examples/train_resnet.py --steps 200

Plain PyTorch: batch norm, residuals, a DataLoader that shuffles, SGD with momentum and weight decay, cosine annealing,
accuracy on held-out digits.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WARM_UP_STEPS = 2  # left out of steps/s: the first steps pay for allocators and caches
TRAIN_DIGITS = 1500  # the other 297 are held out


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, 1x1 where the shape changes. [n, c, h, w] -> [n, out, h / s, w / s].

    SiLU where the paper has ReLU: a ReLU's gradient jumps at zero, so that two float32 runs which differ in one last
    bit are percents apart after 40 steps, and losses of different machines or settings could not be compared.
    """

    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm1(self.conv1(x)), inplace=True)
        return F.silu(self.norm2(self.conv2(y)) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """Three stages of basic blocks at widths w, 2w and 4w. Images [n, 1, h, w] -> logits [n, classes]."""

    def __init__(self, width: int, blocks: int, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.SiLU(True))
        stages: list[nn.Module] = []
        channels = width
        for stage in range(3):
            out = width << stage
            for block in range(blocks):
                stages.append(BasicBlock(channels, out, stride=2 if stage and not block else 1))
                channels = out
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(images)).mean((2, 3)))


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Float images [n, 1, 8, 8] of mean 0 and deviation 1 with labels [n]: those to learn from and those held out."""
    try:
        from sklearn import datasets
    except ImportError as missing:
        raise SystemExit("this example needs scikit-learn: pip install 'fused-eager[examples]'") from missing
    digits = datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
    images = (images - images.mean()) / images.std()
    labels = torch.tensor(digits.target, dtype=torch.int64)
    train, held_out = slice(None, TRAIN_DIGITS), slice(TRAIN_DIGITS, None)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[held_out], labels[held_out])


def endless(loader: DataLoader) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from loader


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    batch: tuple[Tensor, Tensor],
) -> Tensor:
    """One update. Returns the loss before it, detached and not yet read."""
    images, labels = batch
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    schedule.step()
    return loss.detach()


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Share of the data that the model labels right, from 0 to 1."""
    model.eval()
    images, labels = (part.to(next(model.parameters()).device) for part in data.tensors)
    right = (model(images).argmax(1) == labels).float().mean().item()
    model.train()
    return right


@dataclass
class Result:
    losses: list[float]
    steps_per_s: float | None  # steady state; None when no step was left to time
    accuracy: float


def train(args: argparse.Namespace) -> Result:
    torch.manual_seed(args.seed)
    train_data, held_out = load_digits()
    batches = endless(DataLoader(train_data, args.batch, shuffle=True, drop_last=True))
    model = ResNet(args.width, args.blocks).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    say = (lambda line: None) if args.quiet else (lambda line: print(line, flush=True))
    say(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(train_data):,} digits to learn from")

    losses: list[Tensor] = []
    started, rate = time.perf_counter(), None
    for step in range(1, args.steps + 1):
        lr = schedule.get_last_lr()[0]
        images, labels = (part.to(args.device) for part in next(batches))
        losses.append(train_step(model, optimizer, schedule, (images, labels)))
        # Losses stay tensors until somebody wants to see one: reading each would make the loop wait for it.
        if step == WARM_UP_STEPS or step % args.log_every == 0 or step == args.steps:
            loss = losses[-1].item()
            if step > WARM_UP_STEPS:
                rate = (step - WARM_UP_STEPS) / (time.perf_counter() - started)
            say(f"step {step:4d}  loss {loss:.4f}  lr {lr:.2e}" + (f"  {rate:6.2f} steps/s" if rate else ""))
        if step == WARM_UP_STEPS:
            started = time.perf_counter()
    right = accuracy(model, held_out)
    say(f"accuracy on {len(held_out)} held-out digits: {right:.1%}")
    return Result([loss.item() for loss in losses], rate, right)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage")
    parser.add_argument("--blocks", type=int, default=2, help="blocks per stage")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.05, help="first learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="where the model is trained: cpu, cuda, tpu, ...")
    parser.add_argument("--log-every", type=int, default=20, help="steps between progress lines; each reads the loss")
    parser.add_argument("--losses", type=Path, metavar="FILE", help="write every step's loss as JSON")
    parser.add_argument("--quiet", action="store_true", help="print nothing")
    args = parser.parse_args(argv)
    for name in ("steps", "width", "blocks", "batch", "log_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.batch > TRAIN_DIGITS:
        parser.error(f"--batch must be at most {TRAIN_DIGITS}, the number of digits to learn from")
    return args


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train as the arguments say. Returns the loss of every step."""
    args = parse(argv)
    result = train(args)
    if args.losses:
        args.losses.write_text(json.dumps(result.losses))
    return result.losses


if __name__ == "__main__":
    main(sys.argv[1:])
