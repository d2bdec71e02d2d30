"""Everyday programs whose loop is what is special about them. Their rows are in `benchmarks.programs`."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import DecoderBlock
from benchmarks.workloads import Step, Wrap


def prefetching_train(wrap: Wrap, dim: int, batch: int) -> Step:
    """The next batch is prepared by a thread of a pool that was there before, while this one is learned from."""
    model = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
    forward = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters())
    raw = torch.randn(batch, dim)
    pool = ThreadPoolExecutor(1)

    def prepare() -> Tensor:
        return ((raw - raw.mean(0)) / (raw.std(0) + 1e-5)).clamp(-3, 3)

    pool.submit(int).result()
    following = pool.submit(prepare)

    def step() -> float:
        nonlocal following
        inputs, following = following.result(), pool.submit(prepare)
        optimizer.zero_grad()
        loss = F.mse_loss(forward(inputs), raw)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


class StaticDecoderBlock(DecoderBlock):
    """One token attends to a cache of fixed size, of which the first `place + 1` rows count. [1, dim] -> [1, dim]."""

    keys: Tensor
    values: Tensor

    def __init__(self, dim: int, heads: int, length: int) -> None:
        super().__init__(dim, heads)
        self.register_buffer("keys", torch.zeros(heads, length, dim // heads))
        self.register_buffer("values", torch.zeros(heads, length, dim // heads))

    def forward(self, x: Tensor, place: Tensor, hidden: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.qkv(self.norm1(x)).view(3, self.heads, 1, -1).unbind(0)
        self.keys.index_copy_(1, place, k)
        self.values.index_copy_(1, place, v)
        mixed = F.scaled_dot_product_attention(q[None], self.keys[None], self.values[None], hidden)[0]
        x = x + self.project(mixed.transpose(0, 1).reshape(1, -1))
        return x + self.mlp(self.norm2(x))


def static_cache_decode(wrap: Wrap, layers: int, dim: int, length: int) -> Step:
    """Greedy decoding into a cache of fixed size, the way that compilers ask for: each token has the same shapes."""
    vocab = 4 * dim
    tokens, head = nn.Embedding(vocab, dim), nn.Linear(dim, vocab)
    blocks = nn.ModuleList(StaticDecoderBlock(dim, 4, length) for _ in range(layers))
    places = torch.arange(length)

    def one(token: Tensor, place: Tensor) -> Tensor:
        hidden = (places <= place)[None, None, None]
        x = tokens(token)
        for block in blocks:
            x = block(x, place, hidden)
        return head(x)

    forward = wrap(one)

    @torch.no_grad()
    def step() -> float:
        token, total = 1, 0
        for k in range(length):
            token = int(forward(torch.tensor([token]), places[k : k + 1]).argmax(-1))
            total += token
        return float(total)

    return step


def two_metrics_eval(wrap: Wrap, features: int, hidden: int, batch: int, batches: int) -> Step:
    """Evaluation that reads the loss and the number of hits of each batch."""
    layers = nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)
    model = wrap(nn.Sequential(*layers))
    data = [(torch.randn(batch, features), torch.randint(0, 10, (batch,))) for _ in range(batches)]

    @torch.no_grad()
    def step() -> float:
        total, hits = 0.0, 0
        for x, y in data:
            logits = model(x)
            total += F.cross_entropy(logits, y).item()
            hits += (logits.argmax(-1) == y).sum().item()
        return total + hits

    return step


def rnn_200_steps(wrap: Wrap, dim: int, length: int, batch: int) -> Step:
    """A plain recurrent network, written as a loop, over many steps of time; trained by SGD."""
    cell, head = nn.Linear(2 * dim, dim), nn.Linear(dim, 1)
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=1e-3)
    series, target = torch.randn(length, batch, dim), torch.randn(batch, 1)

    def one(x: Tensor, hidden: Tensor) -> Tensor:
        return torch.tanh(cell(torch.cat([x, hidden], 1)))

    forward = wrap(one)

    def step() -> float:
        hidden = torch.zeros(batch, dim)
        for x in series:
            hidden = forward(x, hidden)
        loss = F.mse_loss(head(hidden), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def dqn_small_batches(wrap: Wrap, states: int, hidden: int, memory: int, batch: int, moves: int) -> Step:
    """Q-learning as it is mostly written: a move for each state, a replay memory of tuples, a small batch a move, and a
    second network that follows slowly."""
    model, slow = (nn.Sequential(nn.Linear(states, hidden), nn.ReLU(), nn.Linear(hidden, 2)) for _ in range(2))
    slow.load_state_dict(model.state_dict())
    forward = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    chance = random.Random(0)
    transitions = [
        (torch.randn(1, states), torch.tensor([[k % 2]]), torch.randn(1, states), torch.tensor([float(k % 3)]))
        for k in range(memory)
    ]

    def step() -> float:
        total = 0.0
        state = transitions[0][0]
        for _ in range(moves):
            with torch.no_grad():
                action = forward(state).max(1).indices.view(1, 1).item()
            state = transitions[int(action) + chance.randrange(memory - 1)][2]
            before, actions, after, rewards = map(torch.cat, zip(*chance.sample(transitions, batch), strict=True))
            chosen = forward(before).gather(1, actions)
            with torch.no_grad():
                best = slow(after).max(1).values
            loss = F.smooth_l1_loss(chosen, (best * 0.99 + rewards)[:, None])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 100)
            optimizer.step()
            with torch.no_grad():
                for ours, theirs in zip(slow.parameters(), model.parameters(), strict=True):
                    ours.mul_(0.995).add_(theirs, alpha=0.005)
            total += loss.item()
        return total

    return step


def notebook_mix(wrap: Wrap, most: int) -> Step:
    """Cells of a notebook: few ops each, a look at what came out, and hardly the same shape twice."""
    chance = random.Random(0)

    def step() -> float:
        rows, columns = chance.randint(2, most), chance.randint(2, most)
        table = torch.rand(rows, columns)
        shown = str((table - table.mean(0)) / (table.std(0) + 1e-6))
        pairs = table.T @ table
        order = pairs.diagonal().argsort(descending=True)[: min(5, columns)]
        kept = table[:, order]
        joined = torch.cat([kept, kept.log1p(), kept.cumsum(0)], 1)
        mask = joined > joined.median()
        return float(joined[mask].sum()) + len(shown) % 2 + mask.sum().item()

    return step
