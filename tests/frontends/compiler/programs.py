"""Programs for `torch.compile`: each makes a function of a seed, run in eager and compiled and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Tensor = torch.Tensor
Make = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
PROGRAMS: dict[str, Make] = {}


def program(make: Make) -> Make:
    PROGRAMS[make.__name__] = make
    return make


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, p: float = 0.0):
        super().__init__()
        self.heads, self.p = heads, p
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.p if self.training else 0.0)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, p: float = 0.0):
        super().__init__()
        self.a, self.b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, p)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(p))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.a(x))
        return x + self.mlp(self.b(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 32, width: int = 16, layers: int = 2, p: float = 0.0):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList([Block(width, 2, p) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.n, self.m = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.m(self.b(F.relu(self.n(self.a(x))))))


@program
def mlp() -> Any:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)), (torch.randn(4, 8),)


@program
def gpt() -> Any:
    return GPT(), (torch.randint(32, (2, 8)), torch.randint(32, (2, 8)))


@program
def gpt_with_dropout() -> Any:
    return GPT(p=0.2), (torch.randint(32, (2, 8)), torch.randint(32, (2, 8)))


@program
def wide() -> Any:
    return nn.Sequential(nn.Linear(64, 700), nn.GELU(), nn.Dropout(0.1), nn.Linear(700, 200)), (torch.randn(90, 64),)


@program
def residual_block() -> Any:
    return Residual().double(), (torch.randn(2, 4, 6, 6).double(),)


@program
def residual_block_by_pixels() -> Any:
    last = torch.channels_last
    return Residual().double().to(memory_format=last), (torch.randn(2, 4, 6, 6).double().to(memory_format=last),)


@program
def lstm_cell() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            state = None
            for step in x:
                state = self.cell(step, state)
            assert state is not None
            return state[0] + state[1]

    return Net(), (torch.randn(3, 2, 4),)


@program
def view_of_an_input() -> Any:
    return (lambda x: (x.t(), x[1:], x.sum())), (torch.randn(3, 4),)


@program
def memory_counted_from_the_storage() -> Any:
    base = torch.arange(40.0)

    def f(x: Tensor, y: Tensor) -> Any:
        return x.as_strided((3,), (2,), 9), y.as_strided((2, 2), (3, 1), 1) * 2, x.as_strided((2,), (1,))

    return f, (base[4:20], torch.arange(20.0))


@program
def memory_beyond_a_tensor() -> Any:
    return (lambda x: x.as_strided((3,), (2,), 9) + 1), (torch.arange(40.0)[:5],)


@program
def the_input_itself() -> Any:
    return (lambda x, y: (x, y + 1, x)), (torch.randn(3), torch.randn(3))


@program
def nothing_at_all() -> Any:
    return (lambda x: None), (torch.randn(3),)


@program
def constants() -> Any:
    return (lambda x: (x + torch.tensor([1.0, 2.0, 3.0]), torch.ones(3), 5)), (torch.randn(3),)


@program
def views_of_one_result() -> Any:
    def f(x: Tensor) -> Any:
        y = x.exp()
        return y, y[0], y.t()

    return f, (torch.randn(3, 4),)


@program
def update_of_an_input() -> Any:
    def f(x: Tensor) -> Tensor:
        x.mul_(2).add_(1)
        return x.sum()

    return f, (torch.randn(3, 4),)


@program
def update_of_large_memory() -> Any:  # more than tensors without a value have real memory for
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        x[:7] += y
        return (x @ y.t()).relu_()

    return f, (torch.randn(300, 200).double(), torch.randn(7, 200).double())


@program
def update_of_a_part() -> Any:
    def f(x: Tensor) -> Tensor:
        x[1:, ::2] = 7
        return x * 2

    return f, (torch.randn(4, 6),)


@program
def update_of_a_view() -> Any:
    base = torch.randn(4, 6)
    return (lambda x: x.add_(1).sum()), (base[1:3, 1:4],)


@program
def update_of_interleaved_views() -> Any:
    base = torch.randn(8)

    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        y.mul_(3)
        return x + y

    return f, (base[::2], base[1::2])


@program
def update_of_overlapping_views() -> Any:
    base = torch.randn(8)

    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x * y

    return f, (base[:6], base[2:])


@program
def update_of_what_is_returned() -> Any:
    def f(x: Tensor) -> Any:
        y = x + 1
        z = y[0]
        y.mul_(3)
        return y, z

    return f, (torch.randn(3, 4),)


@program
def dropout_and_noise() -> Any:
    def f(x: Tensor) -> Tensor:
        x = F.dropout(torch.tanh(x), 0.4)
        x = x + torch.randn_like(x) * torch.rand(x.shape[-1])
        return x * torch.bernoulli(torch.sigmoid(x)) + F.dropout(x, 0.5) + torch.randint(0, 9, x.shape)

    return f, (torch.randn(6, 5),)


@program
def dropout_of_what_is_transposed() -> Any:
    return (lambda x: F.dropout(x.sin().t(), 0.5) + F.dropout(x.t(), 1.0)), (torch.randn(3, 4),)


@program
def an_encoder_layer() -> Any:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double(), (torch.randn(2, 5, 8).double(),)


@program
def images_in_evaluation() -> Any:
    return Residual().double().eval(), (torch.randn(2, 4, 6, 6).double(),)


@program
def draws_in_order() -> Any:
    def f(x: Tensor) -> Tensor:
        a = torch.multinomial(torch.softmax(x, -1), 2)  # needs a value
        b = torch.rand(3)  # needs none, and comes after it
        return a.float().sum() + b.sum() + torch.normal(x.abs(), 1.0).sum() + torch.randperm(5).float()[0]

    return f, (torch.randn(3, 5),)


@program
def an_island() -> Any:
    return (lambda x: torch.special.bessel_j0(x.sin()).cos() + torch.linalg.eigvals(x @ x.t()).real.sum()), (
        torch.randn(4, 4),
    )


@program
def complex_numbers() -> Any:
    return (lambda x: (torch.fft.fft(x).conj() * 2, torch.fft.fft(x).conj().real)), (torch.randn(8),)


@program
def a_conjugated_input() -> Any:
    return (lambda x: x * 2 + x.conj()), (torch.randn(4, dtype=torch.complex64).conj(),)


@program
def half_and_int() -> Any:
    return (lambda x, i: (x * 2 + i, (i // 2).to(torch.int8), x.to(torch.bfloat16) @ x.to(torch.bfloat16).t())), (
        torch.randn(3, 3),
        torch.arange(9).view(3, 3),
    )


@program
def empty_tensors() -> Any:
    return (lambda x: (x + 1, x.sum(), torch.cat([x, x.new_ones(2, 3)]))), (torch.randn(0, 3),)


@program
def memory_of_its_own() -> Any:
    def f(x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], 2)
        out[:, 0] = x.sum(-1)
        out[:, 1] = x.amax(-1)
        return out

    return f, (torch.randn(3, 4),)


@program
def numbers() -> Any:
    return (lambda x, n, s: (x * n + s, n + 1, [s] * 2)), (torch.randn(3), 4, 0.5)


@program
def indexing() -> Any:
    def f(x: Tensor, i: Tensor) -> Any:
        y = x.clone()
        y[i] = 0
        return y, x[i], x.gather(0, i.view(-1, 1)), x.index_add(0, i, torch.ones(3, 4))

    return f, (torch.randn(5, 4), torch.tensor([0, 3, 1]))


@program
def a_sort_and_a_scan() -> Any:
    return (lambda x: (x.sort(-1), x.cumsum(0), x.topk(2), x.argmax(-1))), (torch.randn(4, 5),)


def parameters(function: Any) -> Iterator[Tensor]:
    if isinstance(function, nn.Module):
        yield from function.parameters()
        yield from function.buffers()
