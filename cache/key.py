"""A key: everything that a result depends on as named parts, and the sha256 of their canonical bytes.

The parts stay with the key, so that "why did this miss?" has an answer in words.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from fused_eager.cache.encode import Unencodable, encode_frozen, freeze, from_json, to_json

DOMAIN = b"fused-eager/key/1\0"  # no other hash or signature of this project starts so
_ABSENT = object()


def json_text(form: Any) -> str:
    """JSON in one spelling."""
    return json.dumps(form, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


class Key:
    """Named parts and their digest. Immutable; equal when the digests are equal.

    `Key({"region": ..., "jax": "0.10.2"})` raises Unencodable, naming the path, for a part without canonical form.
    The digest is computed when first asked for: a caller with a cheaper identity of its own never pays for it.
    """

    __slots__ = ("_digest", "_encoded", "_text", "parts")

    parts: Mapping[str, Any]
    _digest: str
    _encoded: bytes
    _text: str

    def __init__(self, parts: Mapping[str, Any]) -> None:
        if not isinstance(parts, Mapping):
            raise Unencodable("", f"key parts are a mapping, not {type(parts).__name__}")
        object.__setattr__(self, "parts", freeze(parts))
        for name, empty in (("_digest", ""), ("_encoded", b""), ("_text", "")):
            object.__setattr__(self, name, empty)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Key cannot be changed")

    @property
    def digest(self) -> str:
        """64 hex digits: the key's name in every store."""
        if not self._digest:
            object.__setattr__(self, "_digest", hashlib.sha256(DOMAIN + self.encoded).hexdigest())
        return self._digest

    @property
    def encoded(self) -> bytes:
        """The canonical bytes of the parts."""
        if not self._encoded:
            object.__setattr__(self, "_encoded", encode_frozen(self.parts))
        return self._encoded

    @property
    def text(self) -> str:
        """The JSON form as text in one spelling: members sorted, no spaces. Equal texts mean equal keys."""
        if not self._text:
            object.__setattr__(self, "_text", json_text(self.to_json()))
        return self._text

    def to_json(self) -> dict[str, Any]:
        """The parts as a JSON object; `Key.from_json` gives an equal key back."""
        return {name: to_json(value) for name, value in self.parts.items()}

    @classmethod
    def from_json(cls, form: Any) -> Key:
        if type(form) is not dict:
            raise Unencodable("", "key parts are a JSON object")
        return cls({name: from_json(value, name) for name, value in form.items()})

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Key) else NotImplemented

    def __hash__(self) -> int:
        return int(self.digest[:15], 16)

    def __repr__(self) -> str:
        return f"Key({self.digest[:12]}, parts={list(self.parts)})"

    def __reduce__(self) -> tuple[Any, ...]:
        # a mappingproxy cannot be copied between processes; the JSON form can
        return (Key.from_json, (self.to_json(),))


@dataclass(frozen=True)
class Difference:
    """One place where two keys differ. `before` or `after` is None in words when that side has nothing there."""

    path: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        if self.before is None:
            return f"{self.path} was added, {self.after}"
        if self.after is None:
            return f"{self.path} was removed, {self.before}"
        return f"{self.path} changed, {self.before} -> {self.after}"


def differences(a: Key, b: Key) -> Iterator[Difference]:
    """Every place where the keys differ, in the order of the parts' names; nothing for equal keys."""
    return _walk("", a.parts, b.parts)


def explain(a: Key, b: Key, limit: int = 20) -> list[str]:
    """The differences from `a` to `b` in words; [] for equal keys.

    One difference reads "only region.inputs[3].shape[0] changed, 31 -> 32". Beyond `limit` the rest is counted.
    """
    found = list(differences(a, b))
    if len(found) == 1:
        return [f"only {found[0]}"]
    words = [str(difference) for difference in found[:limit]]
    return words + [f"and {len(found) - limit} more differences"] if len(found) > limit else words


def nearest(key: Key, others: Iterable[Key], limit: int = 1000) -> Key | None:
    """The key among the first `limit` others with the fewest differences from `key` (the earliest of equals)."""
    best: Key | None = None
    fewest = 0
    for other in islice(others, limit):
        # counting stops at the best so far: a far key costs no more than a near one
        count = sum(1 for _ in islice(differences(other, key), fewest)) if best is not None else fewest
        if best is None:
            best, fewest = other, sum(1 for _ in differences(other, key))
        elif count < fewest:
            best, fewest = other, count
    return best


def _walk(path: str, a: Any, b: Any) -> Iterator[Difference]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        join = f"{path}." if path else ""
        for name in sorted(a.keys() | b.keys()):
            yield from _walk(join + name, a.get(name, _ABSENT), b.get(name, _ABSENT))
    elif type(a) is tuple and type(b) is tuple:
        yield from _sequences(path, a, b)
    elif a is _ABSENT or b is _ABSENT or encode_frozen(a) != encode_frozen(b):
        named = a is not _ABSENT and b is not _ABSENT and type(a) is not type(b)
        yield Difference(path, _words(a, named), _words(b, named))


def _sequences(path: str, a: tuple[Any, ...], b: tuple[Any, ...]) -> Iterator[Difference]:
    if len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _walk(f"{path}[{i}]", x, y)
        return
    # something was put in or taken out: drop what agrees at both ends, or every later item would seem changed
    x, y = [encode_frozen(item) for item in a], [encode_frozen(item) for item in b]
    short = min(len(x), len(y))
    head = next((i for i in range(short) if x[i] != y[i]), short)
    tail = next((i for i in range(short - head) if x[-1 - i] != y[-1 - i]), short - head)
    yield Difference(f"len({path})", str(len(a)), str(len(b)))
    for i in range(head, max(len(a), len(b)) - tail):
        before = a[i] if i < len(a) - tail else _ABSENT
        after = b[i] if i < len(b) - tail else _ABSENT
        yield from _walk(f"{path}[{i}]", before, after)


def _thawed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _thawed(item) for name, item in value.items()}
    return tuple(_thawed(item) for item in value) if type(value) is tuple else value


def _words(value: Any, with_type: bool) -> str | None:
    if value is _ABSENT:
        return None
    try:
        text = repr(_thawed(value))
    except ValueError:  # Python refuses to write integers of thousands of digits in decimal
        text = str(to_json(value))
    text = text if len(text) <= 80 else text[:77] + "..."
    kind = "mapping" if isinstance(value, Mapping) else type(value).__name__
    return f"{kind} {text}" if with_type and value is not None else text
