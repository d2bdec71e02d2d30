"""What each stage hands on is checked: a defect is told by the stage's name, with the op and the line."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from fused_eager import fused_eager
from fused_eager.bounded import Bounded
from fused_eager.compiling import caching, canonical, executable
from fused_eager.compiling.executable import Executable, RunCheck
from fused_eager.config import resolve
from fused_eager.devices.host.buffers import TABLE
from fused_eager.errors import ValidationError
from fused_eager.executing import load, run, validate
from fused_eager.lowering import lower as lowering
from fused_eager.tracing.stream import Node, Ref
from tests.streams import events, flush_now

MODES: dict[str, dict[str, Any]] = {
    "fused": {"compile": "wait", "native": "never", "validate": True},
    "strict": {"mode": "strict"},
    "debug": {"mode": "debug"},
}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """A defect of the library's own leaves values pending for good; the next test is to find none."""
    yield
    gc.collect()
    for b in [b for b in TABLE.values() if b.stream is not None]:
        del TABLE[b.cdata]


def changed(node: Node, **fields: Any) -> Node:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def reads_what_is_not_there(node: Node) -> Node:
    return changed(node, uses=(node.uses[0]._replace(vid=99), *node.uses[1:]))


def makes_what_is_there(node: Node) -> Node:
    return changed(node, results=(node.results[0]._replace(vid=node.uses[0].vid),))


def makes_another(node: Node) -> Node:
    return changed(node, results=(node.results[0]._replace(home=(torch.float64, (3,))),))


def names_no_operand(node: Node) -> Node:
    return changed(node, args=(Ref(7),))


def writes_no_operand(node: Node) -> Node:
    return changed(node, targets=(5,))


def reads_beyond_the_end(node: Node) -> Node:
    use = node.uses[0]
    return changed(node, uses=(use._replace(geometry=use.geometry._replace(offset=1)),))


def reads_a_slice_beyond_the_end(node: Node) -> Node:
    return changed(node, uses=(node.uses[0]._replace(start=0, extent=3),), scalars=[1])


def makes_more_than_its_home(node: Node) -> Node:
    result = node.results[0]
    return changed(node, results=(result._replace(geometry=result.geometry._replace(size=(4,))),))


def writes_into_nothing(node: Node) -> Node:
    return changed(node, results=(node.results[0]._replace(base=99),))


WRONG_NODES = [
    reads_what_is_not_there, makes_what_is_there, makes_another, names_no_operand, writes_no_operand,
    reads_beyond_the_end, reads_a_slice_beyond_the_end, makes_more_than_its_home, writes_into_nothing,
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_NODES)
@pytest.mark.parametrize("mode", MODES)
def test_what_recording_hands_on(mode: str, wrong: Callable[[Node], Node], monkeypatch: pytest.MonkeyPatch) -> None:
    original = load._make_ready

    def corrupted(work: Any, *rest: Any) -> Any:
        homes = dict(work.homes)  # of before
        return original(replace(work, nodes=[wrong(work.nodes[0]), *work.nodes[1:]], homes=homes), *rest)

    monkeypatch.setattr(load, "_make_ready", corrupted)
    load.forget()
    x = torch.ones(3)
    told = r"recording: node 0 \(aten.atan.* at .*test_validate.py:\d+\)"
    with pytest.raises(ValidationError, match=told), fused_eager(cache="off", **MODES[mode]):
        x.atan().tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", ["checks", "too few", "dtype", "shape", "flags"])
