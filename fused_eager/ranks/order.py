"""The order of collectives, compared between the ranks of a group before each one is called.

Each rank keeps a running hash of what it has called in a group: kind, shapes, dtypes, reduction, root. Whoever comes
first to a number writes its hash and line into the store, and each other rank compares. The first that differs tells
all: it raises at once, the others as soon as their heartbeat has asked, four times a second. Nothing is sent for a
collective that differs, so no rank gets another one's values.

What is called on CPU tensors outside of contexts is not seen. Gloo counts that, too: where its numbers say that one
rank has done something that nobody has seen, ranks cannot be compared any more, and that group is left alone from then
on.
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass
from typing import Any

import torch

from .channel import StoreGone
from .faults import Fault
from .heartbeat import Heartbeat
from .table import Collective

KEPT = 4096  # numbers of a group whose hashes stay in the store: a rank that only sends may run ahead


@dataclass(slots=True)
class _Of:
    """One group: how many collectives this rank has called in it, and the hash of them all; how often it has sent or
    received, which gloo counts as well; and whether it is compared."""

    number: int = 0
    digest: str = ""
    sent: int = 0
    is_left_alone: bool = False


_lock = threading.Lock()
_groups: dict[tuple[int, str], _Of] = {}


_HOST = torch.device("cpu")
_sent: dict[str, int] = {}  # by a group's name: how often this rank has sent or received in it
_in_xla: dict[str, int] = {}  # and how many of its collectives gloo has not seen, since they run inside XLA


def numbered(group: Any, row: Collective) -> int | None:
    """Which collective of its group one is that is about to be called, the same number on all ranks; None of what is
    sent between two, and where the group does not count. Gloo counts what nobody else sees, and what is sent."""
    name = group.group_name
    try:
        counted = int(group._get_backend(_HOST)._get_sequence_number_for_group())
    except RuntimeError:
        return None
    if not counted:  # a new group of that name
        _sent.pop(name, None)
        _in_xla.pop(name, None)
    if not row.is_for_all:
        _sent[name] = _sent.get(name, 0) + 1
        return None
    return counted - _sent.get(name, 0) + _in_xla.get(name, 0)


def ran_in_xla(group: str) -> None:
    """A collective of a group of that name has run without gloo."""
    _in_xla[group] = _in_xla.get(group, 0) + 1


def passed(beat: Heartbeat, group: str) -> None:
    """Something is sent between two ranks of a group."""
    with _lock:
        _groups.setdefault((id(beat), group), _Of()).sent += 1


def check(beat: Heartbeat, group: str, call: str, line: str, counted: int) -> None:
    """Compare the next collective of a group with that of the other ranks.

    Arguments:
        group: its name, the same on all ranks.
        call: what has to be the same on all of them, in words.
        counted: how many calls gloo has counted in the group.

    Raises:
        CollectivesDiffer: another rank has called something else.
        RankLost: one is lost.
    """
    with _lock:
        of = _groups.setdefault((id(beat), group), _Of())
        if of.is_left_alone:
            return
        number, of.number = of.number, of.number + 1
        of.digest = hashlib.sha256(f"{of.digest}/{call}".encode()).hexdigest()[:32]
        mine: dict[str, Any] = {"rank": beat.rank, "digest": of.digest, "call": call, "line": line}
        mine["counted"] = counted - of.sent
    try:
        first = json.loads(beat.channel.first(f"order/{group}/{number}", json.dumps(mine)))
        if first["digest"] != of.digest and first["counted"] != mine["counted"]:
            of.is_left_alone = True
        elif first["digest"] != of.digest:
            beat.publish(_fault(number, first, mine))
        elif first["rank"] == beat.rank and number >= KEPT:
            beat.channel.forget(f"order/{group}/{number - KEPT}")
    except StoreGone:
        return  # the heartbeat says so
    if beat.fault is not None:
        raise beat.error(f"calls {call} at {line}")


def _fault(number: int, first: dict[str, Any], mine: dict[str, Any]) -> Fault:
    one, other = (f"rank {of['rank']} calls {of['call']} at {of['line']}" for of in (first, mine))
    return Fault("differ", None, f"the ranks of a group differ in collective number {number}: {one}, and {other}")


def forget(beat: Heartbeat) -> None:
    """A job has ended."""
    with _lock:
        for key in [key for key in _groups if key[0] == id(beat)]:
            del _groups[key]
