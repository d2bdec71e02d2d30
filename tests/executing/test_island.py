"""Islands: ATen runs a node, with the program's own strides, on copies of what it writes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fused_eager.fusion_rules.geometry import Geometry
from fused_eager.fusion_rules.spec import Spec

from fused_eager import IslandRefused, fused_eager, report, sync
from fused_eager.devices.host.buffers import buffer_of
from fused_eager.executing import island
from fused_eager.executing.island import annotated, run_node, to_home, view
from fused_eager.log.events import LOG
from fused_eager.tracing import calls
from fused_eager.tracing.stream import Result
from tests.streams import aten, events, node, open_stream, passing_for_aten


@torch.library.custom_op("island_test::scale", mutates_args=())
def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


@scale.register_fake
def _(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("island_test::bump", mutates_args=("x",))
def bump(x: torch.Tensor, by: float) -> None:
    x.add_(by)


@torch.library.custom_op("island_test::fail", mutates_args=())
def fail(x: torch.Tensor) -> torch.Tensor:
    if x.sum() < 0:
        raise ValueError("no negative numbers")
    return x.clone()


fail.register_fake(torch.empty_like)


@torch.library.custom_op("island_test::grow", mutates_args=("x",))
def grow(x: torch.Tensor) -> None:
    if x[0] > 0:
        x.resize_(6).fill_(1)


grow.register_fake(lambda x: None)

OPS = torch.ops.island_test


@pytest.fixture(autouse=True)
def deferrable() -> Iterator[None]:
    """Our ops are deferred, as ATen's are."""
    with passing_for_aten(OPS.scale.default, OPS.bump.default, OPS.fail.default):
        yield


def deferred_islands() -> int:
    """How many nodes of a stream have run as islands so far; what ran at once does not count."""
    return sum(n for kind, n in LOG.counts.items() if kind.startswith("island island_test."))


def deferred(program: Callable[..., Any], *args: Any) -> Any:
    """The program's result, the second time: what has no lowering runs at once the first time it is called."""
    program(*args)
    return program(*args)


def strided_views() -> list[torch.Tensor]:
    base = torch.arange(24.0).view(2, 3, 4)
    flat = base.view(-1)
    return [base, base.permute(2, 0, 1), base[:, 1:, ::2], flat[:1].expand(5), flat[7:], base.view(torch.int32)]


@pytest.mark.parametrize("index", range(6))
def test_a_view_of_a_home_is_the_view(index: int) -> None:
    t = strided_views()[index]
    g = Geometry(tuple(t.shape), t.stride(), t.storage_offset(), t.dtype)
    assert torch.equal(view(torch.arange(24.0), g), t)


def test_lazy_bits_are_part_of_a_view() -> None:
    home = torch.tensor([1 + 2j, 3 - 1j])
    assert view(home, Geometry((2,), (1,), 0, home.dtype, conj=True)).tolist() == [1 - 2j, 3 + 1j]
    assert view(home, Geometry((2,), (1,), 0, home.dtype, neg=True)).tolist() == [-1 - 2j, -3 + 1j]


def result_for(t: torch.Tensor, home: tuple[int, ...]) -> Result:
    spec = Spec(tuple(t.shape), t.dtype, t.stride(), t.device)
    return Result(0, (t.dtype, home), Geometry(spec.shape, spec.strides, 0, t.dtype), None, spec)


def test_outputs_become_dense_homes_in_memory_order() -> None:
    t = torch.arange(6.0).view(2, 3).t()
    assert to_home(t, result_for(t, (2, 3))).tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert to_home(t.contiguous(), result_for(t, (2, 3))).tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_an_output_that_is_not_what_was_promised_is_refused() -> None:
    t = torch.ones(3)
    with pytest.raises(RuntimeError, match="promised"):
        to_home(torch.ones(4), result_for(t, (3,)))
    with pytest.raises(RuntimeError, match="promised"):
        to_home(t.double(), result_for(t, (3,)))


def test_a_node_reads_its_operands_and_leaves_its_result() -> None:
    values: dict[int, Any] = {0: torch.arange(8.0) - 3}
    run_node(node(1, [0]), values)
    assert values[1].tolist() == (torch.arange(8.0) - 3).relu().tolist()


def test_what_an_op_resizes_is_resized_in_the_program() -> None:
    with passing_for_aten(OPS.grow.default), fused_eager(compile="wait"):
        for _ in range(2):
            x = torch.ones(3) * 2
            OPS.grow(x)
            assert x.shape == (6,) and (x + 1).tolist() == [2.0] * 6


