"""Profilers: what they see of a program in a context is what they see of it in eager, and the regions besides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.profiler_legacy
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, record_function, schedule
from torch.utils._python_dispatch import TorchDispatchMode

from fused_eager import follower, fused_eager, profiled
from fused_eager.devices.host import trap
from fused_eager.devices.storage import storage_of
from fused_eager.frontends.context import profiling

from ...semantics.programs import in_process

CPU = [ProfilerActivity.CPU]
CONTEXTS: dict[str, dict[str, Any]] = {
    "python": {"compile": "wait", "native": "never", "follower": "python"},
    "follower": {"compile": "wait", "native": "never"},
    "wait": {"compile": "wait"},
    "default": {},
    "strict": {"mode": "strict"},
    "debug": {"mode": "debug"},
}


@pytest.fixture(autouse=True)
def nothing_is_left(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    assert not (profiled.on or trap._labels or profiled._thread.is_hidden)
    # In eager, too; the last one of a torch for GPUs where there is none.
    told = ("profiler_st", "compiling", "Memory block of unknown", "Execution Trace Observer", "gpuGetDeviceCount")
    said = [line for line in capfd.readouterr().err.splitlines() if not any(part in line for part in told)]
    assert not said, said


def make() -> Callable[[], torch.Tensor]:
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(5, 8), torch.tensor([0, 1, 2, 3, 0])

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with record_function("forward"):
            out = model(x)
        loss = torch.nn.functional.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


# Of the library and of torch's way to it, or of Python.
OURS = ("PythonDispatchMode", "fused_eager: ")
Row = tuple[str, str, int, int]


def rows(seen: Any) -> list[Row]:
    """Each op that a profiler has seen: its name, the shapes of its operands, its sequence number, its FLOPs."""
    found = sorted(seen.kineto_results.events(), key=lambda e: e.start_ns())
    found = [e for e in found if "::" in e.name() or "Backward" in e.name() or e.name() in ("forward", "detach")]
    first = min((e.sequence_nr() for e in found if e.sequence_nr() >= 0), default=0)
    numbers = [e.sequence_nr() - first if e.sequence_nr() >= 0 else -1 for e in found]
    return [
        (e.name(), str(e.shapes()), n, e.flops())
        for e, n in zip(found, numbers, strict=True)
        if not e.name().startswith(OURS) and "(" not in e.name()
    ]


def is_part(some: list[Row], of: list[Row]) -> bool:
    """Whether all of `some` are in `of`, in this order."""
    rest = iter(of)
    return all(any(row == other for other in rest) for row in some)


# What a dispatch mode is asked for, in one step. What their kernels call in eager is not called where XLA computes.
STEP = {
    "aten::addmm": 2, "aten::relu": 1, "aten::native_layer_norm": 1, "aten::_log_softmax": 1,
    "aten::nll_loss_forward": 1, "aten::nll_loss_backward": 1, "aten::native_layer_norm_backward": 1,
    "aten::threshold_backward": 1, "aten::mm": 3, "AddmmBackward0": 2, "ReluBackward0": 1,
    "torch::autograd::AccumulateGrad": 6, "forward": 1,
}  # fmt: skip


def profiled_steps(options: dict[str, Any] | None, where: str, warm: int, **kwargs: Any) -> tuple[Any, torch.Tensor]:
    """What a profiler has seen of two steps, and the last loss."""
    step, loss = make(), torch.zeros(())

    def context() -> Any:
        return nullcontext() if options is None else fused_eager(cache="off", progress=False, **options)

    with context():
        for _ in range(warm):
            loss = step()
        if where == "inside":
            with profile(activities=CPU, **kwargs) as p:
                loss = step(), step()
    if where == "around":
        with profile(activities=CPU, **kwargs) as p, context():
            loss = step(), step()
    elif where == "ends after":
        p = profile(activities=CPU, **kwargs)
        with context():
            p.start()
            loss = step(), step()
        p.stop()
    elif where == "schedule":
        plan = schedule(wait=1, warmup=1, active=2, repeat=1)
        with context(), profile(activities=CPU, schedule=plan, **kwargs) as p:
            for _ in range(4):
                loss = step(), step()
                p.step()
    return p.profiler, loss[-1]


EVERYTHING = dict.fromkeys(("record_shapes", "with_flops", "profile_memory", "with_stack", "with_modules"), True)


@pytest.mark.parametrize("warm", [0, 4])
@pytest.mark.parametrize("where", ["inside", "around", "ends after", "schedule"])
@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.thinned(3)
def test_a_profiler_sees_each_op_once_as_in_eager(name: str, where: str, warm: int) -> None:
    options = {"record_shapes": True, "with_flops": True}
    eager, loss = profiled_steps(None, where, warm, **options)
    seen, other = profiled_steps(CONTEXTS[name], where, warm, **options)
    wanted, found = rows(eager), rows(seen)
    assert is_part(found, wanted)
    steps = 4 if where == "schedule" else 2
    names = [row[0] for row in found]
    assert {n: names.count(n) for n in STEP} == {n: steps * count for n, count in STEP.items()}
    assert sum(r[3] for r in wanted) == sum(r[3] for r in found) > 0
    assert torch.allclose(loss, other, atol=1e-5)


# After thousands of other tests in its process torch's own walk up the events of Python's frames recurses too deep.
@pytest.mark.slow
@pytest.mark.parametrize("name", CONTEXTS)
def test_memory_stacks_and_modules_are_told_of(name: str) -> None:
    eager, _ = profiled_steps(None, "inside", 3, **EVERYTHING)
    seen, _ = profiled_steps(CONTEXTS[name], "inside", 3, **EVERYTHING)
    assert is_part(rows(seen), rows(eager))
    wanted, found = ([e for e in p.function_events if e.name == "aten::addmm"] for p in (eager, seen))
    assert [e.stack[-1] if e.stack else "" for e in wanted] == [e.stack[-1] if e.stack else "" for e in found]
    modules = [{e.name for e in p.function_events if e.name.startswith("nn.Module: ")} for p in (eager, seen)]
    assert modules[0] == modules[1] != set()


def test_a_region_is_a_range_with_its_ops_and_lines(tmp_path: Path) -> None:
    x = torch.randn(300, 300)
    with fused_eager(compile="wait", native="never", cache="off"), profile(activities=CPU, record_shapes=True) as p:
        y = (x @ x).relu()
        z = y.sum()
    assert z.isfinite()
    ranges = [e for e in p.events() if e.name.startswith("fused_eager: ")]
    assert len(ranges) == 1 and "test_profiling.py:" in ranges[0].name and "3 ops" in ranges[0].name
    told = ranges[0].kwinputs["ops"]
    assert "mm, relu; " in told and told.endswith("sum") and told.count("test_profiling.py:") == 2
    assert ranges[0].cpu_time_total > 100  # microseconds: it ends when the region has been computed, not launched
    p.export_chrome_trace(str(tmp_path / "trace.json"))
    names = [e.get("name", "") for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]]
    assert names.count("aten::mm") == 1 and sum(n.startswith("fused_eager: ") for n in names) == 1


def test_averages_by_shape() -> None:
    def run(options: dict[str, Any] | None) -> dict[tuple[str, str], int]:
        x = torch.ones(4, 6, requires_grad=True)
        with nullcontext() if options is None else fused_eager(cache="off", **options):
            with profile(activities=CPU, record_shapes=True) as p:
                for n in (1, 2, 2):
                    (x * n)[:n].exp().sum().backward()
            averages = p.key_averages(group_by_input_shape=True)
        return {(a.key, str(a.input_shapes)): a.count for a in averages}

    wanted = run(None)
    for options in CONTEXTS.values():
        found = {key: n for key, n in run(options).items() if not key[0].startswith(OURS)}
        assert ("aten::exp", "[[2, 6]]") in found
        assert all(n <= wanted.get(key, 0) for key, n in found.items())
        ops = ("aten::exp", "aten::mul", "aten::sum", "aten::slice_backward", "ExpBackward0", "SliceBackward0")
        assert {key: n for key, n in found.items() if key[0] in ops} == {k: n for k, n in wanted.items() if k[0] in ops}


def legacy() -> Any:
    return torch.autograd.profiler_legacy.profile(record_shapes=True)


def autograds() -> Any:
    return torch.autograd.profiler.profile(record_shapes=True, use_cpu=True, use_kineto=True)


def all_threads() -> Any:
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return profile(activities=CPU, record_shapes=True, experimental_config=config)


@pytest.mark.parametrize("make_profile", [legacy, autograds, all_threads])
@pytest.mark.parametrize("name", ["python", "follower", "strict"])
def test_other_profilers(name: str, make_profile: Callable[[], Any]) -> None:
    def run(options: dict[str, Any] | None) -> list[tuple[str, str]]:
        x = torch.ones(4, 6, requires_grad=True)
        with nullcontext() if options is None else fused_eager(cache="off", **options):
            for _ in range(3):
                (x * 2).exp().sum().backward()
            with make_profile() as p:
                (x * 2).exp().sum().backward()
            events = p.events() if callable(getattr(p, "events", None)) else p.function_events
        names = ("aten::mul", "aten::exp", "aten::sum", "aten::expand")
        return [(e.name, str(e.input_shapes)) for e in events if e.name in names]

    assert run(CONTEXTS[name]) == run(None)


@pytest.mark.parametrize("name", CONTEXTS)
def test_an_execution_trace(name: str, tmp_path: Path) -> None:
    def run(options: dict[str, Any] | None) -> list[str]:
        x = torch.ones(4, 6)
        path = tmp_path / "trace.json"
        observer = ExecutionTraceObserver().register_callback(str(path))
        with nullcontext() if options is None else fused_eager(cache="off", **options):
            y = x * 2
            observer.start()
            z = (y.exp() @ x.t()).relu()
            observer.stop()
            w = z + 1
        observer.unregister_callback()
        assert w.isfinite().all()
        nodes = json.loads(path.read_text())["nodes"]
        return [f"{n['name']} {n['inputs']['shapes']}" for n in nodes if n["name"].startswith("aten::")]

    wanted = run(None)
    found = run(CONTEXTS[name])
    for op in ("aten::exp [[4, 6]]", "aten::mm [[4, 6], [6, 4]]", "aten::relu [[4, 4]]"):
        assert found.count(op) == wanted.count(op) == 1


def test_ranges_for_itt_and_what_else_runs_with_it() -> None:
    x = torch.ones(4, 6, requires_grad=True)
    if not torch.profiler.itt.is_available():
        pytest.skip("this torch has no ITT")
    with fused_eager(compile="wait", cache="off"), torch.autograd.profiler.emit_itt(record_shapes=True):
        (x * 2).exp().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_mark_is_one_event(name: str) -> None:
    """Nothing stands before it: torch's own tests take the first event for theirs."""
    marks = record_function("a mark"), record_function("another")
    with fused_eager(cache="off", **CONTEXTS[name]), profile(activities=CPU) as seen, marks[0], marks[1]:
        pass
    assert [event.name for event in seen.events()] == ["a mark", "another"]


