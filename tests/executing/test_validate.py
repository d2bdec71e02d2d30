"""What each stage hands on is checked: a defect is told by the stage's name, with the op and the line."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fused_eager import fused_eager
from fused_eager.compiling.executable import Executable, RunCheck
from fused_eager.devices.host.buffers import TABLE
from fused_eager.errors import ValidationError
from fused_eager.executing import load, run, validate
from fused_eager.tracing.stream import Node, Ref

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


WRONG_NODES = [reads_what_is_not_there, makes_what_is_there, makes_another, names_no_operand, writes_no_operand]


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
@pytest.mark.parametrize("what", ["checks", "too few", "dtype", "shape"])
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
            return wrong[what], flags

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


def test_nothing_is_checked_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> None:
        raise AssertionError

    for name in ("recorded", "loaded", "computed", "bound"):
        monkeypatch.setattr(validate, name, never)
    load.forget()
    with fused_eager(compile="wait", native="never", cache="off", validate=False):
        assert torch.ones(3).sinc().shape == (3,)
