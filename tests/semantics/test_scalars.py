"""Python numbers: exact to the bit, typed as in eager, and inputs of a region rather than constants in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fused_eager import fused_eager

from .programs import check, compilations, run

Program = Callable[[], Any]


def bits(t: torch.Tensor) -> Any:
    return t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.dtype.itemsize]).tolist(), t.dtype


def _exact_integers() -> Any:
    x = torch.zeros(3, dtype=torch.int64)
    return (
        x + (2**40 + 1),
        x + 2**62,
        x - 2**63,
        (x + 3) * (2**61 + 1),
        x.fill_(2**53 + 1),
        x // 3,
        (x - 7) % 4,
        torch.full((2,), 2**63 - 1),
    )


def _exact_floats() -> Any:
    z, d = torch.zeros(3), torch.zeros(3, dtype=torch.float64)
    numbers = (0.1, 1e-300, 1 / 3, math.pi, 2**53 + 1, -1e308, 5e-324, 1 + 2**-52)
    return [bits(d + v) for v in numbers], [
        bits(z + v) for v in (0.1, 1 / 3, 16777217, 1e-40, 1e39, 3.4028235677973366e38)
    ]


def _signed_zeros_in_turn() -> Any:
    out = []
    for v in (-0.0, 0.0, -0.0, 0.0):
        z = torch.zeros(2)
        out += [
            bits(torch.full((2,), v)),
            bits(z * v),
            bits(z.fill_(v)),
            bits(torch.ones(2).mul_(v)),
            bits(torch.ones(2) * v),
        ]
    return out


def _nan_and_infinity_in_turn() -> Any:
    x = torch.ones(2)
    return (
        [x + v for v in (float("nan"), float("inf"), -float("inf"), 1.0)],
        x.clamp(max=float("inf")),
        x.clamp(min=float("nan")),
    )


def _kinds_in_turn() -> Any:
    out = []
    for x in (
        torch.ones(2, dtype=torch.int64),
        torch.ones(2),
        torch.ones(2, dtype=torch.bool),
        torch.ones(2, dtype=torch.uint8),
    ):
        out += [x * v for v in (True, 1, 1.0, 1 + 0j, 2, False, 0)]
        out += [torch.full((2,), v) for v in (True, 1, 1.0, 1j)]
        out += [torch.where(x > 0, v, x) for v in (True, 1, 1.0)]
    return out


def _kinds_of_equal_value_share_nothing() -> Any:
    x = torch.arange(3)
    return [x + True, x + 1, x + 1.0, x.eq(True), x.eq(1), x.eq(1.0), x.pow(1), x.pow(1.0), x.clamp(1), x.clamp(1.0)]


def _small_dtypes_wrap() -> Any:
    u, s = torch.zeros(2, dtype=torch.uint8), torch.zeros(2, dtype=torch.int8)
    return u + 300, u - 1, s + 127 + 1, s - 129, u.add(255).mul_(2), torch.full((2,), 255, dtype=torch.uint8) + 1


def _low_precision() -> Any:
    h, b = torch.zeros(2, dtype=torch.float16), torch.zeros(2, dtype=torch.bfloat16)
    return (
        bits(b + 1.00390625),
        bits(h + 65519),
        bits(b + 3.3895e38),
        (h + 1e5),
        bits(h + 0.1),
        bits(b + 0.1),
        bits(b + 1 / 3),
    )


def _subnormal_numbers() -> Any:
    x, d = torch.full((3,), 1e-40), torch.full((3,), 1e-310, dtype=torch.float64)
    h = torch.full((3,), 1e-7, dtype=torch.float16)
    return (
        bits(x * 1),
        bits(x + 0),
        bits(torch.full((3,), 1e-38) * 0.5),
        bits(d * 1),
        bits(h * 1),
        bits(x.clone()),
        bits(x.abs()),
        (x > 0).tolist(),
    )


def _complex_numbers() -> Any:
    z = torch.ones(2, dtype=torch.complex64)
    return (
        z * 2j,
        z + (1 - 0.0j),
        torch.full((2,), complex(-0.0, 0.0)).real,
        torch.ones(2) * 1j,
        torch.ones(2, dtype=torch.float64) + 1j,
    )


def _zero_dim_tensors_are_weak() -> Any:
    s, d = torch.tensor(2.5, dtype=torch.float64), torch.tensor(3)
    x, i = torch.ones(2), torch.ones(2, dtype=torch.int32)
    return (
        x * s,
        i * s,
        i * d,
        x * d,
        s * d,
        s * x.double(),
        torch.tensor(True) * i,
        i.float() + s,
        x.half() * s,
        s.view(1) * x,
    )


def _default_dtype_changes() -> Any:
    def some() -> Any:
        a = torch.arange(1, 4)
        return [
            a / 2,
            a.sin(),
            a * 1.5,
            torch.full((2,), 1.5),
            torch.arange(3.0),
            torch.linspace(0, 1, 3),
            a.float().sum(),
            torch.tensor(1.5) * a,
        ]

    out = [some()]
    torch.set_default_dtype(torch.float64)
    try:
        out.append(some())
    finally:
        torch.set_default_dtype(torch.float32)
    out.append(some())
    return out


def _numpy_numbers() -> Any:
    import numpy as np

    x = torch.ones(2)
    return (
        x * np.float64(2.5),
        x + np.int64(3),
        x * np.float32(0.1),
        x.fill_(np.float64(7)),
        torch.ones(2, dtype=torch.int64) + np.int32(1),
    )


def _arguments_from_values() -> Any:
    n = torch.tensor(3) * 1
    return (
        torch.zeros(int(n)),
        torch.arange(n),
        torch.zeros(n, 2),
        torch.ones(6).split(n.item()),
        torch.ones(5)[:n],
        torch.ones(5)[n],
    )


def _shapes_from_numbers() -> Any:
    return (
        [torch.arange(1.0, n + 1.0) for n in range(1, 5)],
        [torch.arange(n) for n in (3, 5, 3)],
        [torch.arange(0, 12, s) for s in (1, 2, 5)],
        [torch.arange(0, 1, s) for s in (0.5, 0.25)],
        [torch.linspace(0, n, n) for n in (2, 3)],
        [torch.eye(n) for n in (1, 3)],
    )


def _alphas_and_values() -> Any:
    x, y = torch.ones(3), torch.arange(3.0)
    out = []
    for a in (0.5, 0.25, 2, -1):
        out += [
            x.add(y, alpha=a),
            x.sub(y, alpha=a),
            torch.addcmul(x, y, y, value=a),
            torch.addcdiv(x, y, x, value=a),
            y.lerp(x, a),
            y.pow(a),
            torch.addmm(torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2), beta=a, alpha=a),
            torch.pow(2, y),
            torch.rsub(y, a),
            y.clamp(0, abs(a)),
            y.masked_fill(y > 1, a),
            torch.nn.functional.leaky_relu(y - 1, a),
            torch.nn.functional.elu(y - 1, abs(a)),
            y.div(a, rounding_mode="floor"),
            y.remainder(a),
            y > a,
            y.fmod(a),
            torch.nn.functional.threshold(y, a, -a),
            torch.hypot(y, x * a),
            torch.nan_to_num(y / 0, a),
        ]
    return out


PROGRAMS = {
    name.removeprefix("_"): value
    for name, value in list(globals().items())
    if name.startswith("_") and name[1] != "_" and callable(value)
}


SUBNORMAL = ("exact_floats", "subnormal_numbers")


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in SUBNORMAL])
@pytest.mark.filterwarnings("ignore")
def test_program(name: str, mode: str) -> None:
    check(PROGRAMS[name], mode)


@pytest.mark.parametrize("name", SUBNORMAL)
def test_subnormal_numbers_are_those_of_eager_or_flushed(name: str, mode: str) -> None:
    """Each is what it is in eager, or what it is there where it flushes them."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        flushed = tree_leaves(run(PROGRAMS[name], "eager").value)
    finally:
        torch.set_flush_denormal(False)
    kept, actual = (tree_leaves(run(PROGRAMS[name], m).value) for m in ("eager", mode))
    assert len(kept) == len(flushed) == len(actual) and kept != flushed
    for position, three in enumerate(zip(kept, flushed, actual, strict=True)):
        assert three[2] in three[:2], f"{position}: {three}"


