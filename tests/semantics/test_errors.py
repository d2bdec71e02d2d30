"""Errors: eager's type and text, at the op's own line where shapes and dtypes tell, else at the next sync."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fused_eager import LostValue, fused_eager, sync
from fused_eager.executing import load
from fused_eager.planning import plan

from .programs import compare, describe, run, same_error
from .refused import AT_ONCE, AT_SYNC, GOES_WELL, f, idx


@pytest.mark.parametrize("name", AT_ONCE)
@pytest.mark.filterwarnings("ignore")
def test_raises_at_its_own_line(name: str, mode: str) -> None:
    expected = run(AT_ONCE[name], "eager")
    if name != "mse warning shapes":
        assert expected.error is not None, f"eager returns {expected.value}"
    line: list[bool] = []

    def program() -> Any:
        good = f(3) + 5
        try:
            AT_ONCE[name]()
        except Exception:
            line.append(True)
            assert good.tolist() == [7.0, 7.0, 7.0]
            raise
        line.append(False)

    actual = run(program, mode)
    same_error(expected.error, actual.error)
    assert line == [expected.error is not None], "raised after the op's line"


@pytest.fixture
def newborn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process has learned of single calls from those before: nothing."""
    monkeypatch.setattr(load, "ISLANDS", {})
    monkeypatch.setattr(plan, "CHECKING", set())


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", AT_SYNC)
@pytest.mark.filterwarnings("ignore")
def test_raises_at_the_next_sync_at_the_latest(name: str, mode: str) -> None:
    expected = run(AT_SYNC[name], "eager")

    def program() -> Any:
        good = f(3) + 5
        result = AT_SYNC[name]()
        other = f(3) + 6
        try:
            sync()
        except Exception:
            assert good.tolist() == [7.0, 7.0, 7.0] and other.tolist() == [8.0, 8.0, 8.0]
            raise
        return result

    same_error(expected.error, run(program, mode).error)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", AT_SYNC)
@pytest.mark.filterwarnings("ignore")
def test_raises_though_nobody_reads_the_result(name: str, mode: str, newborn: None) -> None:
    expected = run(AT_SYNC[name], "eager")

    def program() -> None:
        AT_SYNC[name]()

    same_error(expected.error, run(program, mode).error)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", AT_SYNC)
@pytest.mark.parametrize("read", [True, False], ids=["read", "unread"])
@pytest.mark.filterwarnings("ignore")
def test_raises_after_the_same_ops_went_well(name: str, read: bool, mode: str, newborn: None) -> None:
    def once(table: dict[str, Callable[[], Any]]) -> Callable[[], Any]:
        def program() -> Any:
            result = table[name]()
            return result if read else None

        return program

    good, bad = run(once(GOES_WELL), "eager"), run(once(AT_SYNC), "eager")
    assert good.error is None, f"eager refuses the good values: {good.error}"
    for table, expected in ((GOES_WELL, good), (GOES_WELL, good), (AT_SYNC, bad), (AT_SYNC, bad), (GOES_WELL, good)):
        actual = run(once(table), mode)
        same_error(expected.error, actual.error)
        compare(expected.value, actual.value, versions=False)


# Draws depend on those before them, `assert_close` puts whatever it meets into an error of its own, and the text of
# histc is a known gap.
ALONE = {"multinomial", "bernoulli", "poisson", "normal std", "binomial", "equal shapes", "histc"}
AMONG = [name for name in AT_SYNC if name not in ALONE]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.filterwarnings("ignore")
def test_one_is_refused_among_others(seed: int, mode: str, newborn: None) -> None:
    """In whatever order: what is refused raises by the next sync, and everything else has eager's value."""
    choice = random.Random(seed)
    names, syncs = choice.sample(AMONG, 6), [choice.random() < 0.3 for _ in range(6)]
    refused = choice.choice([k for k, name in enumerate(names) if run(AT_SYNC[name], "eager").error is not None])

    def program(bad: int | None) -> tuple[BaseException | None, dict[str, Any]]:
        made = {}
        try:
            for k, name in enumerate(names):
                value = (AT_SYNC if k == bad else GOES_WELL)[name]()
                if k != bad:
                    made[name] = value
                if syncs[k]:
                    sync()
            sync()
        except Exception as error:
            return error, {name: describe(value) for name, value in made.items()}
        return None, {name: describe(value) for name, value in made.items()}

    _, expected = program(None)
    error, _ = program(refused)
    with fused_eager(mode=mode):
        for bad in (None, refused, None, refused):
            told, made = program(bad)
            same_error(None if bad is None else error, told)
            for name, value in made.items():
                compare(expected[name], value, name, versions=False)


@pytest.mark.parametrize("name", ["index", "gather", "embedding", "index_select", "scatter_", "index_put_", "nll_loss"])
def test_names_the_line_and_the_op(name: str, mode: str) -> None:
    code = AT_SYNC[name].__code__
    kind = type(run(AT_SYNC[name], "eager").error)
    with pytest.raises(kind) as caught, fused_eager(mode=mode):
        result = AT_SYNC[name]()
        sync()
        del result
    at_its_line = any(entry.frame.code.raw is code for entry in caught.traceback)
    assert at_its_line or f"{code.co_filename}:{code.co_firstlineno}" in str(caught.value)


