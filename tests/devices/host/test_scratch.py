"""Scratch memory: large results go where dead ones were, and nothing that lives is ever written over."""

from __future__ import annotations

import gc
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.dlpack

from fused_eager import fused_eager, sync
from fused_eager.commands.cli import main
from fused_eager.devices.host import scratch
from fused_eager.devices.host.device import HOST
from fused_eager.devices.host.scratch import SCRATCH
from fused_eager.executing import load
from fused_eager.log.events import LOG
from fused_eager.planning.plan import make_plan
from fused_eager.planning.room import wanted
from tests.compiling.test_caching import own_process, run
from tests.streams import END, HOME, all_results_large, flush_now, node

__all__ = ["own_process"]  # the fixture that keeps each test's caches apart

SIZE = 40_000  # floats: more than `bind` copies


@pytest.fixture(autouse=True)
def small_is_large() -> Iterator[None]:
    with all_results_large():
        yield


def reused(before: dict[str, int] | None = None) -> dict[str, int]:
    """How often scratch memory was found, and made, since `before`."""
    now = {name: LOG.counts[f"scratch {name}"] for name in ("reused", "new")}
    return now if before is None else {name: now[name] - before[name] for name in now}


def values(i: int) -> torch.Tensor:
    """What `work` should give in round i."""
    return (torch.arange(SIZE) + i).float().relu() * 2 + 1


def work(i: int) -> torch.Tensor:
    x = (torch.arange(SIZE) + i).float()
    sync()
    y = x.relu() * 2 + 1
    sync()
    return y


# ---- found again ---------------------------------------------------------------------------------------------------


def test_a_result_goes_where_the_dead_one_was() -> None:
    with fused_eager():
        y, seen = work(0), set()
        before = reused()
        for i in range(1, 7):
            del y
            y = work(i)
            seen.add(y.data_ptr())
            assert torch.equal(y, values(i))
        found = reused(before)
    assert found["reused"] >= 6 and len(seen) <= 3


def test_values_that_are_never_bound_are_found_too() -> None:
    x = torch.linspace(-1, 1, SIZE)
    expected = [(x.relu() * k).sum().item() for k in range(6)]
    with fused_eager():
        got, before = [], reused()
        for k in range(6):
            y = x.relu() * k
            got.append(y.sum().item())
        found = reused(before)
    assert got == pytest.approx(expected)
    assert found["reused"] >= 3


def held() -> int:
    return len(SCRATCH.free.get((torch.float32, (SIZE,)), []))


def test_no_more_is_kept_than_the_last_flushes_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SCRATCH, "taken", deque([Counter()], 2))
    with fused_eager():
        ys = [work(i) for i in range(8)]
        del ys
        work(8)
        assert 1 <= held() <= 2
        for i in range(3):
            torch.linspace(i, 1, 100).sum().item()  # flushes that want no such thing
        assert not held()


def test_nothing_is_kept_after_the_context() -> None:
    with fused_eager():
        y = work(0)
        y = work(1)
        assert SCRATCH.lent
        del y
    assert not SCRATCH.free and not SCRATCH.lent


def test_a_native_segment_gets_its_memory_back() -> None:
    with fused_eager(native="measured"):
        for i in range(60):
            y = work(i)
            if torch.equal(y, values(i)) and not SCRATCH.lent:
                break  # it has chosen, or tries, to run natively
        else:
            pytest.fail("the native way was never tried")


# ---- what lives is left alone --------------------------------------------------------------------------------------


def _numpy(y: torch.Tensor) -> Any:
    return y.numpy()


def _view(y: torch.Tensor) -> Any:
    return y[: SIZE // 2]


def _transposed(y: torch.Tensor) -> Any:
    return y.view(-1, 100).t()


def _data(y: torch.Tensor) -> Any:
    z = torch.empty(0)
    z.data = y
    return z


def _set(y: torch.Tensor) -> Any:
    return torch.empty(0).set_(y)


def _capsule(y: torch.Tensor) -> Any:
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(y))


def _numpy_dlpack(y: torch.Tensor) -> Any:
    return np.from_dlpack(y)


def _storage(y: torch.Tensor) -> Any:
    return y.untyped_storage()


def _shared(y: torch.Tensor) -> Any:
    return y.share_memory_()


def _buffer(y: torch.Tensor) -> Any:
    return memoryview(y.numpy())


def _parameter(y: torch.Tensor) -> Any:
    return torch.nn.Parameter(y)


def _saved_for_backward(y: torch.Tensor) -> Any:
    w = torch.ones(SIZE, requires_grad=True)
    return (w * y).sum()


HOLDERS = [
    _numpy, _view, _transposed, _data, _set, _capsule, _numpy_dlpack, _storage, _shared, _buffer, _parameter,
    _saved_for_backward,
]  # fmt: skip


