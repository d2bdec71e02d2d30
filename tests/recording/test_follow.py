"""Following a remembered stream: it is followed, and whatever differs from last time is seen."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from fused_eager import follower, fused_eager, sync
from fused_eager.follower import build
from fused_eager.recording import follow, record
from fused_eager.tracing import trace

Body = Callable[[int], torch.Tensor]


@pytest.fixture(autouse=True, params=["python", "compiled"])
def follows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who follows: the two agree in everything."""
    if request.param == "compiled" and build.obstacle():
        pytest.skip(build.obstacle())
    monkeypatch.setenv("FUSED_EAGER_FOLLOWER", request.param)
    return str(request.param)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Counts how many ops are followed, by either, and how many are not."""
    counts = {"followed": 0, "missed": 0}
    plain, before = follow.follow, follower.ways()

    def watched(*args: object) -> object:
        out = plain(*args)  # type: ignore[arg-type]
        counts["missed" if out is follow.MISS else "followed"] += 1
        return out

    with monkeypatch.context() as patch:
        patch.setattr(record, "follow", watched)
        # The count must not move the program's frame.
        patch.setattr(follow.site, "_TO_PROGRAM", follow.site._TO_PROGRAM + 1)
        yield counts
        counts["followed"] += follower.ways()[2] - before[2]


def rounds(body: Body, n: int = 6) -> None:
    """Every round of `body` gives what it gives in eager."""
    torch.manual_seed(0)
    wanted = [body(i).clone() for i in range(n)]
    with fused_eager():
        got = [body(i).clone() for i in range(n)]
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        tell = functools.partial("round {}: {}".format, i)
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, equal_nan=True, msg=tell)
        zeros = (a == 0) & (b == 0)
        assert torch.equal(torch.signbit(a[zeros]), torch.signbit(b[zeros])), f"round {i}: a zero has another sign"


def chain(x: torch.Tensor, factor: float = 0.5) -> torch.Tensor:
    y = x * factor
    y = y + 1.0
    y.mul_(2.0)
    return y[1:].sum()


def test_a_repeated_stream_is_followed_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8)
    with fused_eager():
        for _ in range(3):
            chain(x).item()
        with counted(monkeypatch) as counts:
            for _ in range(5):
                chain(x).item()
    assert counts == {"followed": 20, "missed": 0}


def test_what_was_native_at_first_is_followed_once_it_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter is, from its first step on: each op that reads it was recorded anew in every round."""
    w, x = torch.randn(8), torch.randn(8)

    def step() -> float:
        w.sub_(w * x, alpha=0.1)
        return float(w.square().sum())

    with fused_eager():
        for _ in range(3):
            step()
        with counted(monkeypatch) as counts:
            for _ in range(5):
                step()
    assert counts == {"followed": 20, "missed": 0}