def test_two_independent_failures_are_both_told(mode: str) -> None:
    with fused_eager(mode=mode):
        w = f(4, 2)
        told = 0
        results = []
        for bad in (9, 8):
            try:
                results.append(F.embedding(idx(bad), w))
            except IndexError:
                told += 1
        for r in results:
            try:
                r.tolist()
                raise AssertionError("unwritten or clamped memory was read")
            except (IndexError, LostValue):
                told += 1
        good = w + 1
        assert told == 2 and good.tolist() == [[3.0, 3.0]] * 4


def test_two_failures_in_different_flushes_are_both_told(mode: str) -> None:
    with fused_eager(mode=mode):
        w = f(4, 2)
        sync()
        results = []
        for bad in (9, 8):
            try:
                results.append(torch.gather(w, 0, idx(bad, bad).view(1, 2)))
                (w + 1).data_ptr()
            except (IndexError, RuntimeError):
                pass
        for r in results:
            with pytest.raises((IndexError, RuntimeError)):
                r.tolist()


def test_what_depends_on_a_failure_is_lost_and_says_why(mode: str) -> None:
    with fused_eager(mode=mode):
        w = f(4, 2)
        try:
            bad = F.embedding(idx(9), w)
            after = (bad + 1).relu()
            sync()
        except IndexError:
            pass
        else:
            raise AssertionError("no IndexError")
        if mode != "debug":
            with pytest.raises((LostValue, IndexError), match="out of range"):
                after.tolist()
            with pytest.raises((LostValue, IndexError), match="out of range"):
                (after * 2).sum().item()
        assert (w * 2).sum().item() == 32.0
    assert w.tolist() == [[2.0, 2.0]] * 4


def test_a_failed_write_leaves_the_old_value(mode: str) -> None:
    with fused_eager(mode=mode):
        x = torch.empty(3000).fill_(1.0)
        sync()
        try:
            x.add_(1)
            x.index_fill_(0, idx(5000), 3.0)
            x.mul_(2)
            sync()
        except IndexError:
            pass
        else:
            raise AssertionError("no IndexError")
        try:
            values = set(x.tolist())
        except LostValue:
            return
        # eager: [2]; anything that x held before or after a whole op is a state that the program went through
        assert values in ({1.0}, {2.0}), values


def test_a_failed_island_leaves_memory_as_it_was(mode: str) -> None:
    with fused_eager(mode=mode):
        x = torch.empty(3000).fill_(1.0)
        sync()
        try:
            x.add_(1)
            y = torch.linalg.cholesky(-torch.eye(2) * x[0])
            x.mul_(y.sum())
            sync()
        except torch.linalg.LinAlgError:
            pass
        else:
            raise AssertionError("no LinAlgError")
        try:
            values = set(x.tolist())
        except LostValue:
            return
        assert values in ({1.0}, {2.0}), values


def test_an_island_that_fails_spares_the_others(mode: str) -> None:
    with fused_eager(mode=mode):
        a = f(3)
        try:
            bad = torch.bucketize(a, idx(3, 1, 2).float().view(3, 1))
            del bad
        except RuntimeError:
            pass
        first = torch.bucketize(a, f(3))
        try:
            f(2, 2).put_(idx(50), f(1))
            sync()
        except IndexError:
            pass
        second = torch.bucketize(a, f(3))
        assert first.tolist() == [0, 0, 0] and second.tolist() == [0, 0, 0]


def test_values_left_by_an_index_error_are_never_clamped(mode: str) -> None:
    with fused_eager(mode=mode):
        t = torch.arange(4.0)
        try:
            r = t.index_select(0, idx(4))
        except (IndexError, RuntimeError):
            return
        with pytest.raises((IndexError, RuntimeError)):
            r.tolist()
        with pytest.raises((IndexError, RuntimeError)):
            r.tolist()


def test_error_before_the_exit_is_not_raised_twice(mode: str) -> None:
    with fused_eager(mode=mode):
        try:
            F.embedding(idx(9), f(4, 2))
            sync()
        except IndexError:
            pass
        x = f(2)
    assert x.tolist() == [2.0, 2.0]


def test_error_at_exit_comes_out_of_the_with(mode: str) -> None:
    good = None
    with pytest.raises(IndexError), fused_eager(mode=mode):
        good = f(2) + 1
        _ = F.embedding(idx(9), f(4, 2))
    assert good is not None and good.tolist() == [3.0, 3.0]
    with fused_eager(mode=mode):
        assert (f(2) + 1).tolist() == [3.0, 3.0]


def test_checks_can_be_switched_off() -> None:
    with fused_eager(mode="fused", check_bounds=False):
        assert F.embedding(idx(1), f(4, 2)).tolist() == [[2.0, 2.0]]


def test_recursion_error_is_the_users(mode: str) -> None:
    def deep(t: torch.Tensor, n: int) -> torch.Tensor:
        return deep(t + 1, n + 1)

    with fused_eager(mode=mode):
        x = f(2)
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(400)
        try:
            with pytest.raises(RecursionError):
                deep(x, 0)
        finally:
            sys.setrecursionlimit(limit)
        assert (x + 1).tolist() == [3.0, 3.0]
