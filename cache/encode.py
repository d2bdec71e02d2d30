"""Canonical bytes for plain values: equal values give equal bytes, different values give different bytes.

Everything that is hashed or signed goes through `encode`. The code is prefix-free (every item carries its own type and
length), so no two values share an encoding and no separator can be forged by a value's content. Types are compared
exactly: a subclass (torch.Size, numpy.float64, an IntEnum) could carry more meaning than its base, so it is refused
with the path to it rather than guessed at.

docs/cache_format.md states the format for other implementations.
"""

from __future__ import annotations

import base64
import binascii
import functools
import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

Value = None | bool | int | float | str | bytes | tuple[Any, ...] | list[Any] | Mapping[str, Any]

MAX_DEPTH = 100  # regions are flat lists; deeper means a cycle or an attack on the reader's stack
_JSON_INT = 2**53  # beyond this other languages' JSON readers round


class Unencodable(TypeError):
    """A value has no canonical form. `path` says where it is: "region.inputs[3].shape[0]"."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path or 'the value'}: {why}")
        self.path = path
        self.why = why


def freeze(value: Any, path: str = "", _depth: int = 0) -> Any:
    """A copy of `value` that nobody can change: lists become tuples, mappings read-only and sorted by key.

    Raises Unencodable naming the path to the first value that is not None, bool, int, float, str, bytes, tuple, list
    or a mapping with str keys.
    """
    kind = type(value)
    if value is None or kind is bool or kind is int or kind is float or kind is bytes:
        return value
    if kind is str:
        _utf8(value, path)
        return value
    if _depth >= MAX_DEPTH:
        raise Unencodable(path, f"nested deeper than {MAX_DEPTH}")
    if kind is tuple or kind is list:
        return tuple(freeze(item, f"{path}[{i}]", _depth + 1) for i, item in enumerate(value))
    if isinstance(value, Mapping):
        for name in value:
            if type(name) is not str:
                raise Unencodable(path, f"mapping key {name!r:.60} is {type(name).__name__}, not str")
        # UTF-8 order equals code point order, so this is the order of the encoded keys
        names = sorted(value, key=lambda name: _utf8(name, path))
        join = f"{path}." if path else ""
        return MappingProxyType({name: freeze(value[name], f"{join}{name}", _depth + 1) for name in names})
    raise Unencodable(path, f"{kind.__module__}.{kind.__qualname__} has no canonical form")


def encode(value: Any) -> bytes:
    """The canonical bytes of `value`; raises Unencodable as `freeze` does."""
    return encode_frozen(freeze(value))


def encode_frozen(value: Any) -> bytes:
    """`encode` for what `freeze` returned: saves checking a whole region again."""
    out: list[bytes] = []
    _write(value, out)
    return b"".join(out)


def encode_members(members: Mapping[str, bytes]) -> bytes:
    """`encode` of a mapping whose values are encoded already."""
    names = sorted(members, key=lambda name: _utf8(name, ""))
    return _head(b"M", len(names)) + b"".join(_text(name) + members[name] for name in names)


def _write(value: Any, out: list[bytes]) -> None:
    kind = type(value)
    if kind is str:
        out.append(_text(value) if len(value) < 100 else _text.__wrapped__(value))
    elif kind is int:
        out.append(_int(value) if -_JSON_INT < value < _JSON_INT else _int.__wrapped__(value))
    elif kind is tuple:
        out.append(_head(b"L", len(value)))
        for item in value:
            _write(item, out)
    elif value is None:
        out.append(_head(b"N", 0))
    elif kind is bool:
        out.append(_head(b"B", 1) + (b"\x01" if value else b"\x00"))
    elif kind is float:
        out.append(_head(b"F", 8) + struct.pack(">d", value))
    elif kind is bytes:
        out.append(_head(b"Y", len(value)) + value)
    else:
        out.append(_head(b"M", len(value)))
        for name, item in value.items():
            _write(name, out)
            _write(item, out)


# a region says the same few names and sizes thousands of times; each cache sees one type, as 1, 1.0 and True are
# equal as dictionary keys
@functools.lru_cache(4096)
def _text(value: str) -> bytes:
    data = value.encode()
    return _head(b"S", len(data)) + data


@functools.lru_cache(4096)
def _int(value: int) -> bytes:
    # minimal two's complement; zero takes one byte
    data = value.to_bytes((value if value >= 0 else ~value).bit_length() // 8 + 1, "big", signed=True)
    return _head(b"I", len(data)) + data


def _head(tag: bytes, count: int) -> bytes:
    return tag + count.to_bytes(8, "big")


def _utf8(text: str, path: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise Unencodable(path, f"{text!r:.60} holds a lone surrogate, which has no UTF-8 form") from None


def to_json(value: Any) -> Any:
    """The JSON form of a value, exact in both directions: `from_json(to_json(v))` encodes as `v` does.

    What JSON can say exactly stays readable (null, true, small integers, strings, arrays); the rest is an object with
    one member: {"f": 16 hex digits of the float's bits}, {"i": hex of a big integer}, {"b": base64}, {"m": mapping}.
    """
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -_JSON_INT < value < _JSON_INT else {"i": hex(value)}
    if kind is float:
        return {"f": struct.pack(">d", value).hex()}
    if kind is bytes:
        return {"b": base64.b64encode(value).decode()}
    if kind is tuple or kind is list:
        return [to_json(item) for item in value]
    return {"m": {name: to_json(item) for name, item in value.items()}}


def from_json(form: Any, path: str = "", _depth: int = 0) -> Any:
    """The value of a JSON form; raises Unencodable with the path to whatever is not one."""
    kind = type(form)
    if form is None or kind is bool or kind is int:
        return form
    if kind is str:
        _utf8(form, path)
        return form
    if _depth >= MAX_DEPTH:
        raise Unencodable(path, f"nested deeper than {MAX_DEPTH}")
    if kind is list:
        return tuple(from_json(item, f"{path}[{i}]", _depth + 1) for i, item in enumerate(form))
    if kind is dict and len(form) == 1:
        ((tag, body),) = form.items()
        if tag == "m" and type(body) is dict:
            join = f"{path}." if path else ""
            return {name: from_json(item, f"{join}{name}", _depth + 1) for name, item in body.items()}
        if type(body) is str and tag in _SCALARS:
            try:
                return _SCALARS[tag](body)
            except (ValueError, binascii.Error, struct.error):
                raise Unencodable(path, f"not the JSON form of a value: {tag}={body!r:.60}") from None
    raise Unencodable(path, f"{form!r:.60} is not the JSON form of a value")


def _float(text: str) -> float:
    if len(text) != 16:
        raise ValueError("a float is 16 hex digits")
    (found,) = struct.unpack(">d", bytes.fromhex(text))
    return float(found)


_SCALARS: dict[str, Callable[[str], Any]] = {
    "f": _float,
    "i": lambda text: int(text, 16),
    "b": lambda text: base64.b64decode(text, validate=True),
}
