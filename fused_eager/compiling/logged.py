"""Logged: the regions of another run, from its event log, under the keys that a target asks for.

A region is keyed anew, by the function that keys what a program meets here: so a log of a run on the target's own
chips gives the keys that stand in it, and one of a simulated device those that such chips would have asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fused_eager.cache import Unencodable

from ..targets.device import TargetDevice
from . import surroundings
from .key_text import unpacked
from .met import Met, Op
from .remake import as_asked, key_here


def for_target(rows: Iterable[Mapping[str, Any]], device: TargetDevice, salt: str) -> tuple[list[Met], int]:
    """The regions that events of kind `region` tell of, each once, and how many others are of CPU tensors, which no TPU
    computes.

    A row that cannot be read, and a region for which this process has other settings than that run had, has no key and
    says why.
    """
    found: dict[str, Met] = {}
    of_the_host = 0
    for digest, row in {str(row.get("key")): row for row in rows}.items():
        name = str(row.get("region"))
        try:
            key = unpacked(str(row.get("parts")))
            if "memory" not in key.parts:
                of_the_host += 1
                continue
            with as_asked(key):
                here = key_here(key, salt, device)
            differs = surroundings.differing_numerics(key, here)
            if differs:
                raise ValueError(f"that run had other settings than this process: {', '.join(differs)}")
            ops = [Op(str(node["op"]), "") for node in key.parts["region"]["nodes"]]
        except (ValueError, KeyError, TypeError, AttributeError, Unencodable) as error:
            found[digest] = Met(None, name, why=str(error))
        else:
            found.setdefault(here.digest, Met(here, name, ops))
    return list(found.values()), of_the_host