def _copy_of(held: Any) -> Any:
    if isinstance(held, torch.UntypedStorage):
        return [held[i] for i in range(400)]
    if isinstance(held, torch.Tensor) and held.grad_fn is not None:
        return torch.autograd.grad(held, held.grad_fn.next_functions[0][0].next_functions[0][0].variable)[0].clone()
    return torch.as_tensor(np.array(held) if not isinstance(held, torch.Tensor) else held.detach()).clone()


@pytest.mark.thinned(6)
@pytest.mark.parametrize("hold", HOLDERS, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("where", ["bound", "pending", "on the device"])
def test_memory_that_is_still_held_is_not_written(hold: Callable[[torch.Tensor], Any], where: str) -> None:
    expected = _copy_of(hold(values(3)))
    with fused_eager():
        work(1)
        y = (torch.arange(SIZE) + 3).float().relu() * 2 + 1
        if where == "bound":
            sync()
        elif where == "on the device":
            flush_now()
        held = hold(y)
        del y
        for i in range(4, 8):
            assert torch.equal(work(i), values(i))
        got = _copy_of(held)
    assert got == expected if isinstance(got, list) else torch.equal(got, expected)


def test_all_of_many_that_live_keep_their_values() -> None:
    with fused_eager():
        kept = [work(i) for i in range(4)]
        dropped = [work(i) for i in range(4, 8)]
        del dropped
        kept += [work(i) for i in range(8, 12)]
    for i, y in zip([0, 1, 2, 3, 8, 9, 10, 11], kept, strict=True):
        assert torch.equal(y, values(i))


def test_a_failed_check_gives_back_the_values_of_before() -> None:
    x, far = torch.linspace(0, 1, SIZE), torch.tensor([SIZE + 7])
    with fused_eager():
        for _ in range(3):
            y = x * 2
            sync()
            with pytest.raises(IndexError):
                y.add_(x[far])
                sync()
            assert torch.equal(y, x * 2)
            del y


def test_several_results_of_one_shape_get_memory_of_their_own() -> None:
    with fused_eager():
        for i in range(5):
            x = torch.full((SIZE,), float(i))
            a, b, c = x + 1, x * 3, x - 5
            sync()
            assert (a[0], b[0], c[0]) == (i + 1, i * 3, i - 5) and len({t.data_ptr() for t in (a, b, c)}) == 3


def test_threads_do_not_take_each_other_s() -> None:
    wrong: list[int] = []

    def loop(start: int) -> None:
        with fused_eager():
            for i in range(start, start + 12):
                if not torch.equal(work(i), values(i)):
                    wrong.append(i)

    threads = [threading.Thread(target=loop, args=(100 * k,)) for k in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_training_is_what_it_is_without() -> None:
    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        with fused_eager():
            for _ in range(6):
                loss = model(torch.randn(128, 64)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loss.item()
            gc.collect()
        return [p.detach() for p in model.parameters()]

    with_scratch = train()
    load.forget()
    with pytest.MonkeyPatch.context() as m:
        m.setattr(scratch, "LARGE", 1 << 60)
        torch.testing.assert_close(train(), with_scratch)


# ---- what is asked for ---------------------------------------------------------------------------------------------


def test_a_region_wants_what_no_donated_input_gives() -> None:
    nodes, homes = [node(1, [0]), node(2, [1]), node(3, [2])], dict.fromkeys(range(4), HOME)

    def asked(live: set[int], donatable: set[int]) -> tuple[Any, ...]:
        plan = make_plan(nodes, frozenset(live), frozenset(donatable), homes, {}, 100, END)
        return wanted(plan.regions[0], homes, HOST)

    assert asked({1, 2, 3}, {0}) == (HOME, HOME)
    assert asked({3}, {0}) == ()
    assert asked({3}, set()) == (HOME,)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(scratch, "LARGE", 33)  # bytes; these have 32
        assert asked({1, 2, 3}, {0}) == ()


def test_a_second_process_takes_the_same(tmp_path: Path) -> None:
    def program() -> list[Any]:
        return [work(i).sum().item() for i in range(4)]

    first, _ = run(program, tmp_path)
    before = reused()
    second, kinds = run(program, tmp_path)
    assert first == second == pytest.approx([values(i).sum().item() for i in range(4)])
    assert "compile" not in kinds and reused(before)["reused"] > 0


def test_an_entry_that_takes_scratch_is_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    run(lambda: work(0).sum().item(), tmp_path)
    monkeypatch.setenv("FUSED_EAGER_CACHE", "")
    monkeypatch.setenv("FUSED_EAGER_CACHE_DIR", str(tmp_path))
    assert main(["cache", "verify", "--recompile"]) == 0
    assert " proved, 0 not" in capsys.readouterr().out
