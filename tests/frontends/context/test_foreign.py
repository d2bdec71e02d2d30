"""Tensors that are not ours (fake, functional, symbolic, of transforms) pass the front door untouched."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.func as tf
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves

from fused_eager import fused_eager

Tensor = torch.Tensor


def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    z = torch.nn.functional.gelu(x @ y).sum(0)
    z.mul_(2).add_(1)
    return z.view(-1), z.cumsum(0)[: x.shape[0]]


def sizes(x: Tensor) -> tuple[Any, ...]:
    """Ops that are handed symbolic sizes."""
    n = x.shape[0]
    made = x.new_zeros(n, n + 1), torch.arange(n), torch.full((n, 2), 3.0), torch.zeros(n * 2).view(n, 2), torch.eye(n)
    return *made, x.expand(n, *x.shape[1:]).repeat(2, 1), x * n, torch.where(x > n, x, x / n)


def operands() -> tuple[Tensor, Tensor]:
    return torch.ones(3, 4) * 2, torch.ones(4, 5) * 1


def graph_of(function: Callable[..., Any], *args: Any, **how: Any) -> str:
    return str(make_fx(function, **how)(*args).graph)


def aot(dynamic: bool) -> Any:
    graphs: list[str] = []

    def keep(module: Any, inputs: Any) -> Any:
        graphs.append(str(module.graph))
        return module

    x, y = operands()
    x.requires_grad_()
    out = aot_function(f, keep, keep, dynamic=dynamic)(x, y)
    out[0].sum().backward()
    return graphs, [t.detach() for t in out], x.grad


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)).sum(0) + torch.arange(5)


def exported(**how: Any) -> Any:
    rows = torch.export.Dim("rows", min=2, max=16)
    program = torch.export.export(Small(), (torch.ones(3, 4) * 2,), dynamic_shapes={"x": {0: rows}}, **how)
    return str(program.graph), program.module()(torch.ones(5, 4)).detach()


def faked(symbolic: bool) -> Any:
    mode = FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)
    x, y = (mode.from_tensor(t) for t in operands())
    return [(type(t).__name__, str(t.shape)) for t in (*f(x, y), x + 1, torch.cat([x, x]), x.reshape(-1).sum())]


def fake_mode() -> Any:
    with FakeTensorMode():
        return [(type(t).__name__, str(t.shape)) for t in f(*operands())]


def symbolic_meta() -> Any:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    n = mode.from_tensor(torch.ones(3, 4)).shape[0]
    t = torch.empty((n, 2), device="meta")
    return str(((t + 1) * 2).sum(1).shape)


def transforms() -> Any:
    x, y = operands()
    return (
        tf.grad(lambda a: f(a, y)[0].sum())(x),
        tf.vmap(lambda a: f(a.view(1, 4), y)[0])(x),
        tf.jvp(lambda a: f(a, y)[0], (x,), (x * 2,)),
        tf.hessian(lambda a: (a**3).sum())(x[0]),
        tf.functionalize(f)(x, y),
    )


@torch.library.custom_op("fused_eager_tests::double_sine", mutates_args=())
def double_sine(x: Tensor) -> Tensor:
    return x.sin() * 2


double_sine.register_fake(torch.empty_like)
double_sine.register_autograd(
    lambda ctx, grad: grad * 2 * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)

PROGRAMS: dict[str, Callable[[], Any]] = {
    "make_fx symbolic": lambda: graph_of(f, *operands(), tracing_mode="symbolic"),
    "make_fx fake": lambda: graph_of(f, *operands(), tracing_mode="fake"),
    "make_fx real": lambda: graph_of(f, *operands(), tracing_mode="real"),
    "make_fx before dispatch": lambda: graph_of(f, *operands(), tracing_mode="symbolic", pre_dispatch=True),
    "make_fx functional": lambda: graph_of(tf.functionalize(f), *operands(), tracing_mode="symbolic"),
    "make_fx of a gradient": lambda: graph_of(
        tf.grad(lambda a: f(a, torch.ones(4, 5))[0].sum()), operands()[0], tracing_mode="symbolic"
    ),
    "make_fx of sizes": lambda: graph_of(sizes, operands()[0], tracing_mode="symbolic"),
    "aot": lambda: aot(False),
    "aot dynamic": lambda: aot(True),
    "export": exported,
    "fake tensors": lambda: faked(False),
    "symbolic tensors": lambda: faked(True),
    "fake mode": fake_mode,
    "symbolic meta": symbolic_meta,
    "transforms": transforms,
    "opcheck": lambda: torch.library.opcheck(double_sine, (torch.ones(3, requires_grad=True) * 1,)),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},  # measures which way is faster, and looks at the first op of each segment for that
    "fused": {"compile": "wait", "native": "never"},
    "strict": {"mode": "strict"},
    "debug": {"mode": "debug"},
}


def agree(expected: Any, actual: Any) -> None:
    for a, b in zip(tree_leaves(expected), tree_leaves(actual), strict=True):
        if isinstance(a, Tensor):
            torch.testing.assert_close(b, a)
        else:
            assert a == b


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.thinned(10)
def test_traced_as_without_the_library(name: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSED_EAGER_NATIVE", raising=False)
    monkeypatch.delenv("FUSED_EAGER_COMPILE", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = PROGRAMS[name]()
        with fused_eager(progress=False, **OPTIONS[options]):
            for _ in range(3):
                actual = PROGRAMS[name]()
                assert (torch.ones(2) + 1).sum().item() == 4  # a read: the next op begins a segment
        agree(expected, actual)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("symbolic", [False, True])
def test_a_context_in_a_fake_mode(symbolic: bool, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSED_EAGER_NATIVE", raising=False)
    mode = FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)
    x, y = (mode.from_tensor(t) for t in operands())
    expected = [str(t.shape) for t in f(x, y)]
    with mode, fused_eager(**OPTIONS[options]):
        for _ in range(3):
            made = [*f(x, y), torch.ones(x.shape[0], 2) * 2]
            assert {type(t).__name__ for t in made} == {"FakeTensor"}
            assert [str(t.shape) for t in made[:2]] == expected