def test_a_mode_of_the_programs_sees_marks() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    called: list[str] = []
    with fused_eager(), Mode(), record_function("a mark"):
        pass
    assert called == [f"profiler.{name}" for name in profiling.MARKS]


@pytest.mark.slow
def test_nothing_that_compiles_is_imported_while_a_profiler_runs() -> None:
    """The profiler keeps no module's code alive while it refers to that: its names can no longer be read after it."""
    in_process(
        """
        import sys, torch
        from torch.profiler import profile
        from fused_eager import fused_eager
        with fused_eager(mode="strict", cache="off", compiler="thread", progress=False):
            x = torch.ones(3)
            with profile(with_stack=True) as seen:
                before = set(sys.modules)
                (x + x[0]).tolist()
                imported = set(sys.modules) - before
        assert not [name for name in imported if name.startswith("jax")], imported
        """
    )


def test_the_start_and_the_end_of_a_profiler_are_where_work_is_finished() -> None:
    x = torch.ones(4)
    with fused_eager(compile="wait", native="never", cache="off"):
        before = x * 2
        with profile(activities=CPU) as p:
            assert not trap.is_armed(storage_of(before))
            within = before * 3
        assert not trap.is_armed(storage_of(within))
        after = within + 1
    assert after.tolist() == [7.0] * 4
    assert [e.name for e in p.events()].count("aten::mul") == 1


