"""The compiled follower: what goes past Python and what must not, and how it is built and taken up."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import follower as bench
from benchmarks.workloads import WORKLOADS
from fused_eager import follower, fused_eager, sync
from fused_eager.config import OptionError, resolve
from fused_eager.devices.buffer import LOCK
from fused_eager.executing import load
from fused_eager.follower import build
from fused_eager.log import site
from fused_eager.log.events import LOG
from fused_eager.tracing.numbers import BOUNDS
from fused_eager.tracing.stream import Stream
from tests.streams import events, forget_pending, open_stream
from tests.suites import optimizers

pytestmark = pytest.mark.skipif(bool(build.obstacle()), reason=build.obstacle() or "it can be built")
Tensor = torch.Tensor
ROOT = Path(__file__).resolve().parents[2]


class Ways:
    """How many ops have gone each way."""

    python = aten = followed = 0


@contextmanager
def ways() -> Iterator[Ways]:
    """Counts those of the body."""
    found, before = Ways(), follower.ways()
    yield found
    found.python, found.aten, found.followed = (b - a for a, b in zip(before, follower.ways(), strict=True))


def program(x: Tensor, w: Tensor, scale: float = 0.5) -> Tensor:
    y = torch.tanh(x @ w) * scale
    z = torch.cat([y, x.t()], 1) + 1
    return z.sum(0, keepdim=True) - y.mean()


X, W = torch.randn(4, 4), torch.randn(4, 4)


def settled(step: Callable[[], Tensor | None], rounds: int = 4) -> None:
    for _ in range(rounds):
        step()
        sync()


def test_what_comes_again_does_not_reach_python() -> None:
    with fused_eager(follower="compiled"):
        settled(lambda: program(X, W))
        with ways() as went:
            out = program(X, W)
        assert (went.python, went.followed) == (0, 8)
        assert went.aten == 1  # x.t()
        with pytest.raises(RuntimeError):
            torch._C._data_address(out)  # handed out, and written by nobody yet
    torch.testing.assert_close(out, program(X, W))


def test_a_thread_that_rests_for_so_long_goes_on_when_that_is_over() -> None:
    forget_pending()
    with fused_eager(follower="compiled", native="measured", compile="auto"):
        stream = open_stream()
        program(X, W)
        sync()
        stream.policy.backoff.rest(lambda: False, at_most=1e6)
        program(X, W)
        with ways() as went:
            program(X, W)
        assert went.python == 0 and not stream.nodes
        stream.policy.backoff.due = 0.0
        program(X, W)
        assert len(stream.nodes) == 8


def test_numbers_of_a_kind_that_aten_was_asked_for_do_not_reach_python() -> None:
    """Kinds are told apart in both languages alike."""
    around = [n for b in BOUNDS for n in (math.nextafter(b, 0), b, math.nextafter(b, math.inf))]
    numbers = [math.nan, math.inf, -math.inf, 0.0, -0.0, *around, *(-n for n in around)]

    def step(number: float) -> Tensor:
        return (X * 2 + W) * number

    found = []
    with fused_eager(follower="compiled"):
        for number in numbers:  # each kind is asked for
            settled(lambda number=number: step(number), 2)  # type: ignore[misc]
        with ways() as went:
            for number in numbers:
                found.append(step(number))
                sync()
    assert (went.python, went.followed) == (0, 3 * len(numbers))
    for number, y in zip(numbers, found, strict=True):
        torch.testing.assert_close(y, step(number), equal_nan=True)


def test_a_training_step_hardly_reaches_python() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(512, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    images, labels = torch.randn(4, 3, 8, 8), torch.randint(10, (4,))

    def step() -> None:
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()

    with fused_eager(follower="compiled"):
        settled(step, 5)
        with ways() as went:
            step()
    # The loss that is read, and the first op after it, where a segment may begin.
    assert went.python <= 2 and went.followed > 60, vars(went)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", [
    "SGD", "Adam", "NAdam",
    *[pytest.param(n, marks=pytest.mark.slow) for n in ("AdamW", "RMSprop", "Adadelta", "LBFGS")],
])  # fmt: skip
def test_optimizers_end_where_python_takes_them(name: str) -> None:
    """The same steps, followed by either, are the same to the bit."""
    # Of LBFGS one: its search for a step takes another way each time, and each is compiled.
    for given in optimizers.options(name, torch.float32)[: 1 if name == "LBFGS" else 2]:
        program, found = optimizers.run(name, given, torch.float32), []
        for who in ("compiled", "python"):
            with fused_eager(follower=who):
                found.append([x.clone() if isinstance(x, Tensor) else x for x in program()])
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b, given


def first_op(x: Tensor, y: Tensor, number: float = 2.0, alpha: float = 1) -> Tensor:
    return torch.add(torch.mul(x, y), number, alpha=alpha)


FLAGGED = torch.view_as_complex(torch.randn(4, 4, 2))


@pytest.mark.parametrize(
    ("other", "followed"),
    [
        (lambda: first_op(W, X), 2),  # other values of the same kind
        (lambda: first_op(X, W, 3.0), 2),  # another number
        (lambda: first_op(X, X), 1),  # the same value twice
        (lambda: first_op(X, W.t()), 1),  # seen differently
        (lambda: first_op(X, W.double()), 0),
        (lambda: first_op(X[:2], W[:2]), 0),
        (lambda: first_op(X, W, 2), 1),  # another type of number
        (lambda: first_op(X, W, True), 1),
        (lambda: first_op(X, W, 2.0, 3), 1),  # an argument that had its default value
        (lambda: torch.add(torch.mul(X, W), 2.0), 0),  # from another line
        (lambda: torch.div(X, W), 0),
        (lambda: first_op(FLAGGED, FLAGGED.conj()), 0),
        (lambda: first_op(X.expand(2, 4, 4), W), 0),
        (lambda: first_op(X, torch.tensor(2.0)), 0),
    ],
)
def test_only_what_is_the_same_is_followed(other: Callable[[], Tensor], followed: int) -> None:
    """`followed`: at most so many ops of a program that begins like a remembered one."""
    wanted = other()
    with fused_eager(follower="compiled"):
        settled(lambda: first_op(X, W))
        with ways() as went:
            out = other()
        sync()
        assert went.followed <= followed
        torch.testing.assert_close(out, wanted)
        settled(lambda: first_op(X, W), 2)
        with ways() as went:
            out = first_op(X, W)
        assert went.followed == 2  # the old one is still known
    torch.testing.assert_close(out, first_op(X, W))


def test_a_structural_argument_is_compared() -> None:
    def total(dim: int) -> Tensor:
        return X.sum(dim)

    with fused_eager(follower="compiled"):
        settled(lambda: total(0))
        for dim in (0, 1, -1, 0):
            out = total(dim)
            sync()
            torch.testing.assert_close(out, X.sum(dim))


def test_lists_with_and_without_tensors_in_them() -> None:
    at = torch.tensor([2, 0])

    def read(i: int) -> Tensor:
        y = X * 2.0
        return y[at] if i % 3 == 0 else y[:, at] if i % 3 == 1 else torch.stack([y, y + 1.0, *[y] * (i % 2)])

    with fused_eager(follower="compiled"):
        for i in range(18):
            out = read(i)
            sync()
            torch.testing.assert_close(out, read(i))


def test_versions_count_as_in_eager() -> None:
    def versions() -> list[int]:
        base = torch.zeros(4)
        pair = [torch.zeros(4), torch.zeros(4)]
        base.add_(1.0)
        base[1:].mul_(2.0)
        torch._foreach_add_(pair, 1.0)
        torch._foreach_mul_(pair, [2.0, 3.0])
        torch.add(base, 1.0, out=pair[0])
        return [t._version for t in (base, *pair)]

    wanted = versions()
    with fused_eager(follower="compiled"):
        for _ in range(5):
            assert versions() == wanted
            sync()


def test_numbers_that_an_optimizer_counts_stay_where_they_are() -> None:
    """They are ATen's: a count that is added to and read in each step never becomes pending."""
    count = torch.zeros(())

    def step() -> float:
        nonlocal count
        y = X * 2.0
        count += 1
        return float((y / count.item()).sum())

    with fused_eager(follower="compiled", native="never"):
        for i in range(6):
            assert step() == pytest.approx(float((X * 2.0 / (i + 1)).sum()), rel=1e-5)
            assert count.item() == i + 1


