"""Ranks that are threads of this process: `spawn`, and what torch is given instead of what only processes can use.

Torch's own tests have a group of threads as well. Here the ranks take turns, so what a process has once can be each
rank's own, and a program is the one that it is under torchrun.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import distributed
from torch._C import _distributed_c10d as c10d

from ...errors import FusedEagerError
from ...folder import FOLDERS
from ...ranks import job
from ...ranks.turns import Rank, Turns, mine
from ..device.doors import DOORS
from . import per_rank
from .boards import Boards
from .within import GroupWithin

_c10d: Any = distributed.distributed_c10d
_BACKEND = "fused_eager"


def _yielding(original: Callable[..., Any]) -> Callable[..., Any]:
    """What waits in C or C++ lets the other ranks run, where it is the program that waits, or torch for it: the library
    holds locks that they may want."""

    @functools.wraps(original)
    def waits(*args: Any, **kwargs: Any) -> Any:
        at = mine()
        if at is None or sys._getframe(1).f_code.co_filename.startswith(FOLDERS):
            return original(*args, **kwargs)
        with at[0].blocking(at[1]):
            return original(*args, **kwargs)

    return waits


@contextlib.contextmanager
def _installed(turns: Turns) -> Iterator[None]:
    """In the body, groups that a rank makes are of threads, and what waits lets the others run."""
    boards, store = Boards(), distributed.HashStore()
    isolate: Any = c10d._set_thread_isolation_mode  # type: ignore[attr-defined] # C++ finds groups by name and thread
    helper, meet = _c10d._new_process_group_helper, _c10d.rendezvous

    def rendezvous(*args: Any, **kwargs: Any) -> Any:
        at = mine()
        if at is None:
            yield from meet(*args, **kwargs)
        else:
            yield store, at[1].number, len(turns.ranks)

    @functools.wraps(helper)
    def make(group_size: int, group_rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        if mine() is not None and str(backend) != "fake":
            backend = _c10d.Backend(_BACKEND)
        return helper(group_size, group_rank, ranks, backend, *args, **kwargs)

    def made(options: Any, _: Any = None) -> GroupWithin:
        at = mine()
        assert at is not None
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        name = str(options.group_id)
        if not distributed.is_initialized():
            turns.begin_anew(at[1])
        return GroupWithin(options.group_rank, boards.of(at[1].number, name, ranks), name)

    places: list[tuple[Any, str, Any]] = [
        (_c10d, "_new_process_group_helper", make),
        (_c10d, "rendezvous", rendezvous),
        (time, "sleep", _yielding(time.sleep)),
    ]
    waits: tuple[tuple[Any, str], ...] = ((c10d.Store, "get"), (c10d.Store, "wait"), (c10d.TCPStore, "__init__"))
    places += [(home, name, _yielding(getattr(home, name))) for home, name in waits]
    plugins = distributed.Backend._plugins
    before = {key: plugins[key] for key in plugins if key.lower() in (_BACKEND, "tpu_dist")}
    kept = [(home, name, getattr(home, name)) for home, name, _ in places]
    try:
        for home, name, value in places:
            setattr(home, name, value)
        for key, plugin in before.items():
            plugins[key] = plugin._replace(creator_fn=made)
        isolate(True)
        yield
    finally:
        isolate(False)
        plugins.update(before)
        for home, name, value in kept:
            setattr(home, name, value)


def run(program: Callable[[int], object], size: int, folders: Sequence[str] = ()) -> None:
    """Call a program once for each rank, with its number.

    Arguments:
        folders: where modules lie that each rank is to import for itself.

    Raises:
        FusedEagerError: there is no device, or this is a rank already, or of a job of processes.
        Whatever the first rank has raised that did: with a note that names it. The others are told of it.
    """
    if not DOORS:
        raise FusedEagerError("ranks of one process are for a device: import fused_eager.tpu, or run --device tpu")
    if mine() is not None or distributed.is_initialized():
        raise FusedEagerError("this process is a rank already, and cannot be made of several")
    if size < 1:
        raise FusedEagerError(f"at least one rank is needed, not {size}")
    kinds = (per_rank.Groups, per_rank.Numbers, per_rank.Device, per_rank.Inferred, per_rank.Environment)
    owns: list[Any] = [kind() for kind in kinds]
    owns += [per_rank.Modules(*folders)] if folders else []
    turns = Turns(size, owns)

    def called(rank: int) -> None:
        try:
            program(rank)
        finally:  # C++ knows groups by the thread, too, and the main thread goes on
            c10d._unregister_all_process_groups()

    with _installed(turns):
        turns.run(called, lambda error: job._line_of(error.__traceback__))
    _tell(turns)


def _tell(turns: Turns) -> None:
    """Raise what the first has raised, and say what has become of the others."""
    found = turns.cause()
    if found is None:
        return
    cause, error = found
    for r in turns.ranks:
        if r.error is not None and r is not cause and r.has_failed:
            print(f"rank {r.number}: {type(r.error).__name__}: {r.error}", file=sys.stderr, flush=True)
    if hasattr(error, "add_note"):
        error.add_note(f"rank {cause.number} of the {len(turns.ranks)} ranks of this process has raised this")
    else:
        print(f"rank {cause.number} of the {len(turns.ranks)} ranks of this process has raised:", file=sys.stderr)
    raise error


def spawn(fn: Callable[..., object], args: tuple[Any, ...] = (), nprocs: int = 0) -> None:
    """`torch.multiprocessing.spawn` with ranks that are threads of this process, one for each device: call
    `fn(rank, *args)` on each. For tests and notebooks; modules and globals are shared by all ranks.

    Arguments:
        nprocs: how many ranks; 0: as many as there are devices.

    Raises:
        FusedEagerError: as `run`; and whatever the first rank has raised that did.
    """
    run(lambda rank: fn(rank, *args), nprocs or len(DOORS))


__all__ = ["Rank", "run", "spawn"]
