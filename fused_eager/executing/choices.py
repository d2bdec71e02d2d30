"""Choices: the measured way to run a segment of the program goes from process to process through the compile cache.

`policy.autotuner` measures; what it chose is written as a small entry of its own, and asked for when another process
has run the same regions for the first time. A segment is known there by the keys of those regions, in order, never by a
line or a name. Stores are met on the cache's own thread: a program that measures meanwhile is not held up, and
whichever is done first counts. Whatever is wrong with an entry, the program measures as if there were none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from fused_eager.cache import Entry, Key, Unencodable

from .. import follower
from ..compiling import surroundings
from ..compiling.caching import Keeper, keeper
from ..config import Config
from ..log.events import LOG
from ..policy.autotuner import FLUSHES
from ..policy.compare import is_worth
from ..policy.segment import Choice, Pieces, Ran, Segment
from ..policy.times import FACTOR, Place

FORMAT = 1  # of the blob and of what a key says about a segment; part of every key
BLOB = "choice"
LARGEST = 1024  # bytes of a blob


class Absurd(ValueError):
    """Verified bytes that are no choice; the text says why."""


def to_bytes(choice: Choice) -> bytes:
    """A choice as the blob of an entry."""
    return json.dumps({"format": FORMAT, **asdict(choice)}).encode()


def from_bytes(data: bytes) -> Choice:
    """The choice in a verified blob.

    Raises:
        Absurd: there is none, or not one that was measured.
    """
    if len(data) > LARGEST:
        raise Absurd(f"{len(data)} bytes")
    try:
        form = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Absurd(f"not JSON: {str(error)[:100]}") from error
    if type(form) is not dict or form.keys() != {"format", "native", "fused_s", "native_s"}:
        raise Absurd("not an object with the members of a choice")
    if type(form["format"]) is not int or form["format"] != FORMAT:
        raise Absurd(f"format {str(form['format'])[:20]}, this version reads {FORMAT}")
    fused, native = form["fused_s"], form["native_s"]
    if type(form["native"]) is not bool or not (_is_time(fused) and _is_time(native)):
        raise Absurd("native is no boolean, or a time is no positive number")
    if form["native"] and is_worth(fused, native):
        raise Absurd("native, with times that say the opposite")
    return Choice(form["native"], float(fused), float(native))


def _is_time(value: Any) -> bool:
    # Seconds that a program may wait between two reads; this also refuses infinities and what is no number.
    return type(value) in (int, float) and 0 < value < 1e6


def key(pieces: Pieces, salt: str, torch_threads: int) -> Key:
    """The key of the choice for a segment that runs these regions here. Raises Unencodable."""
    segment = {"format": FORMAT, "regions": [list(piece) for piece in pieces]}
    followed_in = "compiled" if follower.is_open() else "python"
    return Key({"choice": segment, **surroundings.of_choice(salt, torch_threads, followed_in)})


def is_choice(parts: Mapping[str, Any]) -> bool:
    """Whether these are the parts of the key of a choice, not of a region."""
    return "choice" in parts and "region" not in parts


def exchange(config: Config, segment: Segment) -> None:
    """Tell the compile cache what a segment owes it, and ask what it wants to know. Waits for nothing."""
    owed, segment.owed = segment.owed, []
    kept = keeper(config)
    if kept is None:
        return
    # In another thread it may be another number.
    threads = torch.get_num_threads()
    for ran, end, choice in owed:
        pieces = _pieces(ran)
        if isinstance(pieces, str):
            _tell(pieces)
        else:
            kept.later(_job(kept, segment, pieces, end, choice, threads))


def _pieces(ran: Ran) -> Pieces | str:
    """The regions of a segment in order, or the outcome that says why it is not known by them."""
    if len(ran) > FLUSHES:
        return "too-long"
    found: list[tuple[str, str]] = []
    for flush in ran:
        if flush is None:
            return "no-key"
        found += flush
    return tuple(found) or "no-region"


def _job(
    kept: Keeper, segment: Segment, pieces: Pieces, end: Place, choice: Choice | None, threads: int
) -> Callable[[], None]:
    def job() -> None:
        try:
            asked = key(pieces, kept.salt, threads)
            kept.describe_here()
            if choice is not None:
                keep(kept, asked, choice)
            elif (found := find(kept, asked)) is not None:
                segment.offered = end, found
        except Unencodable as why:
            _tell("no-key", detail=str(why))
        except Exception as error:  # on a thread that others need, and nobody's to hear of
            _tell("unusable", detail=f"{type(error).__name__}: {str(error)[:200]}")

    return job


def keep(kept: Keeper, asked: Key, choice: Choice) -> None:
    """Give a choice to the stores, unless they hold it already."""
    known = kept.choices.get(asked.digest)
    if known is not None and _confirms(choice, known):
        _tell("confirmed", asked)
        return
    kept.choices[asked.digest] = choice
    # The fields are there again for people who list entries; who reads a choice reads the blob, which has a digest.
    kept.cache.publish(asked, {BLOB: to_bytes(choice)}, metadata=asdict(choice))
    _tell("written", asked)


def _confirms(choice: Choice, known: Choice) -> bool:
    pairs = (choice.fused_s, known.fused_s), (choice.native_s, known.native_s)
    return choice.native is known.native and all(a < FACTOR * b and b < FACTOR * a for a, b in pairs)


def find(kept: Keeper, asked: Key) -> Choice | None:
    """The choice that the stores hold, if any. Waits for them."""
    found = kept.choices.get(asked.digest)
    if found is not None:
        _tell("found", asked)
        return found
    # Not `lookup`: hits and misses are counted for regions, whose misses cost a compilation.
    entry = kept.cache.peek(asked)
    if not isinstance(entry, Entry):
        _tell(entry.reason, asked)
        return None
    try:
        found = kept.choices[asked.digest] = from_bytes(entry.blobs.get(BLOB, b""))
    except Absurd as why:
        _tell("absurd", asked, entry.tier, str(why))
        return None
    _tell("found", asked, entry.tier)
    return found


def _tell(outcome: str, asked: Key | None = None, tier: str = "", detail: str = "") -> None:
    LOG.count(f"choice {outcome}")
    LOG.emit("cache-choice", outcome=outcome, key=asked.digest if asked else "", tier=tier, detail=detail)
