"""What the corpus and the fuzzer found, each as a test of its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fused_eager import fused_eager
from fused_eager.policy import segment
from tests.semantics.programs import MODES, check


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    """One of the three modes."""
    return str(request.param)


split_function = torch.tensor_split  # as after `from torch import tensor_split`, before there is a context


def test_split_points_that_are_pending(mode: str) -> None:
    x = torch.arange(20.0).reshape(5, 4)
    points = torch.tensor([1, 2])

    def program() -> list[torch.Tensor]:
        y, p = x * 2, points * 2
        return [*torch.tensor_split(y, p), *y.tensor_split(p - 1, dim=0),
                *y.tensor_split(tensor_indices_or_sections=p - 1, dim=1), *torch.tensor_split(y, 3),
                *split_function(y, p)]

    check(program, mode)


def _shift_columns(x: torch.Tensor) -> None:
    x[:2, 1:3] = x[:2, :2] * 3


def _shift_rows(x: torch.Tensor) -> None:
    x[1:].copy_(x[:-1] * 2)


def _fold(x: torch.Tensor) -> None:
    x[:2, 1:3].add_(x[:2, :2] + x[:2, :2].t())


def _fold_a_product(x: torch.Tensor) -> None:
    y = x[:2, :2]
    y.t().mul_(2)
    x[:2, 1:3].add_(y + 0 * y.t())


def _shift_a_step(x: torch.Tensor) -> None:
    x.view(-1)[2::2] = x.view(-1)[:-2:2] + 1


def _backwards(x: torch.Tensor) -> None:
    x[:-1] = x[1:] * 2


def _diagonal(x: torch.Tensor) -> None:
    x.diagonal().add_(x.t().diagonal(1)[:1] + x[0, :5])


# XLA:CPU writes in place while it still reads (openxla/xla#49176).
@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    "write", [_shift_columns, _shift_rows, _fold, _fold_a_product, _shift_a_step, _backwards, _diagonal]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("shape", [(5, 8), (40,), (5, 8, 1), (2, 4, 5)], ids=str)
def test_writing_a_part_that_is_computed_from_another(
    write: Callable[[torch.Tensor], None], dtype: torch.dtype, shape: tuple[int, ...], mode: str
) -> None:
    def program() -> torch.Tensor:
        x = (torch.arange(1, 41, dtype=dtype) * 2).reshape(shape) + 1
        write(x.view(5, 8))
        return x

    check(program, mode)


@pytest.mark.parametrize(
    "move",
    [
        lambda x: torch.slice_scatter(x, x[:, :2] * 3, 1, 1, 3),
        lambda x: torch.select_scatter(x, x[1] * 3, 0, 2),
        lambda x: x.index_copy(0, torch.tensor([1, 2, 3]), x[:3] * 2),
        lambda x: x.index_put((torch.tensor([1, 2, 3]),), x[:3] * 2),
        lambda x: x.scatter(0, torch.arange(1, 4)[:, None].expand(3, 8), x[:3] * 2),
        lambda x: x.diagonal_scatter(x[0, :5]),
    ],
)
def test_scattering_a_part_into_what_it_is_computed_from(
    move: Callable[[torch.Tensor], torch.Tensor], mode: str
) -> None:
    def program() -> list[torch.Tensor]:
        x = torch.arange(1.0, 41.0).reshape(5, 8) * 2
        return [move(x), move(x.t().contiguous().t()).reshape(4, 10), move(x).reshape(-1)]

    check(program, mode)


def test_entering_a_context_leaves_nothing_behind_in_dynamo() -> None:
    rules = importlib.import_module("torch._dynamo.trace_rules")
    with fused_eager():
        pass
    pattern = rules.SKIP_DIRS_RE.pattern
    for _ in range(5):
        with fused_eager():
            pass
    assert rules.SKIP_DIRS_RE.pattern == pattern
    assert "fused_eager" in pattern


def test_an_output_that_is_read_elsewhere_is_refused(mode: str) -> None:
    def program() -> torch.Tensor:
        x = torch.ones(4, 6) * 2
        return torch.cat([torch.ones(0), x], 0, out=x)

    check(program, mode)


def test_a_pointwise_output_may_be_an_operand(mode: str) -> None:
    def program() -> torch.Tensor:
        x = torch.ones(4, 6) * 2
        torch.add(x, 1, out=x)
        return torch.mul(x, x, out=x)

    check(program, mode)


@pytest.mark.parametrize("native", ["never", "measured"])
def test_versions_of_the_elements_of_a_list(native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment.Segment, "wants_native", lambda self: native == "measured")

    def program() -> list[int]:
        a, b = torch.ones(3), torch.tensor(1.0)
        for _ in range(3):
            torch._foreach_mul_([a, b], [0.5, 3])
            a.sum().item()
        return [a._version, b._version]

    with fused_eager(native=native):
        assert program() == [3, 3]


def test_dlpack_of_a_lazy_negation(mode: str) -> None:
    def program() -> list[float]:
        x = torch.ones(3, 2) * 2
        lazy = torch.complex(x, x).conj().imag
        plain = lazy.resolve_neg().numpy().tolist()
        return [torch.from_dlpack(lazy.detach()).sum().item(), *lazy.tolist()[0], *plain[0]]

    check(program, mode)


@pytest.mark.parametrize("away", [False, True], ids=["native", "pending"])
def test_a_kernel_that_conjugates_on_its_way(mode: str, away: bool) -> None:
    """Its residuals are wrong below any dispatch mode of torch's, where conjugation is put off and forgotten."""
    a, b = torch.randn(4, 3, dtype=torch.complex64), torch.randn(4, 3, dtype=torch.complex64)

    def program() -> list[torch.Tensor]:
        x, y = (a * 2, b * 3) if away else (a, b)
        return list(torch.linalg.lstsq(x, y, driver="gels")[:2])

    check(program, mode)


class Redispatched(torch.Tensor):
    """A subclass with memory of its own that hands each op on below itself, and so below all modes."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs or {})


@pytest.mark.parametrize("follower", ["python", "auto"])
def test_pending_operands_of_a_subclass_that_computes_below_all_modes(mode: str, follower: str) -> None:
    x = torch.randn(3)

    def program() -> list[torch.Tensor]:
        made = []
        for _ in range(3):
            y = (x * 2).as_subclass(Redispatched)
            plain = x.sin() + 1
            made += [y * plain, torch.stack([plain, y]), torch.where(x > 0, plain * 2, y), plain.add_(y), plain * 2]
        return made

    with fused_eager(mode=mode, follower=follower):
        got = program()
    assert all(map(torch.allclose, got, program()))