def _steady(step: Callable[[int], Any], warm: int = 3, rounds: int = 6) -> list[Any]:
    """Assert that `step(i)` compiles nothing once it has run a few times. Returns what the rounds returned."""
    with fused_eager(mode="fused"):
        got = [step(i) for i in range(warm)]
        with compilations(at_most=0):
            got += [step(i) for i in range(warm, warm + rounds)]
    return got


@pytest.mark.parametrize("kind", ["sgd", "sgd foreach", "adam", "adam foreach", "adamw", "adamw foreach"])
def test_a_schedule_does_not_recompile(kind: str) -> None:
    name, _, foreach = kind.partition(" ")
    m = nn.Linear(3, 2)
    cls = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    opt = cls(m.parameters(), lr=0.1, foreach=bool(foreach))
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda e: 1 / (e + 1))
    x = torch.ones(4, 3)

    def step(_: int) -> None:
        opt.zero_grad()
        m(x).pow(2).mean().backward()
        opt.step()
        schedule.step()

    _steady(step)


def _assigned(x: torch.Tensor, place: Any, value: Any) -> list[Any]:
    y = x.clone()
    y[place] = value
    return y.tolist()


def _add_to_row(y: torch.Tensor, row: int) -> torch.Tensor:
    y[row].add_(y[0])
    return y