@pytest.mark.parametrize("streams", [1, 2])
def test_a_number_that_somebody_waits_for_is_written_after_it_was_read(streams: int) -> None:
    others = [Stream(resolve()) for _ in range(streams - 1)]
    count = torch.zeros(())

    def step() -> Tensor:
        old = X + count  # pending, and reads what is written next
        count.add_(1)
        return old

    with fused_eager(follower="compiled"):
        for i in range(6):
            with ways() as went:
                old = step()
            sync()
            torch.testing.assert_close(old, X + i)
    assert count.item() == 6 and went.followed == 1 and len(others) == streams - 1


def test_a_view_of_something_native_is_written_when_others_wait_for_the_old_value() -> None:
    def body() -> tuple[Tensor, Tensor]:
        x = torch.empty(8).fill_(3.0)
        fresh = torch.empty(8)
        fresh.bernoulli_(0.5)  # drawn natively
        y = x + fresh
        fresh.div_(0.5)  # native memory that is overwritten while an op before reads it
        return y, fresh

    torch.manual_seed(0)
    wanted = [body() for _ in range(5)]
    torch.manual_seed(0)
    with fused_eager(follower="compiled"):
        for pair in wanted:
            got = body()
            sync()
            for a, b in zip(got, pair, strict=True):
                assert torch.equal(a, b)