def test_what_an_op_resizes_unforeseen_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has not resized such an argument before: what it holds decides."""
    monkeypatch.setattr(calls, "rehearse", lambda *args: (args[-1], ""))
    refused = pytest.raises(RuntimeError, match=r"has resized to \(6,\)")
    with passing_for_aten(OPS.grow.default), refused, fused_eager(compile="wait"):
        OPS.grow(torch.ones(5) * 0)
        OPS.grow(torch.ones(5) * 2)


def test_errors_keep_their_type_and_tell_the_line() -> None:
    n = node(1, [0], aten.relu.default)
    n.place = (test_errors_keep_their_type_and_tell_the_line.__code__, 12)
    told = annotated(IndexError("oh"), n)
    assert type(told) is IndexError and str(told) == f"oh (raised by aten.relu.default at {__file__}:12)"

    class Strange(Exception):
        def __init__(self, a: int, b: int):
            super().__init__("strange")

    assert "Strange" in str(annotated(Strange(1, 2), n))


PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "between regions": lambda x: scale(x * 2, 1.5) + 1,
    "a changing number": lambda x: [scale(x, float(i)) for i in range(3)],
    "strides": lambda x: scale((x * 2).t(), 2.0),
    "a view": lambda x: scale((x * 2)[1:, ::2], 2.0) + 1,
    "writes a pending tensor": lambda x: (lambda y: (bump(y, 1.0), y * 2)[1])(x * 2),
    "writes a view, the old value is read": lambda x: (lambda y: (y + 1, bump(y[1], 5.0), y))(x * 2)[::2],
    "writes native memory": lambda x: (lambda y: (x * 2, bump(y, 1.0), y * 3))(x.clone())[::2],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_islands_compute_what_eager_does(name: str) -> None:
    x = torch.arange(16.0).view(4, 4)
    expected = PROGRAMS[name](x.clone())
    before = deferred_islands()
    with fused_eager():
        actual = deferred(lambda: PROGRAMS[name](x.clone()))
    assert deferred_islands() > before
    for e, a in zip(
        expected if isinstance(expected, (list, tuple)) else [expected],
        actual if isinstance(actual, (list, tuple)) else [actual],
        strict=True,
    ):
        assert torch.equal(e, a) and e.stride() == a.stride()


def test_islands_are_told_with_their_line_and_counted() -> None:
    with events("island") as seen, fused_eager():
        y = scale(torch.empty(8, 3), 2.0) + 1
        sync()
        before = LOG.counts["island island_test.scale.default"]
        for _ in range(3):
            y = scale(torch.empty(8, 3), 2.0) + 1
            sync()
        assert LOG.counts["island island_test.scale.default"] == before + 3
    assert 1 <= len(seen) <= 2, "told once at once, and once when it was planned"
    for e in seen:
        assert e.data["op"] == "island_test.scale.default"
        assert e.data["site"].startswith(__file__) and e.data["reason"]
    assert "island_test.scale.default" in report().islands
    del y


def test_an_island_waits_for_its_turn() -> None:
    with fused_eager():
        y = deferred(scale, torch.empty(8), 2.0)
        assert [str(n.op) for n in open_stream().nodes] == ["island_test.scale.default"]
        del y


def test_islands_can_be_refused() -> None:
    x = torch.ones(9)
    for _ in range(3):
        with pytest.raises(IslandRefused, match=r"island_test\.scale"), fused_eager(islands="refuse"):
            (scale(x, 2.0) + 1).sum().item()
        with fused_eager():
            assert (scale(x, 2.0) + 1).sum().item() == 27


def test_islands_are_refused_however_fast_torch_alone_is() -> None:
    with fused_eager(islands="refuse", native="measured", compile="auto"):
        x = torch.ones(4)
        for _ in range(200):  # enough for a loop of tiny ops to be left to torch
            x = (x * 0.5 + 1).clamp(0, 3)
            x.sum().item()
        with pytest.raises(IslandRefused, match=r"aten\.linalg_eig.*"):
            torch.linalg.eigvals(x.reshape(2, 2)).abs().sum().item()


def test_an_island_is_told_of_once_at_the_line_of_the_program() -> None:
    island._told.clear()
    with warnings.catch_warnings(record=True) as caught, fused_eager(islands="warn"):
        warnings.simplefilter("always")
        for _ in range(3):
            torch.linalg.eigvals(torch.ones(2, 2) * 2).abs().sum().item()
    told = [w for w in caught if "runs natively at" in str(w.message)]
    assert len(told) == 1 and str(told[0].message).startswith("aten.linalg_eig")
    assert told[0].filename == __file__ and f"{__file__}:{told[0].lineno}" in str(told[0].message)


def test_a_failing_island_raises_its_own_error_at_the_sync() -> None:
    with fused_eager():
        fail(torch.ones(8))
        y = fail(-torch.ones(8))
        with pytest.raises(ValueError, match=r"no negative numbers \(raised by island_test\.fail\.default at .*island"):
            y.tolist()


def test_autocast_at_the_sync_does_not_reach_ops_from_before_it() -> None:
    @torch.library.custom_op("island_test::square", mutates_args=())
    def square(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    square.register_fake(torch.empty_like)
    x = torch.full((4, 4), 1.001)
    with passing_for_aten(OPS.square.default), fused_eager():
        y = deferred(square, x)
        assert [n.op for n in open_stream().nodes] == [OPS.square.default]
        with torch.autocast("cpu", torch.bfloat16):
            seen = y.numpy()
    assert seen.dtype == np.float32 and np.array_equal(seen, square(x).numpy())


def test_a_custom_op_runs_at_once_every_time() -> None:
    ran = []

    @torch.library.custom_op("island_test::tell", mutates_args=())
    def tell(x: torch.Tensor) -> torch.Tensor:
        ran.append(x.tolist())
        return x + 1

    tell.register_fake(torch.empty_like)
    with fused_eager():
        for i in range(3):
            y = tell(torch.ones(40) * i)
            assert ran[i:] == [[float(i)] * 40], "once, on finished values"
            assert not open_stream().nodes and buffer_of(y) is None
            assert (y * 2).tolist() == [2.0 * (i + 1)] * 40
    with pytest.raises(IslandRefused, match=r"island_test\.tell"), fused_eager(islands="refuse"):
        tell(torch.ones(40))
    assert len(ran) == 3
