"""Train a character-level LSTM on the English text that every CPython carries.

    python examples/train_lstm.py --steps 200

Plain PyTorch: truncated back-propagation through time with the state carried from window to window, dropout between
the layers, Adam with gradient clipping and a cosine schedule, held-out loss and a sample at the end.
"""

from __future__ import annotations

import argparse
import json
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
State = tuple[Tensor, Tensor]


class CharLSTM(nn.Module):
    """Embedding, stacked LSTM and a linear head. Ids [batch, seq] and a state -> logits [batch, seq, vocab], state."""

    def __init__(self, vocab: int, layers: int, dim: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.lstm = nn.LSTM(dim, dim, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        hidden, state = self.lstm(self.tokens(ids), state)
        return self.head(self.drop(hidden)), state


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


def lanes(ids: Tensor, batch: int) -> Tensor:
    """The text as `batch` parallel segments, [batch, length]: window t + 1 of a lane goes on where window t ended."""
    length = len(ids) // batch
    return ids[: batch * length].view(batch, length)


def window(segments: Tensor, number: int, seq: int) -> tuple[Tensor, Tensor, bool]:
    """Window `number` of every lane: inputs and targets [batch, seq], and whether the lanes have just started over."""
    per_pass = (segments.shape[1] - 1) // seq
    if not per_pass:
        raise ValueError(f"the text is too short for {len(segments)} lanes with windows of {seq} characters")
    start = number % per_pass * seq
    inputs, targets = segments[:, start : start + seq], segments[:, start + 1 : start + seq + 1]
    return inputs, targets, start == 0


def train_step(
    model: CharLSTM,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    inputs: Tensor,
    targets: Tensor,
    state: State | None,
) -> tuple[Tensor, State]:
    """One update. Returns the loss before it, detached and not yet read, and the state for the next window."""
    logits, (hidden, cell) = model(inputs, state)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    return loss.detach(), (hidden.detach(), cell.detach())


@torch.no_grad()
def evaluate(model: CharLSTM, segments: Tensor, seq: int, windows: int = 4) -> float:
    """Mean loss over the first windows of the held-out lanes, the state carried along."""
    model.eval()
    losses, state = [], None
    for number in range(windows):
        inputs, targets, _ = window(segments, number, seq)
        logits, state = model(inputs, state)
        losses.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    model.train()
    return torch.stack(losses).mean().item()


@torch.no_grad()
def sample(model: CharLSTM, text: Text, length: int, prompt: str = "The ", temperature: float = 0.8) -> str:
    """Continue the prompt by `length` characters, one at a time, the state standing for all that was read."""
    model.eval()
    written = [text.alphabet.index(char) for char in prompt]
    logits, state = model(torch.tensor([written], device=next(model.parameters()).device))
    for _ in range(length):
        drawn = torch.multinomial((logits[:, -1] / temperature).softmax(-1), 1)
        written.append(int(drawn))
        logits, state = model(drawn, state)
    model.train()
    return "".join(text.alphabet[i] for i in written)


@dataclass
class Result:
    losses: list[float]
    steps_per_s: float | None  # steady state; None when no step was left to time
    held_out: float
    sample: str


def train(args: argparse.Namespace) -> Result:
    torch.manual_seed(args.seed)
    text = Text.load()
    segments, held_out = (lanes(ids, args.batch).to(args.device) for ids in (text.train, text.held_out))
    model = CharLSTM(len(text.alphabet), args.layers, args.dim).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps, eta_min=args.lr / 10)
    say = (lambda line: None) if args.quiet else (lambda line: print(line, flush=True))
    say(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(text.train):,} characters to learn from")

    losses: list[Tensor] = []
    state: State | None = None
    started, rate = time.perf_counter(), None
    for step in range(1, args.steps + 1):
        lr = schedule.get_last_lr()[0]
        inputs, targets, fresh = window(segments, step - 1, args.seq)
        loss, state = train_step(model, optimizer, schedule, inputs, targets, None if fresh else state)
        losses.append(loss)
        # Losses stay tensors until somebody wants to see one: reading each would make the loop wait for it.
        if step == WARM_UP_STEPS or step % args.log_every == 0 or step == args.steps:
            value = loss.item()
            if step > WARM_UP_STEPS:
                rate = (step - WARM_UP_STEPS) / (time.perf_counter() - started)
            say(f"step {step:4d}  loss {value:.4f}  lr {lr:.2e}" + (f"  {rate:6.2f} steps/s" if rate else ""))
        if step == WARM_UP_STEPS:
            started = time.perf_counter()
    unseen = evaluate(model, held_out, args.seq)
    say(f"held-out loss {unseen:.4f}")
    written = sample(model, text, args.sample) if args.sample else ""
    if written:
        say(f"--- sample ---\n{written}\n--------------")
    return Result([loss.item() for loss in losses], rate, unseen, written)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--seq", type=int, default=64, help="characters per window")
    parser.add_argument("--batch", type=int, default=16, help="segments of the text read side by side")
    parser.add_argument("--lr", type=float, default=5e-3, help="first learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="where the model is trained: cpu, cuda, tpu, ...")
    parser.add_argument("--log-every", type=int, default=20, help="steps between progress lines; each reads the loss")
    parser.add_argument("--sample", type=int, default=200, help="characters to write at the end; 0 for none")
    parser.add_argument("--losses", type=Path, metavar="FILE", help="write every step's loss as JSON")
    parser.add_argument("--quiet", action="store_true", help="print nothing")
    args = parser.parse_args(argv)
    for name in ("steps", "layers", "dim", "seq", "batch", "log_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
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
