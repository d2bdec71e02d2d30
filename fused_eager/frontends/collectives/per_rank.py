"""What a process has once, and each of its ranks is to have for itself: torch's default group, states of generators,
the environment, the program's modules."""

from __future__ import annotations

import os
import random as python_random
import sys
from typing import Any

import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from ..device import random
from ..device.doors import CURRENT, DOORS

_c10d: Any = distributed.distributed_c10d


class _World(type(_c10d._world)):  # type: ignore[misc]
    """Torch's record of a process's groups, with tables of its own instead of those of the module."""

    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    group_count: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.pg_map, self.pg_names, self.pg_group_ranks = {}, {}, {}
        self.pg_backend_config, self.tags_to_pg, self.pg_to_tag = {}, {}, {}
        self.group_count = 0


class Groups:
    """Torch's default group, and all others."""

    def begin(self, rank: int, size: int) -> None:
        _c10d._world, _c10d._default_pg_init_method = _World(), None

    def put_away(self) -> Any:
        return _c10d._world, _c10d._default_pg_init_method

    def bring_back(self, kept: Any) -> None:
        _c10d._world, _c10d._default_pg_init_method = kept


class Numbers:
    """Random states: a rank that gives a seed and draws gets what it would get alone."""

    def __init__(self) -> None:
        self._first = self.put_away()

    def begin(self, rank: int, size: int) -> None:
        self.bring_back(self._first)

    def put_away(self) -> Any:
        numpy = sys.modules.get("numpy.random")
        ours = [(of.seed, of.offset, of._on_host) for of in random.GENERATORS]
        tracker = sys.modules.get("torch.distributed.tensor._random")
        return (
            torch.default_generator.get_state(), torch.default_generator.initial_seed(), python_random.getstate(),
            None if numpy is None else numpy.get_state(), ours, getattr(tracker, "_rng_tracker", None),
        )  # fmt: skip

    def bring_back(self, kept: Any) -> None:
        state, _, own, of_numpy, ours, tracked = kept
        torch.default_generator.set_state(state)
        python_random.setstate(own)
        numpy, tracker = sys.modules.get("numpy.random"), sys.modules.get("torch.distributed.tensor._random")
        if numpy is not None and of_numpy is not None:
            numpy.set_state(of_numpy)
        for of, (seed, offset, on_host) in zip(random.GENERATORS, ours, strict=True):
            of.seed, of.offset, of._on_host = seed, offset, on_host
        if tracker is not None:
            tracker._rng_tracker = tracked  # type: ignore[attr-defined]


class Device:
    """The device that is meant where none is named: at first the one of the rank's number."""

    def begin(self, rank: int, size: int) -> None:
        CURRENT[0] = rank % len(DOORS)

    def put_away(self) -> Any:
        return CURRENT[0]

    def bring_back(self, kept: Any) -> None:
        CURRENT[0] = kept


class Inferred:
    """What torch has worked out with fake tensors: of a device without a number it keeps the number that it was. And
    who serves DTensor's ops, which a program changes for a while (`loss_parallel`)."""

    def __init__(self) -> None:
        self._dispatcher: Any = DTensor._op_dispatcher  # type: ignore[attr-defined]
        self._first = self._dispatcher._custom_op_handlers

    def begin(self, rank: int, size: int) -> None:
        self.bring_back(({}, dict(self._first)))

    def put_away(self) -> Any:
        return FakeTensorMode.cache, self._dispatcher._custom_op_handlers

    def bring_back(self, kept: Any) -> None:
        FakeTensorMode.cache, self._dispatcher._custom_op_handlers = kept


_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class Environment:
    """What torchrun tells a process."""

    def begin(self, rank: int, size: int) -> None:
        os.environ.update(
            RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{size}", LOCAL_WORLD_SIZE=f"{size}", GROUP_RANK="0",
            MASTER_ADDR="localhost", MASTER_PORT="0",
        )  # fmt: skip

    def put_away(self) -> Any:
        return {name: os.environ.get(name) for name in _NAMES}

    def bring_back(self, kept: Any) -> None:
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            elif os.environ.get(name) != value:
                os.environ[name] = value


class Modules:
    """`__main__`, and the modules that lie beside the program: each rank imports them for itself, as they keep what is
    the rank's own.

    Arguments:
        folders: where they lie.
    """

    def __init__(self, *folders: str):
        self._folders = tuple(os.path.join(folder, "") for folder in folders)
        self._known: dict[str, bool] = {}

    def _is_own(self, name: str, module: Any) -> bool:
        if name == "__main__":
            return True
        file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
        inside = isinstance(file, str) and file.startswith(self._folders)
        return inside and "site-packages" not in file and name.partition(".")[0] not in ("fused_eager", "torch", "jax")

    def put_away(self) -> Any:
        known, modules = self._known, sys.modules
        for name in [name for name in modules if name not in known]:
            known[name] = self._is_own(name, modules[name])
        return {name: modules[name] for name, is_own in known.items() if is_own and name in modules}

    def begin(self, rank: int, size: int) -> None:
        self.bring_back({})

    def bring_back(self, kept: Any) -> None:
        for name in self.put_away():
            if name not in kept:
                del sys.modules[name]
        sys.modules.update(kept)