class Counter(TorchDispatchMode):
    """Sees each op."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("outside", [True, False])
def test_other_modes_see_every_op(outside: bool) -> None:
    plain = Counter()
    with plain:
        program(X, W)
    with fused_eager(follower="compiled"):
        settled(lambda: program(X, W))
    counter, ours = Counter(), fused_eager(follower="compiled")
    with (counter if outside else ours), (ours if outside else counter):
        program(X, W)
    assert counter.ops == plain.ops


def test_a_subclass_with_a_dispatch_of_its_own_is_asked() -> None:
    class Loud(torch.Tensor):
        seen: list[str] = []  # noqa: RUF012 (of the class)

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            cls.seen.append(str(func))
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))

    def double(x: Tensor) -> Tensor:
        return x * 2.0

    loud = X.clone().as_subclass(Loud)
    with fused_eager(follower="compiled"):
        settled(lambda: double(X))
        Loud.seen.clear()
        out = double(loud)
    assert "aten.mul.Tensor" in Loud.seen
    torch.testing.assert_close(out.as_subclass(torch.Tensor), X * 2.0)


def test_threads_follow_streams_of_their_own() -> None:
    wanted, wrong = [program(X + i, W) for i in range(4)], []

    def work(i: int) -> None:
        with fused_eager(follower="compiled"):
            for _ in range(30):
                out = program(X + i, W)
                sync()
                if not torch.allclose(out, wanted[i], atol=1e-5):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_op_that_waits_for_another_thread_is_followed_after_that() -> None:
    """In Python it would take ten times as long, and hold the others up for that."""
    ready, begin = threading.Event(), threading.Event()

    def work() -> None:
        with fused_eager(follower="compiled", compile="wait", native="never"):
            settled(lambda: program(X, W))
            ready.set()
            begin.wait(60)
            program(X, W)

    worker = threading.Thread(target=work)
    worker.start()
    ready.wait(60)
    with ways() as went:
        with LOCK:
            begin.set()
            time.sleep(0.2)  # by then it waits
        worker.join()
    assert (went.python, went.followed) == (0, 8)


def test_what_was_recorded_without_details_is_recorded_again_with_them() -> None:
    with fused_eager(follower="compiled"):
        settled(lambda: program(X, W))
        with site.detailed():
            with ways() as went:
                program(X, W)
                sync()
            assert went.followed == 0
            settled(lambda: program(X, W))
            with ways() as went:
                program(X, W)
                sync()
            assert went.followed > 0


@pytest.mark.parametrize("follower", ["python", "compiled"])
def test_a_gradient_has_the_line_of_its_op_although_that_was_followed(follower: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    x = torch.randn(5, 8)

    def forward() -> Tensor:
        return model(x).sin()  # <- forward

    load.forget()
    with fused_eager(follower=follower), site.detailed():
        settled(forward)
        with ways() as went:
            y = forward()
        assert (went.followed > 0) == (follower == "compiled")
        y.backward(torch.ones(5, 8))  # for the first time
        sync()
        with events("plan") as seen:
            forward().square().backward(torch.ones(5, 8))
            sync()
    rows = [row for e in seen for region in e.data["regions"] for row in region["lines"]]
    lines = Path(__file__).read_text().splitlines()
    here = f"{__file__}:{next(i for i, text in enumerate(lines, 1) if text.endswith('# <- forward'))}"
    found = {(module, backward, op) for place, module, backward, ops in rows if place == here for op in ops}
    assert ("Sequential.1", True, "aten.tanh_backward.default") in found
    assert ("Sequential.0", True, "aten.mm.default") in found
    assert ("", True, "aten.cos.default") in found


def test_the_time_that_following_takes_is_measured() -> None:
    from fused_eager.compiling import measuring

    with fused_eager(follower="compiled"):
        settled(lambda: program(X, W))
        told = LOG.counts["recording"]
        measuring._thread.wanted = True
        settled(lambda: program(X, W), 3)
    assert LOG.counts["recording"] == told + 1


# ---- building and taking up ---------------------------------------------------------------------------------------


def run(text: str, home: Path, **environment: str) -> str:
    """What a program prints that runs in a process of its own, with a cache folder of its own."""
    wanted = {k: v for k, v in os.environ.items() if not k.startswith("FUSED_EAGER_")}
    wanted.update(XDG_CACHE_HOME=str(home), **environment)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, env=wanted, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_a_compiler_everything_is_as_before(tmp_path: Path) -> None:
    printed = run(
        """
        import torch
        from fused_eager import follower, fused_eager
        with fused_eager():
            y = torch.ones(3) + 1
        print(y.tolist(), follower.status())
        try:
            with fused_eager(follower="compiled"):
                pass
        except follower.FollowerUnavailable as error:
            print(error)
        with fused_eager():
            print((torch.ones(3) * 2).tolist())
        """,
        tmp_path,
        CXX="no-such-compiler",
    )
    assert printed.splitlines() == [
        "[2.0, 2.0, 2.0] python: there is no C++ compiler called no-such-compiler",
        "no compiled follower: there is no C++ compiler called no-such-compiler",
        "[2.0, 2.0, 2.0]",
    ]


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho this is no compiler >&2\nexit 3\n")
    compiler.chmod(0o700)
    printed = run(
        """
        from fused_eager import follower, fused_eager
        try:
            with fused_eager(follower="compiled"):
                pass
        except follower.FollowerUnavailable as error:
            print(error)
        """,
        tmp_path / "home",
        CXX=str(compiler),
    )
    assert "this is no compiler" in printed


def test_it_is_built_in_the_background_and_taken_up_in_the_middle(tmp_path: Path) -> None:
    """The compiler's part is played by a copy of what is built."""
    printed = run(
        f"""
        import shutil, time, torch
        from pathlib import Path
        from fused_eager import follower, fused_eager
        from fused_eager.follower import build
        follower.AFTER = 0.0
        build._compile = lambda target, patiently: (time.sleep(0.2), shutil.copy({str(build.library())!r}, target))
        x = torch.randn(8)
        with fused_eager(native="never", compile="wait"):
            print(follower.status())
            for _ in range(200):
                (x * 2 + 1).sum().item()
                if follower.is_open():
                    break
                time.sleep(0.01)
            before = follower.ways()
            for _ in range(10):
                (x * 2 + 1).sum().item()
            print(follower.status(), follower.ways()[2] - before[2] >= 20)
        """,
        tmp_path,
    )
    assert printed.splitlines() == ["python: it is not built yet", "compiled True"]


