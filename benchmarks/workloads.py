"""What is timed: one row per workload, each a function that sets the work up and returns one step of it.

A step is the same code in every system. An inference step returns its result, which the timing loop keeps alive until
`sync()`, so that nobody can win by not computing it. A training step ends by reading its loss as a float.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import MLP, Decoder, KeysAndValues, ResNet18
from examples import train_gpt

Function = TypeVar("Function", bound=Callable[..., Any])
Wrap = Callable[[Function], Function]  # what a system asks of the user: nothing, or torch.compile around the model
Result = Tensor | list[Tensor] | float
Step = Callable[[], Result]
Size = Literal["full", "tiny"]


def tiny_ops(wrap: Wrap, ops: int, shape: int) -> Step:
    x = torch.randn(shape)

    @wrap
    def chain(y: Tensor) -> Tensor:
        for _ in range(ops // 2):
            y = y * 0.999
            y = y + 0.001
        return y

    return lambda: chain(x)


def _chain(a: Tensor, b: Tensor) -> Tensor:
    """20 ops, cheap ones and transcendental ones, each reading the last."""
    c = torch.tanh(a + b)
    c = torch.sigmoid(c) * a - b
    c = torch.exp(-(c * c)) + 1.0
    c = torch.sqrt(c) * torch.where(a > 0, c, b)
    c = torch.sin(c).abs().clamp(0.1, 2.0)
    return torch.log(c) / (b * b + 1.0)


def elementwise(wrap: Wrap, count: int) -> Step:
    x, y = torch.randn(count), torch.randn(count)
    chain = wrap(_chain)
    return lambda: chain(x, y)


def _lengths(most: int) -> Iterator[int]:
    """Lengths of the upper half, each another one: multiples of the golden ratio, so that any few are spread alike."""
    for i in itertools.count(1):
        yield most - int(most // 2 * (i * 0.6180339887498949 % 1))


def ragged_elementwise(wrap: Wrap, most: int) -> Step:
    x, y, lengths = torch.randn(most), torch.randn(most), _lengths(most)
    chain = wrap(_chain)

    def step() -> Tensor:
        n = next(lengths)
        return chain(x[:n], y[:n])

    return step


def layernorm_gelu_residual(wrap: Wrap, batch: int, seq: int, dim: int) -> Step:
    x, norm = torch.randn(batch, seq, dim), nn.LayerNorm(dim)

    @wrap
    def block(x: Tensor) -> Tensor:
        return x + F.gelu(norm(x))

    @torch.no_grad()
    def step() -> Tensor:
        return block(x)

    return step


def ragged_layernorm(wrap: Wrap, most: int, dim: int) -> Step:
    x, norm, lengths = torch.randn(most, dim), nn.LayerNorm(dim), _lengths(most)

    @wrap
    def block(x: Tensor) -> Tensor:
        return x + F.gelu(norm(x))

    @torch.no_grad()
    def step() -> Tensor:
        return block(x[: next(lengths)])

    return step


def mlp_adam(wrap: Wrap, dim: int, batch: int, foreach: bool) -> Step:
    model = MLP(3, dim)
    forward = wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, foreach=foreach)
    inputs, targets = torch.randn(batch, dim), torch.randn(batch, dim)

    def step() -> float:
        loss = F.mse_loss(forward(inputs), targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def gpt(wrap: Wrap, layers: int, dim: int, seq: int, batch: int) -> Step:
    """The step of examples/train_gpt.py: dropout, clipping, AdamW and the schedule included."""
    text = train_gpt.Text.load()
    model = train_gpt.GPT(len(text.alphabet), layers, dim, seq)
    forward = wrap(model)
    optimizer = train_gpt.make_optimizer(model, lr=3e-4)
    schedule = train_gpt.make_schedule(optimizer, steps=1000)
    batches = [train_gpt.draw_batch(text.train, batch, seq) for _ in range(8)]
    steps = 0

    def step() -> float:
        nonlocal steps
        steps += 1
        return train_gpt.train_step(forward, optimizer, schedule, batches[steps % len(batches)]).item()

    return step


def resnet18_forward(wrap: Wrap, pixels: int, batch: int, width: int = 64) -> Step:
    model = wrap(ResNet18(width).eval())
    images = torch.randn(batch, 3, pixels, pixels)

    @torch.no_grad()
    def step() -> Tensor:
        return model(images)

    return step


def resnet18_train(wrap: Wrap, pixels: int, batch: int, width: int = 64) -> Step:
    model = ResNet18(width)
    forward = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)
    images, labels = torch.randn(batch, 3, pixels, pixels), torch.randint(1000, (batch,))

    def step() -> float:
        loss = F.cross_entropy(forward(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def decode(wrap: Wrap, layers: int, dim: int, tokens: int) -> Step:
    """Greedy decoding from one token; the caller reads each token, as one who streams text or waits for an end mark."""
    vocab, batch = 1024, 1
    model = wrap(Decoder(vocab, layers, dim, heads=4, length=tokens).eval())

    @torch.no_grad()
    def step() -> list[Tensor]:
        caches: list[KeysAndValues | None] = [None] * layers
        token, read = 1, []
        for place in range(tokens):
            logits, caches = model(torch.full((batch, 1), token), torch.full((batch, 1), place), caches)
            token = int(logits.argmax(-1))
            read.append(token)
        return [logits, torch.tensor(read)]

    return step


@dataclass(frozen=True)
class Workload:
    name: str
    about: str
    setup: Callable[..., Step]
    full: Mapping[str, Any]
    tiny: Mapping[str, Any]  # the same work small enough for a test
    trains: bool = False
    draws: bool = False  # draws random numbers in its steps (dropout)
    rtol: float = 1e-3
    atol: float = 1e-4

    def build(self, wrap: Wrap, size: Size = "full", seed: int = 0) -> Step:
        """A step with its own state (model, optimizer, data), equal for equal seeds."""
        torch.manual_seed(seed)
        return self.setup(wrap, **(self.full if size == "full" else self.tiny))


_MLP, _SMALL_MLP = {"dim": 1024, "batch": 256}, {"dim": 32, "batch": 8}
_NET, _SMALL_NET = {"batch": 16}, {"pixels": 64, "batch": 4, "width": 8}
_GPT, _SMALL_GPT = {"layers": 4, "dim": 256, "seq": 128, "batch": 8}, {"layers": 1, "dim": 16, "seq": 8, "batch": 2}
_DECODER, _SMALL_DECODER = {"layers": 4, "dim": 256}, {"layers": 1, "dim": 16, "tokens": 4}
_DEEP = {"dim": 64, "seq": 32, "batch": 4}
_TRAINS, _TRAINS_WITH_DROPOUT = {"trains": True}, {"trains": True, "draws": True}

ROWS = (
    Workload("tiny", "200 x (mul, add) on [8]", tiny_ops, {"ops": 400, "shape": 8}, {"ops": 6, "shape": 8}),
    Workload("elementwise_1m", "20 elementwise ops, 1M", elementwise, {"count": 1 << 20}, {"count": 100}),
    Workload("elementwise_16m", "20 elementwise ops, 16M", elementwise, {"count": 1 << 24}, {"count": 100}),
    Workload(
        "layernorm_gelu_residual",
        "[32, 512, 1024], forward",
        layernorm_gelu_residual,
        {"batch": 32, "seq": 512, "dim": 1024},
        {"batch": 2, "seq": 3, "dim": 8},
    ),
    Workload(
        "ragged_elementwise",
        "20 elementwise ops, 4M to 8M, always another length",
        ragged_elementwise,
        {"most": 1 << 23},
        {"most": 100},
    ),
    Workload(
        "ragged_layernorm",
        "[8k to 16k, 1024], always another length, forward",
        ragged_layernorm,
        {"most": 1 << 14, "dim": 1024},
        {"most": 16, "dim": 8},
    ),
    Workload(
        "mlp_adam_foreach",
        "3x1024, batch 256, training step, foreach Adam",
        mlp_adam,
        {**_MLP, "foreach": True},
        {**_SMALL_MLP, "foreach": True},
        **_TRAINS,
    ),
    Workload(
        "mlp_adam_loop",
        "3x1024, batch 256, training step, Adam parameter by parameter",
        mlp_adam,
        {**_MLP, "foreach": False},
        {**_SMALL_MLP, "foreach": False},
        **_TRAINS,
    ),
    Workload(
        "gpt_adamw",
        "4 layers, d 256, seq 128, batch 8, dropout, clipping, AdamW",
        gpt,
        _GPT,
        _SMALL_GPT,
        **_TRAINS_WITH_DROPOUT,
    ),
    *(
        Workload(f"resnet18_forward_{px}", f"{px} px, batch 16", resnet18_forward, {**_NET, "pixels": px}, _SMALL_NET)
        for px in (64, 128)
    ),
    *(
        Workload(
            f"resnet18_train_{px}",
            f"{px} px, batch 16, SGD with momentum",
            resnet18_train,
            {**_NET, "pixels": px},
            _SMALL_NET,
            **_TRAINS,
        )
        for px in (64, 128)
    ),
    *(
        Workload(
            f"decode_{tokens}",
            f"{tokens} tokens, growing key-value cache, 4 layers, d 256",
            decode,
            {**_DECODER, "tokens": tokens},
            _SMALL_DECODER,
        )
        for tokens in (32, 256)
    ),
    *(
        Workload(
            f"layers_{layers}",
            f"GPT training step of {layers} layers, d 64: how compilations grow with depth",
            gpt,
            {**_DEEP, "layers": layers},
            _SMALL_GPT,
            **_TRAINS_WITH_DROPOUT,
        )
        for layers in (2, 6, 12, 24)
    ),
)
WORKLOADS: dict[str, Workload] = {row.name: row for row in ROWS}


def select(patterns: Sequence[str], rows: Sequence[Workload] = ROWS) -> list[Workload]:
    """The rows that are called like one of the patterns or begin with it, in table order; all for no pattern.

    Raises ValueError for a pattern that selects nothing.
    """
    known = [row.name for row in rows]
    chosen: set[str] = set()
    for pattern in patterns:
        names = [pattern] if pattern in known else [name for name in known if name.startswith(pattern)]
        if not names:
            raise ValueError(f"no workload is called {pattern!r}; known: {', '.join(known)}")
        chosen.update(names)
    return [row for row in rows if not patterns or row.name in chosen]