def test_a_failure_that_comes_with_the_end_of_a_profiler_is_told_after_it() -> None:
    x = torch.arange(4.0)
    with fused_eager(compile="wait", native="never", cache="off"):
        with profile(activities=CPU) as p:
            y = x[torch.tensor([5])] + 1
        assert any(e.name == "aten::index" for e in p.events())
        with pytest.raises((IndexError, RuntimeError)):
            y.tolist()
        try:
            (x + 1).tolist()
        except IndexError:
            pass  # owed, and told once
        assert (x + 1).tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_profiler_of_another_thread_is_none_of_ours() -> None:
    x, seen = torch.ones(5), []

    def work() -> None:
        with profile(activities=CPU, record_shapes=True) as p:
            torch.ones(3) * 2
        seen.extend(e.name for e in p.events())

    with fused_eager(compile="wait", native="never", cache="off"):
        y = x * 3
        thread = threading.Thread(target=work)
        thread.start()
        for _ in range(20):
            y = y + 1
        thread.join()
        assert y.tolist() == [23.0] * 5
    assert seen.count("aten::mul") == 1


def test_the_compiled_follower_goes_on_after_a_profiler() -> None:
    x = torch.ones(5)
    with fused_eager(compile="wait", native="never", cache="off"):
        for _ in range(4):
            (x * 2 + 1).tolist()
        with profile(activities=CPU, record_shapes=True):
            (x * 2 + 1).tolist()
        before = follower.ways()[2]
        for _ in range(4):
            (x * 2 + 1).tolist()
    if follower.is_open():
        assert follower.ways()[2] > before


