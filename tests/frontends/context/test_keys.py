"""Guards that put back a thread's dispatch keys: our mode comes and goes inside of them, and nothing is lost."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fused_eager import fused_eager
from fused_eager.devices.host.buffers import TABLE
from fused_eager.frontends.context import bypass
from fused_eager.frontends.context.threads import current_door
from fused_eager.quiet import stack


def number() -> float:
    return (torch.ones(3) + 1).sum().item()


@torch.inference_mode()
def decorated() -> float:
    return number()


def nested() -> float:
    with torch.inference_mode(), torch.inference_mode(False):
        return number()


def raises() -> float:
    with contextlib.suppress(ZeroDivisionError), torch.inference_mode():
        raise ZeroDivisionError(number())
    return number()


def fakes() -> float:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    return float(mode.from_tensor(torch.ones(6, 4)).shape[0])  # torch looks at the storage, which is a read


PROGRAMS: dict[str, Callable[[], float]] = {
    "inference": decorated,
    "nested": nested,
    "raises": raises,
    "fake tensors": fakes,
    "compiled": torch.compile(number, backend="eager"),
}


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The front door steps aside, or comes back, at each read. Returns what it did."""
    did: list[str] = []

    def read(door: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        did.append("back" if door.bypassed else "aside")
        if door.bypassed:
            door.come_back()
        elif door in stack():
            bypass._leave(door, "read", 0.0)

    monkeypatch.setattr(bypass, "read", read)
    return did


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("first", ["aside", "back"])
def test_modes_and_keys_agree(name: str, first: str, restless: list[str]) -> None:
    with warnings.catch_warnings(), fused_eager(progress=False, native="never"):
        warnings.simplefilter("ignore")
        door = current_door()
        assert door is not None
        left = set(TABLE)  # by other tests
        if first == "back":
            number()
            assert door.bypassed
        for _ in range(4):
            assert PROGRAMS[name]() == 6.0
            assert torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.Python) == bool(stack())
            t = torch.zeros(5) + 1  # of no operand: it fails where keys say that there is a mode, and there is none
            assert bool(set(TABLE) - left) is not door.bypassed  # it is seen, or it is not
            assert t.add(1).tolist() == [2.0] * 5
            del t
            number()  # the other way round
    assert {"aside", "back"} <= set(restless)