def test_a_library_that_others_could_write_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = build.library()
    file.parent.mkdir(parents=True, mode=0o700)
    file.write_bytes(b"")
    file.chmod(0o700)
    assert build.is_built()
    file.chmod(0o722)
    assert not build.is_built()
    file.chmod(0o700)
    file.parent.chmod(0o777)
    assert not build.is_built()


def test_one_that_does_not_fit_is_left_alone(tmp_path: Path) -> None:
    printed = run(
        """
        import torch
        from fused_eager import follower, fused_eager
        from fused_eager.follower import build
        file = build.library()
        file.parent.mkdir(parents=True, mode=0o700)
        file.write_bytes(b"no library")
        file.chmod(0o700)
        with fused_eager():
            print((torch.ones(2) + 1).tolist())
        print(follower.status().partition(" torch: ")[0])
        """,
        tmp_path,
    )
    assert printed.splitlines() == ["[2.0, 2.0]", "python: it does not fit this"]


def test_what_it_is_made_of_is_in_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {path.name for path in build.SOURCES}
    assert names == {
        "accelerator.h", "delegates.h", "follow.h", "kernels.h", "kinds.h", "module.cpp", "objects.h", "reads.h",
        "runtime.h", "step.h", "tensors.h",
    }
    before = build.digest()
    monkeypatch.setenv("CXX", "another")
    build.digest.cache_clear()
    try:
        assert build.digest() != before
    finally:
        build.digest.cache_clear()