SCALED: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "times a float": lambda x, i: (x * (0.1 * i)).sum().item(),
    "plus an int": lambda x, i: (x + i).sum().item(),
    "a float divided": lambda x, i: (1.5 * i / (x + 1)).sum().item(),
    "in place": lambda x, i: x.clone().mul_(0.5 + i).add_(i).sum().item(),
    "alpha": lambda x, i: x.add(x, alpha=0.1 * i).sum().item(),
    "lerp": lambda x, i: x.lerp(x * 2, 0.1 * i).sum().item(),
    "clamp": lambda x, i: x.clamp(0.1 * i, 5.0 + i).sum().item(),
    "compare": lambda x, i: (x > 0.5 * i).sum().item(),
    "fill": lambda x, i: torch.full((8,), 0.1 * i).sum().item(),
    "where": lambda x, i: torch.where(x > 1, 0.1 * i, x).sum().item(),
    "masked_fill": lambda x, i: x.masked_fill(x > 1, -1.0 * i).sum().item(),
    "assignment": lambda x, i: _assigned(x, slice(0, 2), 0.3 * i),
    "floor division": lambda x, i: (x // (i + 1)).sum().item(),
    "weighted sum": lambda x, i: torch.sub(x, x, alpha=0.2 * i).sum().item(),
    "addcmul": lambda x, i: torch.addcmul(x, x, x, value=0.1 * i).sum().item(),
    "tensor of a number": lambda x, i: (x * torch.tensor(0.1 * i)).sum().item(),
    "select": lambda x, i: (x[i % 8] * 2).item(),
    "slice": lambda x, i: (x[i % 4 : i % 4 + 3] * 2).sum().item(),
    "slice of a computed": lambda x, i: ((x * 2)[i % 4 : i % 4 + 3] * 2).sum().item(),
    "write a slice": lambda x, i: _assigned(x, slice(i % 4, i % 4 + 3), 2.0),
    "write an element": lambda x, i: _assigned(x, i % 8, 1.0),
    "add to a row": lambda x, i: _add_to_row((x * 2).reshape(4, 2), i % 3 + 1).tolist(),
    "write a row that is computed from another": lambda x, i: _assigned(x.reshape(4, 2), i % 4, x[2:4] * 3),
    "narrow": lambda x, i: x.narrow(0, i % 4, 2).add(1).sum().item(),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", SCALED)
def test_a_number_that_changes_does_not_recompile(name: str) -> None:
    x = torch.arange(8.0)
    got = _steady(lambda i: SCALED[name](x, i + 1))
    wanted = [SCALED[name](x, i + 1) for i in range(len(got))]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), equal_nan=True)


@pytest.mark.parametrize(
    "program",
    [
        lambda x, i: (x ** (0.5 + i)).sum().item(),
        lambda x, i: (torch.roll(x, i % 4) * x).sum().item(),
    ],
    ids=["power", "roll"],
)
def test_what_decides_the_code_is_compiled_once_for_each_number(program: Callable[[torch.Tensor, int], Any]) -> None:
    """As exponents and shifts do, and shapes: the numbers are right, and none is compiled a second time."""
    x = torch.arange(8.0)
    wanted = [program(x, i) for i in range(1, 4)]
    for turn in range(2):
        with fused_eager(mode="fused"), compilations(at_most=0 if turn else 3):
            got = [program(x, i) for i in range(1, 4)]
        torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted))


def test_the_numbers_of_an_earlier_round_are_not_reused() -> None:
    x = torch.arange(4.0)
    for i in range(5):
        check(
            lambda i=i: (x * (i + 0.5) + i, x.add(x, alpha=i), x.clamp(max=i / 2), torch.full((2,), float(i))), "fused"
        )


def test_off_is_eager() -> None:
    with compilations(at_most=0):
        assert run(lambda: torch.ones(3) * 3, "off").error is None
