"""Everyday programs whose loop is what is special about them. Their rows are in `benchmarks.programs`."""

from __future__ import annotations

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
