"""What the runtime does for itself is seen by no mode, no autograd and no autocast."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fused_eager import fused_eager
from fused_eager.quiet import inside, unobserved
from tests.streams import open_stream


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_no_mode_sees_the_body_and_all_see_what_follows() -> None:
    x = torch.ones(4)
    with Seen() as outer, Seen() as inner:
        with unobserved():
            x + 1
        x * 2
    assert outer.ops == inner.ops == ["aten.mul.Tensor"]


def test_our_own_mode_records_nothing() -> None:
    x = torch.ones(4)
    with fused_eager():
        with unobserved():
            y = x + 1
        assert not open_stream().nodes
        assert y.tolist() == [2.0] * 4


def test_autograd_records_nothing_and_is_on_again_afterwards() -> None:
    x = torch.ones(4, requires_grad=True)
    with unobserved():
        assert not (x * 2).requires_grad
    assert (x * 2).requires_grad


def test_autocast_casts_nothing() -> None:
    x = torch.ones(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        with unobserved():
            assert (x @ x).dtype is torch.float32
        assert (x @ x).dtype is torch.bfloat16


def test_inside_is_a_matter_of_the_thread_and_nests() -> None:
    seen: list[bool] = []
    with unobserved():
        with unobserved():
            pass
        assert inside()
        other = threading.Thread(target=lambda: seen.append(inside()))
        other.start()
        other.join()
    assert not inside() and seen == [False]


def test_the_thread_of_remote_stores_is_inside() -> None:
    """It starts threads while a flush waits for what it fetches: settling there would wait for that flush."""
    asyn = pytest.importorskip("fsspec.asyn", reason="the extra `remote` is not installed")

    async def ask() -> bool:
        return inside()

    assert asyn.sync(asyn.get_loop(), ask)


def test_an_exception_leaves_nothing_behind() -> None:
    x = torch.ones(4)
    with Seen() as mode:
        try:
            with unobserved():
                raise KeyError
        except KeyError:
            assert not inside()
        x + 1
    assert mode.ops == ["aten.add.Tensor"]


def test_the_collector_is_held_off_and_comes_back() -> None:
    with unobserved():
        assert not gc.isenabled()
        with unobserved():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with unobserved():
            pass
        with fused_eager(follower="python"):
            (torch.ones(3) + 1).tolist()
        assert not gc.isenabled(), "the program's own choice"
    finally:
        gc.enable()


def test_threads_that_compile_hold_the_collector_off_for_nobody() -> None:
    seen: list[bool] = []

    def compiles() -> None:
        with unobserved():
            seen.append(gc.isenabled())

    thread = threading.Thread(target=compiles, name="fused-eager-compiler")
    thread.start()
    thread.join()
    assert seen == [True]


def test_an_op_that_goes_to_python_holds_the_collector_off() -> None:
    seen: list[bool] = []

    @torch.library.custom_op("quiet_test::look", mutates_args=())
    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(gc.isenabled())
        return x.clone()

    with fused_eager():
        look(torch.ones(3))
        seen.append(gc.isenabled())
    assert seen == [False, True]


@pytest.mark.parametrize("collects", [True, False])
def test_importing_goes_through_all_objects_once(collects: bool) -> None:
    program = f"""
import gc
import torch
whole = []
gc.callbacks.append(lambda phase, about: whole.append(phase) if about["generation"] == 2 else None)
if not {collects}:
    gc.disable()
from fused_eager import fused_eager
assert not whole
from fused_eager.fusion_rules import RULES
print(gc.isenabled(), len(whole))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == [str(collects), "2" if collects else "0"], done.stderr  # it starts, and it stops