LOOKS = """
import ctypes, sys, torch
from fused_eager import fused_eager
from fused_eager.devices.host import trap
from torch.profiler import profile, ProfilerActivity
x = torch.ones(int(sys.argv[1]))
with fused_eager(compile="wait", native="never", cache="off", follower="python"):
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True):
        y = x * 2
        try:
            torch.Tensor.data_ptr.__wrapped__(y)
        except RuntimeError:
            print("refused", flush=True)
        at = trap.storage_of(y)._cdata + trap.POINTER_AT
        ctypes.string_at(int.from_bytes(ctypes.string_at(at, 8), sys.byteorder), 1)
        print("garbage")
"""


@pytest.mark.parametrize("size", [4, pytest.param(1 << 20, marks=pytest.mark.slow)])
def test_what_a_profiler_may_ask_for_leads_to_no_memory(size: int) -> None:
    """While operands are looked at a pending storage has a label for an address: reading there reads nothing."""
    command = [sys.executable, "-c", LOOKS, str(size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ))
    assert done.stdout.split() == ["refused"] and done.returncode < 0


def test_a_label_comes_off_with_the_trap() -> None:
    x = torch.arange(4.0)
    storage = storage_of(x)
    address = x.data_ptr()
    trap.label(True)
    try:
        trap.arm(storage)
        trap.arm(storage)
        assert trap.is_armed(storage) and trap.address_of(storage) == address
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            x.fill_(1)
    finally:
        trap.label(False)
    trap.disarm(storage)
    assert x.data_ptr() == address and x.tolist() == [0.0, 1.0, 2.0, 3.0]