@pytest.mark.parametrize("mode", ["strict", "debug"])
def test_single_ops_are_followed_from_one_stream_to_the_next(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    x = torch.randn(8)
    with fused_eager(mode=mode):
        for _ in range(3):
            chain(x).item()
        with counted(monkeypatch) as counts:
            chain(x).item()
    assert counts == {"followed": 4, "missed": 0}


def test_numbers_are_new_every_time_to_the_bit() -> None:
    numbers = [1.0, 0.0, -0.0, math.nan, math.inf, -0.0, 0.0, 2.0]
    x = torch.tensor([1.0, -1.0, 3.0])
    rounds(lambda i: x * numbers[i], len(numbers))
    rounds(lambda i: torch.full((3,), numbers[i]) * x, len(numbers))


def test_structural_numbers_are_compared_to_the_bit() -> None:
    x = torch.ones(3, dtype=torch.complex64)
    numbers = [complex(0.0, 0.0), complex(0.0, -0.0), complex(-0.0, 0.0), complex(0.0, 0.0), complex(math.nan, 1.0)]
    rounds(lambda i: torch.view_as_real(torch.full((3,), numbers[i])) + 0 * torch.view_as_real(x), len(numbers))
    rounds(lambda i: torch.view_as_real(torch.full_like(x * 1, numbers[i])), len(numbers))


def test_kinds_of_numbers_are_different_ops() -> None:
    x = torch.arange(4)
    kinds = [2, 2.0, True, 3, 2.5, 2**70, 1]
    for k in kinds[:5] + kinds[6:]:
        rounds(lambda i, k=k: torch.add(x, k) if i % 2 else torch.add(x, 1), 4)


@pytest.mark.parametrize("change", ["shape", "stride", "dtype", "offset", "storage", "value", "neg", "order"])
def test_an_operand_that_is_seen_otherwise_is_noticed(change: str) -> None:
    base = torch.randn(4, 4)

    def body(i: int) -> torch.Tensor:
        a = base * 2.0
        b = base + 1.0
        odd = i % 3 == 2
        if change == "shape":
            b = b[:2] if odd else b
        elif change == "stride":
            b = b.t() if odd else b
        elif change == "dtype":
            b = b.view(torch.int32) if odd else b
        elif change == "offset":
            b = b.view(16)[8:].view(2, 4) if odd else b.view(16)[:8].view(2, 4)
        elif change == "storage":
            b = base if odd else b
        elif change == "value":
            b = a if odd else b
        elif change == "neg":
            b = torch._neg_view(b) if odd else b
        elif change == "order" and odd:
            a, b = b, a
        return (b * 3 - (a.sum() if change != "order" else a)).float()

    rounds(body, 9)


def add_to(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The sum, or what eager says where the two overlap."""
    try:
        return target.add_(source).clone()
    except RuntimeError as error:
        assert "single memory location" in str(error)
        return torch.zeros(9)


@pytest.mark.parametrize("mode", ["debug", "strict", "fused"])
@pytest.mark.parametrize("kind", ["coo", "csr", "csc", "mkldnn", "meta", "nested"])
def test_an_operand_that_has_no_strides_is_noticed(kind: str, mode: str) -> None:
    """Where a dense one came last time."""
    x = torch.arange(12.0).reshape(3, 4)
    other: torch.Tensor = {
        "coo": x.to_sparse, "csr": x.to_sparse_csr, "csc": x.to_sparse_csc, "mkldnn": x.to_mkldnn,
        "meta": functools.partial(x.to, "meta"), "nested": functools.partial(torch.nested.nested_tensor, [x]),
    }[kind]()  # fmt: skip
    with fused_eager(mode=mode):
        for a in (x, x, other, x):
            y = a * 3.0
            assert (y.layout, y.device, y.is_nested) == (a.layout, a.device, a.is_nested)
            if a is x:
                assert torch.equal(y, x.clone().mul_(3.0))
            elif kind not in ("meta", "nested"):
                assert torch.equal(y.to_dense(), x.clone().mul_(3.0))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("mode", ["debug", "strict", "fused"])
def test_an_operand_that_has_strides_and_no_storage_is_noticed(mode: str) -> None:
    """A gradient in oneDNN's layout comes where a dense one came last time, in one line of torch's."""
    dense = torch.linspace(0.1, 1.0, 10).requires_grad_()
    with fused_eager(mode=mode):
        other = torch.linspace(0.2, 0.7, 10).to_mkldnn().requires_grad_()
        for fast in (True, False):
            assert torch.autograd.gradcheck(
                lambda x, y: x + y.to_dense(), (dense, other), atol=0.1, check_batched_grad=False, fast_mode=fast
            )


def test_writes_that_overlap_only_sometimes() -> None:
    def body(i: int) -> torch.Tensor:
        x = torch.arange(10.0) * 1.0
        return add_to(x[1:], x[:-1] if i % 2 else torch.arange(9.0) * 1.0) + x.sum()

    rounds(body, 8)


def test_native_writes_that_overlap_only_sometimes() -> None:
    def body(i: int) -> torch.Tensor:
        x = torch.arange(10.0)
        other = torch.arange(10.0)
        return add_to(x[1:], (x if i % 2 else other)[:-1]) + x.sum()

    rounds(body, 8)


def test_native_slices_are_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.arange(400.0)

    def double(i: int) -> float:
        return (data[4 * i : 4 * i + 4] * 2).sum().item()

    with fused_eager():
        for i in range(3):
            double(i)
        with counted(monkeypatch) as counts:
            for i in range(50):
                assert double(i) == 2 * sum(range(4 * i, 4 * i + 4))
    assert counts["missed"] == 0


def test_pending_slices_at_places_that_move(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.arange(64.0)

    def body(i: int) -> torch.Tensor:
        x = data * 2.0
        return x[i : i + 4] + x[0:4]

    rounds(body, 20)


def test_writes_into_a_pending_value_at_places_that_move() -> None:
    """Found by the fuzzer: the place of a write was that of the round before."""

    def body(i: int) -> torch.Tensor:
        x = torch.arange(20.0).reshape(5, 4) * 2.0
        for j in range(6):
            x[i * (j + 1) % 5].add_(j + 1)
            x[(i + j) % 5].copy_(x[0])
            x[(i + j) % 4] = j
        return x

    rounds(body, 12)


def test_native_targets_at_another_place_or_of_part_of_their_memory() -> None:
    def body(i: int) -> torch.Tensor:
        x = torch.zeros(8)
        (x if i % 3 == 0 else x[4:] if i % 3 == 1 else x[:4])[:4].add_(1.0)
        y = torch.zeros(4)
        y.add_(x[i % 4 : i % 4 + 4] + 1.0)
        return torch.cat([x, y])

    rounds(body, 9)


def test_the_same_native_tensor_twice_and_two_tensors() -> None:
    x, y = torch.randn(4), torch.randn(4)
    rounds(lambda i: (x * (x if i % 2 else y)) + 1.0, 8)


def test_memory_that_numpy_changes_between_two_reads_of_one_op() -> None:
    def body(i: int) -> torch.Tensor:
        array = torch.arange(4.0).numpy().copy()
        x = torch.from_numpy(array)
        y = x * 2.0
        array += i
        return y + x * x

    rounds(body, 6)


def test_in_place_changes_of_geometry_between_rounds() -> None:
    x = torch.randn(3, 3)

    def body(i: int) -> torch.Tensor:
        y = x + 0.0
        if i % 2:
            y.t_()
        z = y * 2.0
        if i % 3 == 0:
            z.data = z.data.t()
        return z[0] + 1.0

    rounds(body, 12)


def test_tiny_native_work_between_two_ops_does_not_disturb(monkeypatch: pytest.MonkeyPatch) -> None:
    x, steps = torch.randn(8), [torch.tensor(0.0), torch.tensor(0.0)]

    def step() -> float:
        y = x
        for s in steps:
            s += 1
            y = y.add(1.0)
            y = y.add_(x)
        return y.sum().item()

    wanted = step()
    with fused_eager():
        for _ in range(3):
            assert step() == pytest.approx(wanted, rel=1e-6)
        with counted(monkeypatch) as counts:
            step()
    assert counts["followed"] == 5 and steps[0].item() == 5


def test_another_line_is_another_stream() -> None:
    def first(x: torch.Tensor) -> torch.Tensor:
        return torch.take(x * 2.0, torch.tensor([0, 9]))

    def second(x: torch.Tensor) -> torch.Tensor:
        return torch.take(x * 2.0, torch.tensor([0, 9]))

    with fused_eager():
        for _ in range(3):
            first(torch.randn(10)).sum().item()
            second(torch.randn(10)).sum().item()
        with pytest.raises(IndexError, match=rf"{second.__code__.co_filename}:{second.__code__.co_firstlineno + 1}\b"):
            second(torch.randn(5)).sum().item()


def test_the_default_dtype_is_part_of_it() -> None:
    x = torch.arange(3)

    def body(i: int) -> torch.Tensor:
        torch.set_default_dtype(torch.float64 if i % 2 else torch.float32)
        try:
            return x / 2
        finally:
            torch.set_default_dtype(torch.float32)

    rounds(body, 6)


def test_alternating_loops_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8)

    def cycle() -> None:
        chain(x).item()
        (x - 1.0).exp().sum().item()
        chain(x, 0.25).item()

    with fused_eager():
        for _ in range(4):
            cycle()
        with counted(monkeypatch) as counts:
            cycle()
    # What comes after a chain is once the one and once the other: the first op after it is recorded, and joins.
    assert counts["missed"] <= 2 and counts["followed"] >= 9


def test_a_full_memory_is_forgotten_and_grows_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MEMORY", trace.MEMORY)
    monkeypatch.setattr(trace.MEMORY, "limit", 10)
    rounds(lambda i: chain(torch.arange(8.0), float(i)) * 1.0, 20)
    assert trace.MEMORY.size <= 10


def test_an_interrupt_leaves_the_stream_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8)
    with fused_eager():
        for _ in range(3):
            chain(x).item()
        a = x * 0.5

        def interrupted(*args: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(follow, "returned", interrupted)
            patch.setattr(follow.Stream, "went", interrupted)
            with pytest.raises(KeyboardInterrupt):
                chain(x)
        sync()
        torch.testing.assert_close(a, x * 0.5)
        assert chain(x).item() == pytest.approx(((x * 0.5 + 1) * 2)[1:].sum().item(), rel=1e-6)


def test_a_switch_of_precision_makes_other_code() -> None:
    x = torch.randn(8, 8)
    before = torch.get_float32_matmul_precision()
    with fused_eager():
        for level in ("highest", "medium", "highest"):
            torch.set_float32_matmul_precision(level)
            try:
                (x @ x).sum().item()
            finally:
                torch.set_float32_matmul_precision(before)
    endings = [ending for step in _steps(trace.MEMORY.root) for ending in step.ready]
    assert len({switches for *_, switches, _ in endings}) > 1


def _steps(root: trace.Step) -> Iterator[trace.Step]:
    waiting = list(root.children.values())
    while waiting:
        step = waiting.pop()
        waiting += step.children.values()
        yield step
