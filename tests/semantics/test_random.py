"""Random numbers: the same as plain eager's, in every mode, and the generator's state moves alike."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fused_eager import sync

from .programs import check


def p(n: int = 6) -> torch.Tensor:
    """Pending probabilities."""
    return torch.linspace(0.1, 0.9, n) * 1.0


def _state() -> torch.Tensor:
    return torch.get_rng_state()


def _saved_and_restored() -> Any:
    a = torch.randn(3)
    state = torch.get_rng_state()
    b = torch.randn(3) + a
    torch.set_rng_state(state)
    return b, torch.randn(3)


def _restored_from_a_clone() -> Any:
    state = torch.get_rng_state().clone()
    a = torch.rand(3)
    torch.set_rng_state(state)
    return a, torch.rand(3)


def _generator() -> Any:
    g = torch.Generator().manual_seed(5)
    a = torch.randn(3, generator=g)
    state = g.get_state()
    b = torch.rand(3, generator=g) + torch.randint(0, 9, (3,), generator=g)
    g.set_state(state)
    return a, b, torch.rand(3, generator=g), torch.randperm(5, generator=g), p().multinomial(2, generator=g)


def _fork_rng() -> Any:
    with torch.random.fork_rng():
        a = torch.randn(2)
    return a, torch.randn(2)


def _native_read_then_drawn() -> Any:
    x = torch.empty(2000).fill_(1.0)
    sync()
    y = x + 1
    x.normal_()
    return y, x


def _native_read_changed_then_drawn() -> Any:
    x = torch.empty(2000).fill_(1.0)
    sync()
    y = x + 1
    x.mul_(2)
    z = x + 1
    x.uniform_()
    return y, z, x


def _pending_read_then_drawn() -> Any:
    x = torch.ones(2000) * 3
    y = x + 1
    x.normal_()
    z = x * 2
    x.add_(1)
    return y, x, z


def _device_value_read_then_drawn() -> Any:
    x = torch.ones(2000) * 3
    (x + 1).sum().item()
    y = x + 1
    x.exponential_()
    return y, x


def _failed_draw_keeps_the_value() -> Any:
    x = torch.ones(5) * 3
    try:
        x.normal_(0, -1)
    except RuntimeError as error:
        return str(error), x
    return "no error", x


def _failed_uniform_keeps_the_value() -> Any:
    x = torch.ones(5) * 3
    try:
        x.uniform_(2, 1)
    except RuntimeError as error:
        return str(error), x
    return "no error", x


def _bernoulli_from_itself() -> Any:
    x = p() * 1
    x.bernoulli_(x)
    return x


def _bernoulli_from_a_view_of_itself() -> Any:
    x = p() * 1
    x.bernoulli_(x.view(6))
    return x


def _draw_on_a_view() -> Any:
    x = torch.ones(8) * 2
    x[2:4].normal_()
    x.view(2, 4)[1].uniform_()
    x[::3].fill_(7).exponential_()
    return x


def _draw_on_a_transpose() -> Any:
    x = torch.zeros(3, 4).t()
    x.normal_()
    return x, torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last).uniform_()


def _initialisers() -> Any:
    w = torch.empty(4, 4)
    out = []
    for name in ("uniform_", "normal_", "xavier_uniform_", "kaiming_normal_", "orthogonal_", "trunc_normal_"):
        getattr(nn.init, name)(w)
        out.append(w.clone())
    nn.init.sparse_(w, 0.5)
    nn.init.dirac_(torch.empty(3, 3, 2))
    nn.init.eye_(w)
    return out, w


def _modules() -> Any:
    ms = [
        nn.Linear(3, 4),
        nn.Conv2d(1, 2, 3),
        nn.LSTM(2, 3),
        nn.Embedding(4, 2),
        nn.TransformerEncoderLayer(4, 2, 8),
        nn.Bilinear(2, 2, 2),
    ]
    return [list(m.parameters()) for m in ms]


def _dropouts() -> Any:
    x = torch.ones(2, 4, 6)
    return (
        F.dropout(x, 0.3),
        F.dropout(x, 0.5, inplace=True),
        F.dropout1d(x),
        F.alpha_dropout(x, 0.2),
        F.feature_alpha_dropout(x, 0.2),
        F.dropout2d(x.unsqueeze(0)),
        F.rrelu(x - 2, training=True),
        F.dropout(x, 0.0),
        F.dropout(x, 1.0),
        F.dropout(x, 0.5, training=False),
        F.gumbel_softmax(x),
    )


def _dropout_backward() -> Any:
    x = torch.ones(20, requires_grad=True)
    y = F.dropout(x * 2, 0.5)
    y.sum().backward()
    return y, x.grad


def _many() -> Any:
    q = p()
    return {
        "rand": torch.rand(3),
        "randn": torch.randn(3),
        "randint": torch.randint(0, 100, (5,)),
        "randperm": torch.randperm(7),
        "rand_like": torch.rand_like(q),
        "randn_like": torch.randn_like(q),
        "randint_like": torch.randint_like(q, 9),
        "bernoulli": torch.bernoulli(q),
        "bernoulli p": torch.bernoulli(q, 0.3),
        "multinomial": torch.multinomial(q, 3),
        "multinomial with": torch.multinomial(q, 9, replacement=True),
        "poisson": torch.poisson(q * 10),
        "normal": torch.normal(q, q),
        "normal number": torch.normal(q, 2.0),
        "normal mean": torch.normal(1.0, q),
        "normal size": torch.normal(0.0, 1.0, (3,)),
        "binomial": torch.binomial(q * 0 + 5, q),
        "float64": torch.rand(2, dtype=torch.float64),
        "half": torch.randn(3, dtype=torch.bfloat16),
        "complex": torch.randn(2, dtype=torch.complex64),
        "bool": torch.rand(4) > 0.5,
        "random_": torch.zeros(3).random_(10),
        "geometric_": torch.zeros(3).geometric_(0.4),
        "cauchy_": torch.zeros(3).cauchy_(),
        "log_normal_": torch.zeros(3).log_normal_(),
        "uniform int": torch.zeros(3, dtype=torch.int32).random_(5),
        "dirichlet": torch._sample_dirichlet(q),
        "gamma": torch._standard_gamma(q),
        "new": q.new_empty(3).normal_(),
        "empty_like": torch.empty_like(q).bernoulli_(q),
        "state": torch.get_rng_state()[-16:].tolist(),
    }


def _distributions() -> Any:
    from torch import distributions as d

    q = p(3)
    return [
        d.Normal(q, q).sample((2,)),
        d.Categorical(probs=q).sample((3,)),
        d.Beta(q, q).rsample(),
        d.Bernoulli(q).sample(),
        d.Gamma(q, q).sample(),
        d.MultivariateNormal(q, torch.eye(3)).sample(),
        d.Dirichlet(q).sample(),
        d.Normal(q, q).log_prob(q),
    ]


def _seeding_between() -> Any:
    torch.manual_seed(1)
    a = torch.randn(3)
    b = a + 1
    torch.manual_seed(1)
    c = torch.randn(3)
    torch.seed()
    torch.manual_seed(2)
    np.random.seed(3)
    random.seed(4)
    return a, b, c, torch.rand(1), float(np.random.rand()), random.random(), torch.initial_seed()


def _seed_from_pending() -> Any:
    torch.manual_seed(int(p()[2] * 100))
    return torch.rand(2)


def _attention_dropout() -> Any:
    q = torch.randn(1, 2, 4, 8)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.3), F.scaled_dot_product_attention(q, q, q)


def _rnn_dropout() -> Any:
    m = nn.LSTM(3, 4, 2, dropout=0.5)
    return m(torch.ones(5, 1, 3))[0]


def _no_grad_dropout() -> Any:
    with torch.no_grad():
        a = F.dropout(p(), 0.5)
    with torch.inference_mode():
        return a, F.dropout(p(), 0.5), torch.rand_like(p()), p().multinomial(2), torch.randn(2)


def _sampler() -> Any:
    from torch.utils.data import DataLoader, TensorDataset, random_split

    data = TensorDataset(torch.arange(10.0) * 2)
    first, second = random_split(data, [7, 3])
    return [b[0] for b in DataLoader(data, batch_size=3, shuffle=True)], [x[0] for x in first], [x[0] for x in second]


PROGRAMS: dict[str, Callable[[], Any]] = {
    name.removeprefix("_"): value
    for name, value in list(globals().items())
    if name.startswith("_")
    and not name.startswith("__")
    and callable(value)
    and getattr(value, "__module__", "") == __name__
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore")
def test_program(name: str, mode: str) -> None:
    check(PROGRAMS[name], mode)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore")
def test_the_generator_ends_in_the_same_state(name: str) -> None:
    def program() -> Any:
        PROGRAMS[name]()
        return torch.get_rng_state()[:5000].tolist()

    check(program, "fused")