CASES: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (torch.ops.aten.mm.default, (torch.ones(2, 3), torch.ones(3, 2)), {}),
    (torch.ops.aten.add.Tensor, (torch.ones(3), 2), {"alpha": 3}),
    (torch.ops.aten.mul.Tensor, (torch.ones(3), torch.tensor(2.0, dtype=torch.float64)), {}),
    (torch.ops.aten.zeros.default, ([2, 3],), {}),
    (torch.ops.aten.zeros.default, ([2, 3],), {"device": "meta"}),
    (torch.ops.aten.cat.default, ([torch.ones(2), torch.ones(3)],), {}),
    (torch.ops.aten.add_.Tensor, (torch.ones(3), torch.ones(3)), {}),
    (torch.ops.aten.conj.default, (torch.ones(2, dtype=torch.complex64),), {}),
    (torch.ops.aten.resolve_conj.default, (torch.ones(2, dtype=torch.complex64).conj(),), {}),
    (torch.ops.aten._local_scalar_dense.default, (torch.ones(()),), {}),
    (torch.ops.aten.view.default, (torch.ones(2, 3), [6]), {}),
    (torch.ops.aten.add.out, (torch.ones(3), torch.ones(3)), {"out": torch.empty(3)}),
]


@pytest.mark.parametrize(("op", "args", "kwargs"), CASES)
def test_an_op_goes_through_as_it_would_be_called(op: Any, args: Any, kwargs: Any) -> None:
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), profiled.hidden():
        wanted = op(*[a.clone() if isinstance(a, torch.Tensor) else a for a in args], **kwargs)
        out = profiled.through(op, args, kwargs)
    if not isinstance(out, torch.Tensor):
        assert out == wanted
        return
    looks = [(t.shape, t.stride(), t.dtype, t.device, t.is_conj()) for t in (out, wanted)]
    assert looks[0] == looks[1]
    assert out.is_meta or torch.equal(out, wanted)


# ---- Python's frames (`with_stack`) ---------------------------------------------------------------------------------


def chains(seen: Any) -> list[tuple[str, ...]]:
    """Each op that was seen of the program, with the program's own frames above it, in order."""
    found: list[tuple[int, tuple[str, ...]]] = []
    own = Path(__file__).name
    events: list[tuple[Any, tuple[str, ...]]] = [(e, ()) for e in seen.kineto_results.experimental_event_tree()]
    while events:
        event, above = events.pop()
        name = event.name
        if name.startswith("aten::"):
            found.append((event.start_time_ns, (*above, name)))
        elif own in name:
            above = (*above, name.rpartition(": ")[2])
        events += [(child, above) for child in event.children]
    return [chain for _, chain in sorted(found)]


def outer() -> None:
    x = torch.ones(3, requires_grad=True)
    inner(x)
    with pytest.raises(RuntimeError):
        refused(x)
    inner(x).backward()


def inner(x: torch.Tensor) -> torch.Tensor:
    y = (x * 2).exp().sum()
    y.item()
    return y


def refused(x: torch.Tensor) -> torch.Tensor:
    return x @ torch.ones(4)


@pytest.mark.skipif(profiled._suspend is None, reason="Python 3.10 has no call for it")
@pytest.mark.parametrize("name", CONTEXTS)
def test_frames_are_the_programs_and_few_of_the_librarys(name: str) -> None:
    def seen(options: dict[str, Any] | None) -> Any:
        with nullcontext() if options is None else fused_eager(cache="off", progress=False, **options):
            outer()
            with profile(activities=CPU, with_stack=True) as p:
                outer()
        return p.profiler

    eager, ours = seen(None), seen(CONTEXTS[name])
    wanted, found = chains(eager), chains(ours)
    assert found and set(found) <= set(wanted)
    rest = iter(wanted)
    assert all(any(chain == other for other in rest) for chain in found)
    frames = [e.name() for e in ours.kineto_results.events() if ".py(" in e.name()]
    inside = [f"fused_eager/{part}" for part in ("planning/", "lowering/", "executing/arguments", "executing/validate")]
    assert not [frame for frame in frames if any(part in frame for part in inside)]
    assert not profiled._thread.is_suspended
