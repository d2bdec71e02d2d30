"""Train a small GPT, character by character, on the English text that every CPython carries.

    python examples/train_gpt.py --steps 200 --layers 4 --dim 128

Plain PyTorch: dropout, AdamW with two weight-decay groups, a warm-up and cosine schedule, gradient clipping,
evaluation on held-out text and a sample at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WARM_UP_STEPS = 2  # left out of steps/s: the first steps pay for allocators and caches


class Block(nn.Module):
    """Pre-norm causal self-attention and a four times wider MLP, both residual. [batch, seq, dim] -> the same."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.project = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, dim // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        p = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + self.drop(self.project(mixed.transpose(1, 2).reshape(batch, seq, dim)))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Decoder-only transformer with learned positions and tied embeddings. Token ids [batch, seq] -> logits."""

    def __init__(self, vocab: int, layers: int, dim: int, seq: int, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim {dim} is not a multiple of {heads} heads")
        self.seq = seq
        self.tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(seq, dim)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.apply(self._initialise)
        self.head.weight = self.tokens.weight

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> Tensor:
        place = torch.arange(ids.shape[1], device=ids.device)
        x = self.drop(self.tokens(ids) + self.positions(place))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass
class Text:
    """The corpus as character ids, split nine to one, and the alphabet that turns ids back into characters."""

    train: Tensor
    held_out: Tensor
    alphabet: str

    @classmethod
    def load(cls) -> Text:
        text = "\n\n".join(topics[name] for name in sorted(topics))
        alphabet = "".join(sorted(set(text)))
        index = {char: i for i, char in enumerate(alphabet)}
        ids = torch.tensor([index[char] for char in text])
        split = len(ids) * 9 // 10
        return cls(ids[:split], ids[split:], alphabet)


def draw_batch(ids: Tensor, batch: int, seq: int) -> tuple[Tensor, Tensor]:
    """Random windows of the text: inputs and the same shifted by one, both [batch, seq]."""
    starts = torch.randint(len(ids) - seq, (batch, 1))
    windows = ids[starts + torch.arange(seq + 1)]
    return windows[:, :-1], windows[:, 1:]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves biases and norms alone."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def make_schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up over the first tenth of the steps, then a cosine down to a tenth of the rate."""
    warm = max(1, steps // 10)

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        done = min(1.0, (step - warm) / max(1, steps - warm))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    batch: tuple[Tensor, Tensor],
) -> Tensor:
    """One update. Returns the loss before it, detached and not yet read."""
    loss = loss_of(model, batch)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    return loss.detach()


@torch.no_grad()
def evaluate(model: nn.Module, ids: Tensor, batch: int, seq: int, batches: int = 4) -> float:
    """Mean loss on evenly spread windows of held-out text, the same ones every time."""
    model.eval()
    starts = torch.linspace(0, len(ids) - seq - 1, batch * batches).long()
    windows = ids[starts[:, None] + torch.arange(seq + 1)].to(next(model.parameters()).device)
    losses = [loss_of(model, (part[:, :-1], part[:, 1:])) for part in windows.split(batch)]
    model.train()
    return torch.stack(losses).mean().item()


@torch.no_grad()
def sample(model: GPT, text: Text, length: int, temperature: float = 0.8) -> str:
    """Continue the first window of the held-out text by `length` characters. Returns the new ones."""
    model.eval()
    context = text.held_out[None, : model.seq].to(next(model.parameters()).device)
    written = []
    for _ in range(length):
        logits = model(context)[:, -1] / temperature
        written.append(torch.multinomial(logits.softmax(-1), 1))
        context = torch.cat([context[:, 1:], written[-1]], dim=1)
    model.train()
    return "".join(text.alphabet[i] for i in torch.cat(written).flatten().tolist())


@dataclass
class Result:
    losses: list[float]
    steps_per_s: float | None  # steady state, evaluation excluded; None when no step was left to time
    sample: str


def train(args: argparse.Namespace) -> Result:
    torch.manual_seed(args.seed)
    text = Text.load()
    model = GPT(len(text.alphabet), args.layers, args.dim, args.seq, args.heads).to(args.device)
    optimizer = make_optimizer(model, args.lr)
    schedule = make_schedule(optimizer, args.steps)
    say = (lambda line: None) if args.quiet else (lambda line: print(line, flush=True))
    say(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(text.train):,} characters to learn from")

    losses: list[Tensor] = []
    started, paused, rate = time.perf_counter(), 0.0, None
    for step in range(1, args.steps + 1):
        lr = schedule.get_last_lr()[0]
        inputs, targets = (ids.to(args.device) for ids in draw_batch(text.train, args.batch, args.seq))
        losses.append(train_step(model, optimizer, schedule, (inputs, targets)))
        # Losses stay tensors until somebody wants to see one: reading each would make the loop wait for it.
        if step == WARM_UP_STEPS or step % args.log_every == 0 or step == args.steps:
            loss = losses[-1].item()
            if step > WARM_UP_STEPS:
                rate = (step - WARM_UP_STEPS) / (time.perf_counter() - started - paused)
            say(f"step {step:4d}  loss {loss:.4f}  lr {lr:.2e}" + (f"  {rate:6.2f} steps/s" if rate else ""))
        if step == WARM_UP_STEPS:
            started, paused = time.perf_counter(), 0.0
        if args.eval_every and step % args.eval_every == 0:
            losses[-1].item()
            stopped = time.perf_counter()
            say(f"step {step:4d}  held-out loss {evaluate(model, text.held_out, args.batch, args.seq):.4f}")
            paused += time.perf_counter() - stopped
    written = sample(model, text, args.sample) if args.sample else ""
    if written:
        say(f"--- sample ---\n{written}\n--------------")
    return Result([loss.item() for loss in losses], rate, written)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128, help="width of the model, a multiple of the heads")
    parser.add_argument("--heads", type=int, default=4, help="of attention: each is dim / heads wide")
    parser.add_argument("--seq", type=int, default=64, help="characters per window")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="where the model is trained: cpu, cuda, tpu, ...")
    parser.add_argument("--log-every", type=int, default=10, help="steps between progress lines; each reads the loss")
    parser.add_argument("--eval-every", type=int, default=100, help="steps between evaluations; 0 for never")
    parser.add_argument("--sample", type=int, default=200, help="characters to write at the end; 0 for none")
    parser.add_argument("--losses", type=Path, metavar="FILE", help="write every step's loss as JSON")
    parser.add_argument("--quiet", action="store_true", help="print nothing")
    args = parser.parse_args(argv)
    for name in ("steps", "layers", "dim", "heads", "seq", "batch", "log_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.dim % args.heads:
        parser.error(f"--dim must be a multiple of {args.heads}, the number of attention heads")
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
