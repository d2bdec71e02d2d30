"""DistributedDataParallel in a context: on real ranks each program ends with what plain torch ends with."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from . import programs
from .ranks import launch

ALL = [
    name
    for name, value in vars(programs).items()
    if inspect.isfunction(value) and list(inspect.signature(value).parameters) == ["rank", "context"]
]
LONG = "long_run"
SHORT = [name for name in ALL if name != LONG]
# One of each kind of thing that the reducer does.
KINDS = [
    "made_before",
    "small_buckets",
    "bucket_view_small",
    "static_graph",
    "ready_future",
    "builtin_fp16_hook",
    "unused_view",
    "optimizer_in_hooks",
    "collectives",
]
MIXED = ["made_inside@mixed", "bucket_view_clip@mixed", "own_hook@mixed", "buffers@mixed"]
WAIT = {"compile": "wait", "native": "never"}


def check(names: list[str], options: dict[str, Any], folder: Path, world: int = 2) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    said = launch(names, options, world, {"FUSED_EAGER_CACHE_DIR": str(folder)}, seconds=540)
    wrong = {f"{name}, rank {rank}": out[name] for rank, out in enumerate(said) for name in names if out[name]}
    assert not wrong, "\n".join(f"{place}: {why}" for place, why in wrong.items())


def test_programs_on_two_ranks(tmp_path: Path) -> None:
    check([*KINDS, *MIXED[:2], "raises_in_gradient", "raises_in_future"], WAIT, tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["strict"])
def test_kinds_op_by_op(mode: str, tmp_path: Path) -> None:
    check(KINDS[1:5], {"mode": mode}, tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.parametrize("options", [WAIT, {}, {"mode": "strict"}, {"mode": "debug"}], ids=str)
def test_all_programs(options: dict[str, Any], tmp_path: Path) -> None:
    check([*SHORT, *MIXED], options, tmp_path / "cache")
    check([*SHORT, *MIXED], options, tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"native": "never"}], ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_long_runs_with_a_warm_cache(options: dict[str, Any], world: int, tmp_path: Path) -> None:
    """Once cold, and ten times with what that has left in the cache."""
    for _ in range(11):
        check([LONG], options, tmp_path / "cache", world)