def test_the_option_is_checked() -> None:
    with pytest.raises(OptionError, match="auto, python, compiled"):
        fused_eager(follower="java")


def test_the_cost_of_following_is_measured_of_who_follows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, few in (("ROUNDS", 1), ("CALLS_PER_BLOCK", 2), ("OPS", 6)):
        monkeypatch.setattr(bench, name, few)
    monkeypatch.setitem(WORKLOADS["tiny"].full, "ops", 6)
    counted = {}
    for who in ("python", "compiled"):
        step = WORKLOADS["tiny"].build(lambda function: function)
        with ways() as went:
            bench.block(bench.Way(who, bench.following(who), sync), step)
        counted[who] = went.followed
    assert counted["python"] == 0 and counted["compiled"] >= bench.CALLS_PER_BLOCK * 6
    assert bench.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:42].strip() for line in lines[1:]] == [way.about for way in bench.WAYS]
    assert all(float(figure) > 0 for line in lines[1:] for figure in line[42:].split())


def test_finalizers_see_the_mode_where_it_was_taken_off_by_hand() -> None:
    total = torch.zeros(3)

    class Last:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            total.add_(1)

    with fused_eager(native="never"):
        total.add_(1)
        with torch.utils._python_dispatch._disable_current_modes():
            Last()
            gc.collect()
        assert total.tolist() == [2.0] * 3


@pytest.mark.thinned(2)
@pytest.mark.parametrize("who", ["python", "compiled"])
@pytest.mark.parametrize("native", ["never", "measured"])
def test_finalizers_that_call_torch_are_seen_wherever_the_collector_runs(native: str, who: str) -> None:
    class Last:
        """Part of a cycle: only the collector ends it."""

        def __init__(self, one: Tensor, total: Tensor):
            self.me, self.one, self.total = self, one, total

        def __del__(self) -> None:
            # A thread that is in no context meets the trap: the test process talks to the others in one of its own.
            if threading.current_thread() is here:
                self.total.add_(self.one)
            else:
                elsewhere.append(1)

    here, elsewhere = threading.current_thread(), list[int]()
    total, w, threshold = torch.zeros(3), torch.ones(50), gc.get_threshold()
    gc.set_threshold(20)
    try:
        with fused_eager(native=native, follower=who):
            for step in range(300):
                Last(torch.full((3,), 1.0) + 1 - 1, total)
                for _ in range(4):
                    w = torch.sin(w) + 1
                if step % 3 == 0:
                    w.sum().item()
            gc.collect()
    finally:
        gc.set_threshold(*threshold)
    assert gc.isenabled() and total.tolist() == [300.0 - len(elsewhere)] * 3
    assert len(elsewhere) < 100