def test_what_compiling_and_running_hand_on(mode: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = load._executable

    def corrupted(*args: Any) -> Executable | None:
        made = original(*args)
        if made is None:
            return None
        if what == "checks":
            return replace(made, checks=(RunCheck(9, "IndexError", "no"),))

        def call(*inputs: Any) -> Any:
            outputs, flags = made.call(*inputs)
            wrong = {"too few": [], "dtype": [outputs[0].astype("int32")], "shape": [outputs[0][:2]]}
            return wrong.get(what, outputs), flags[:0] if what == "flags" else flags

        return replace(made, call=call)

    monkeypatch.setattr(load, "_executable", corrupted)
    load.forget()
    x = torch.ones(3)
    stage = "compiling" if what == "checks" else "running"
    told = rf"{stage}: .*aten.*test_validate.py:\d+"
    with pytest.raises(ValidationError, match=told), fused_eager(cache="off", **MODES[mode]):
        x.asinh().tolist()


@pytest.mark.parametrize("mode", MODES)
def test_what_is_bound(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = run.values_needed

    def corrupted(stream: Any) -> Any:
        live, donatable, assigned = original(stream)
        for b, _ in assigned:
            b.home = (torch.float64, (7,))
        return live, donatable, assigned

    monkeypatch.setattr(run, "values_needed", corrupted)
    x = torch.ones(3)
    told = "binding: a storage waits for"
    with pytest.raises(ValidationError, match=told), fused_eager(cache="off", **MODES[mode]):
        x.acosh().tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("followed", [False, True], ids=["recorded", "followed"])
@pytest.mark.parametrize("kind", ["native", "device"])
def test_what_is_read(mode: str, followed: bool, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time, and where its stream has come before and is followed."""
    original, armed = run._prepare, []

    def corrupted(stream: Any, reason: Any) -> Any:
        found = [i for i in stream.inputs if i.kind == kind]
        if armed and found and kind == "native":
            found[0].offset += 4
        elif armed and found:
            found[0].array = found[0].array[:2]
        return original(stream, reason)

    def program(times: int) -> None:
        for last in [False] * (times - 1) + [True]:
            if last and kind == "native":
                armed.append(True)
            y = x.neg() * 2
            if kind == "device":
                flush_now()
            if last:
                armed.append(True)
            y.expm1().tolist()

    monkeypatch.setattr(run, "_prepare", corrupted)
    x = torch.ones(3)
    told = r"is 16 bytes of a storage that has 12" if kind == "native" else r"is taken for .*3"
    told += r".*; node 0 of \d+, aten.(neg|expm1).default at .*test_validate.py:\d+, reads it first"
    with pytest.raises(ValidationError, match=told), fused_eager(cache="off", **MODES[mode]):
        program(3 if followed else 1)


@pytest.mark.parametrize("mode", MODES)
def test_what_a_region_is_given(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = run.as_array
    monkeypatch.setattr(run, "as_array", lambda value, *of: original(value, *of).view("int32"))
    x = torch.ones(3)
    told = r"running: .*test_validate.py:\d+ are given value 0 as int32\(3,\)"
    with pytest.raises(ValidationError, match=told), fused_eager(cache="off", **MODES[mode]):
        x.erfc().tolist()


@pytest.mark.parametrize("mode", MODES)
def test_what_storages_receive(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = run.Execution.advance

    def corrupted(self: Any) -> None:
        original(self)
        for _, vid in self.assigned:
            self.values[vid] = self.values[vid][:2]

    monkeypatch.setattr(run.Execution, "advance", corrupted)
    x = torch.ones(3)
    with pytest.raises(ValidationError, match=r"binding: .*receives"), fused_eager(cache="off", **MODES[mode]):
        x.log1p().tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", ["identity", "parts", "way back"])
def test_keys(mode: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One level of a key that leaves something out: the other tells."""
    monkeypatch.setattr(validate, "_REGIONS", Bounded(64))
    if level == "identity":
        monkeypatch.setattr(validate, "identity", lambda computation, flags: len(computation.region.nodes))
    elif level == "parts":
        forgetful = canonical.to_parts
        monkeypatch.setattr(canonical, "to_parts", lambda c: {**forgetful(c), "again": next(counter)})
    else:
        original = canonical.to_computation
        monkeypatch.setattr(
            canonical, "to_computation", lambda parts: original({**parts, "nodes": list(parts["nodes"])[:-1]})
        )
    counter = count()
    load.forget()
    x = torch.ones(3)
    told = "keys: .*test_validate.py"
    with pytest.raises(ValidationError, match=told), fused_eager(cache="off", **MODES[mode]):
        x.sinh().tolist()
        x.cosh().tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrong", ["one less", "dtype", "shape"])
def test_what_lowering_hands_on(mode: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of a region's function are taken for what was promised, whatever they are."""
    original = lowering.Function.__call__

    def corrupted(self: Any, *arrays: Any) -> Any:
        (first, *rest), flags = original(self, *arrays)
        return {"one less": rest, "dtype": [first.astype("int32")], "shape": [first[:2]]}[wrong], flags

    monkeypatch.setattr(lowering.Function, "__call__", corrupted)
    load.forget()
    x = torch.linspace(0.1, 0.9, 3)
    with pytest.raises(ValidationError, match="lowering: a function"), fused_eager(cache="off", **MODES[mode]):
        x.arccos().tolist()


@pytest.mark.parametrize("mode", MODES)
def test_what_is_compiled_has_the_sizes_of_its_region(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executable, "nbytes_returned", lambda outputs, rows: 1)
    load.forget()
    x = torch.linspace(0.1, 0.9, 3)
    told = r"compiling: .*test_validate.py:\d+, it takes \d+ bytes and returns \d+, and the region \d+ and 1"
    with pytest.raises(ValidationError, match=told), fused_eager(cache="off", **MODES[mode]):
        x.arcsin().tolist()


def test_a_defect_of_a_function_costs_a_program_nothing_but_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody asks for validation: ATen runs what was compiled wrongly, and the report says why."""
    monkeypatch.setattr(executable, "nbytes_returned", lambda outputs, rows: 1)
    load.forget()
    x = torch.linspace(0.1, 0.9, 3)
    with events("compile-failed") as seen, fused_eager(compile="wait", native="never", cache="off", validate=False):
        assert torch.equal(x.arctan(), torch.linspace(0.1, 0.9, 3).arctan())
    assert "it takes" in str([e.data for e in seen])


def test_an_entry_of_another_region_is_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is under a key, verified or not: its bytes have to fit."""
    options = {"compile": "wait", "native": "never", "cache": "", "cache_dir": str(tmp_path), "cache_bytes": 1 << 30}
    original = caching.from_blobs
    x, y = torch.linspace(0.1, 0.9, 3), torch.linspace(0.1, 0.9, 5)
    kept: list[Any] = []

    def kept_first(blobs: Any, *rest: Any) -> Any:
        kept.append(blobs)
        return original(kept[0], *rest)

    monkeypatch.setattr(caching, "from_blobs", kept_first)
    want = [x.rsqrt().tolist(), (y.rsqrt() + 1).tolist()]
    for _ in range(2):  # makes the entries, and finds them
        load.forget()
        with events("cache-load", "cache-unloadable") as seen, fused_eager(**options):
            got = [x.rsqrt().tolist(), (y.rsqrt() + 1).tolist()]
        caching.keeper(resolve(None, options)).flush()
        torch.testing.assert_close(got, want)
    assert [e.kind for e in seen] == ["cache-load", "cache-unloadable"] and "returns" in seen[1].data["detail"]


def test_nothing_is_checked_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> None:
        raise AssertionError

    for name in ("recorded", "loaded", "computed", "bound", "read", "keyed", "given", "assigned"):
        monkeypatch.setattr(validate, name, never)
    load.forget()
    with fused_eager(compile="wait", native="never", cache="off", validate=False):
        assert torch.ones(3).sinc().shape == (3,)
