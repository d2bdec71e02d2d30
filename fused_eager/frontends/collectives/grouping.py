"""What NCCL's groups can do as groups, and gloo's cannot: be split, and take several collectives at a time.

`split_group` makes a new group of the ranks that it names; only they have to call it. Between `_start_coalescing` and
`_end_coalescing` each collective begins at its line, and the end's work is that of all of them.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import distributed
from torch._C import _distributed_c10d as c10d

IsOurs = Callable[[Any], bool]
_SPLITS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by group: how often it has been split
_OPEN: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()  # by group: the works since the start


def noted(group: Any, work: Any) -> Any:
    """The work of a collective that a group has begun, which is one of several if the group takes them together."""
    if work is not None and group in _OPEN:
        _OPEN[group].append(work)
    return work


class Together(c10d.Work):
    """The work of several collectives: it has ended when all of them have."""

    def __init__(self, works: Sequence[Any]):
        super().__init__()
        self._works = tuple(works)

    def wait(self, *timeout: Any) -> bool:
        """Wait for each of them; raises what the first raises."""
        results = [work.wait(*timeout) for work in self._works]
        return all(results)

    def is_completed(self) -> bool:
        """Whether each of them has ended."""
        return all(work.is_completed() for work in self._works)


def _split(
    parent_pg: Any = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: Any = None,
) -> Any:
    """`torch.distributed.split_group`: the group of those of its parent's ranks that are named with this one, or None.

    Raises:
        ValueError: this rank is not of the parent, or a list of ranks is empty, or names one twice or one that is none.
    """
    world: Any = distributed.distributed_c10d._world
    parent = parent_pg or world.default_pg
    if not split_ranks:
        raise ValueError("split_ranks cannot be None or empty")
    if parent not in world.pg_group_ranks:
        raise ValueError(f"Group {parent} is not registered")
    globally = {rank: named for named, rank in world.pg_group_ranks[parent].items()}
    for ranks in split_ranks:
        if not ranks:
            raise ValueError("the split group cannot be empty")
        if len(set(ranks)) < len(ranks):
            raise ValueError(f"the split group cannot have duplicate ranks, as {list(ranks)} has")
        if not globally.keys() >= set(ranks):
            raise ValueError(f"the parent group has the ranks {sorted(globally)}, and not all of {list(ranks)}")
    _SPLITS[parent] = _SPLITS.get(parent, 0) + 1
    mine = next((ranks for ranks in split_ranks if parent.rank() in ranks), None)
    if mine is None:
        return None
    with _named(f"{parent.group_name}, split {_SPLITS[parent]}: {sorted(mine)}"):
        made: Any = distributed.new_group(
            [globally[rank] for rank in mine],
            timeout=timeout,
            backend=str(backend or world.pg_backend_config[parent]),
            use_local_synchronization=True,
            group_desc=group_desc or f"{parent.group_desc}:split",
        )
    made.bound_device_id = world.default_pg.bound_device_id
    return made


@contextmanager
def _named(text: str) -> Iterator[None]:
    """In the body, a group that is made has a name by this text. Torch names it by how many groups this process has
    had, which is another number where one rank is in more of them."""
    module: Any = distributed.distributed_c10d
    before, name = module._process_group_name, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    module._process_group_name = lambda ranks, use_hashed_name: name
    try:
        yield
    finally:
        module._process_group_name = before


def install(is_ours: IsOurs) -> None:
    """Let groups that are ours be split, and take several collectives together. Once for each process."""
    module: Any = distributed.distributed_c10d
    split = module.split_group
    bound = inspect.signature(split).bind

    @functools.wraps(split)
    def split_group(*args: Any, **kwargs: Any) -> Any:
        parent = bound(*args, **kwargs).arguments.get("parent_pg") or module._world.default_pg
        return (_split if parent is not None and is_ours(parent) else split)(*args, **kwargs)

    homes: tuple[Any, ...] = (module, distributed, distributed.device_mesh)
    for home in homes:
        home.split_group = split_group
    kind: Any = c10d.ProcessGroup
    start, end = kind._start_coalescing, kind._end_coalescing

    def _start_coalescing(group: Any, device: Any) -> None:
        if not is_ours(group):
            return start(group, device)  # type: ignore[no-any-return]
        _OPEN[group] = []
        return None

    def _end_coalescing(group: Any, device: Any) -> Any:
        works = _OPEN.pop(group, None)
        return end(group, device) if works is None else Together(works)

    kind._start_coalescing = functools.wraps(start)(_start_coalescing)
    kind._end_coalescing = functools.wraps(end)(_end_coalescing)


__all__ = ["install", "noted"]
