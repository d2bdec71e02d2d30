"""The manifest `ac/<key>`: what an entry is, which blobs it has, where it came from, and who vouches for it.

A manifest arrives from disks and networks that nobody guards, so `parse` checks every field and raises nothing but
ManifestError, with a code that the counters use. What a reader acts on is the parsed Manifest, and what is signed is
the canonical encoding of that same Manifest: JSON spelling (spaces, escapes, order) carries no meaning.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NoReturn

from fused_eager.cache.encode import Unencodable, encode, encode_members, freeze, from_json, to_json
from fused_eager.cache.key import Key, json_text
from fused_eager.cache.pack import CODECS

FORMAT = 1
DOMAIN = b"fused-eager/manifest/1\0"
MAX_BYTES = 16 << 20  # of a manifest; a region of thousands of nodes takes about one
MAX_BLOBS = 64
_LIMIT = 2**53  # integers that every JSON reader holds exactly
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
_HEX64 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_FIELDS = frozenset({"format", "key", "parts", "blobs", "versions", "origin", "created", "metadata"})
_BLOB_FIELDS = frozenset({"name", "sha256", "size", "compression", "raw_sha256", "raw_size"})
_ORIGIN_FIELDS = frozenset({"host_class", "device_kind", "cpu_features"})
_SIGNATURE_FIELDS = frozenset({"algorithm", "key_id", "value"})

CODES = {
    "too-large": "larger than any manifest may be",
    "not-json": "not JSON text in UTF-8, or a member twice in one object",
    "not-a-manifest": "JSON, but not an object with a format number",
    "future-format": "written by a later version of the format",
    "bad-field": "a field is missing, unknown, or not of its type and range",
    "key-mismatch": "the parts do not hash to the key, or the key is not the one asked for",
}


class ManifestError(Exception):
    """Bytes that are no manifest we can use. `code` is a row of CODES."""

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(f"{code}: {detail or CODES[code]}")
        self.code = code


@dataclass(frozen=True)
class Blob:
    """One content-addressed file. `sha256` and `size` are of the stored bytes, `raw_*` of the content they hold."""

    name: str
    sha256: str
    size: int
    compression: str
    raw_sha256: str
    raw_size: int


@dataclass(frozen=True)
class Origin:
    """The machine an entry was made on. Entries never cross between different device kinds or CPU features."""

    host_class: str = ""
    device_kind: str = ""
    cpu_features: tuple[str, ...] = ()

    def foreign_to(self, here: Origin) -> str:
        """Why an entry from this machine must not run `here`; "" when it may."""
        if self.device_kind != here.device_kind:
            return f"made for device {self.device_kind!r:.60}, this is {here.device_kind!r:.60}"
        # equality, not subset: code generation is tuned to all features, and a promise that is simple can be kept
        theirs, ours = set(self.cpu_features), set(here.cpu_features)
        if theirs != ours:
            return f"CPU features differ: there only {sorted(theirs - ours)[:5]}, here only {sorted(ours - theirs)[:5]}"
        return ""


@dataclass(frozen=True)
class Signature:
    """`value` over the manifest's canonical bytes, by the key whose id is `key_id`."""

    algorithm: str
    key_id: str
    value: bytes


@dataclass(frozen=True)
class Manifest:
    """An entry's description. `created` is in milliseconds since 1970 UTC on the writer's clock: for people and age
    limits, never for correctness. `metadata` is any small encodable mapping."""

    key: Key
    blobs: tuple[Blob, ...] = ()
    versions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    origin: Origin = Origin()
    created: int = 0
    metadata: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    signature: Signature | None = None

    def signed_bytes(self) -> bytes:
        """What a signature covers: every field but the signature, domain-separated."""
        members = {name: encode(value) for name, value in self._body(None, self.metadata).items()}
        return DOMAIN + encode_members({**members, "parts": self.key.encoded})

    def to_bytes(self) -> bytes:
        """The JSON text that is stored; `parse` gives an equal manifest back."""
        metadata = {name: to_json(value) for name, value in freeze(self.metadata, "metadata").items()}
        form: dict[str, Any] = self._body(self.key.to_json(), metadata)
        if self.signature is not None:
            value = base64.b64encode(self.signature.value).decode()
            form["signature"] = {
                "algorithm": self.signature.algorithm, "key_id": self.signature.key_id, "value": value,
            }  # fmt: skip
        return json_text(form).encode()

    def signed(self, signature: Signature | None) -> Manifest:
        return replace(self, signature=signature)

    def _body(self, parts: Any, metadata: Any) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "key": self.key.digest,
            "parts": parts,
            "blobs": [dict(vars(blob)) for blob in self.blobs],
            "versions": dict(self.versions),
            "origin": {**vars(self.origin), "cpu_features": list(self.origin.cpu_features)},
            "created": self.created,
            "metadata": metadata,
        }


def parse(data: bytes, expect: Key | str | None = None) -> Manifest:
    """The manifest in `data`, whose key, or its digest, must be `expect` when given. Raises ManifestError only."""
    if len(data) > MAX_BYTES:
        raise ManifestError("too-large")
    try:
        form = json.loads(data.decode(), object_pairs_hook=_object, parse_float=_refuse, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ManifestError("not-json", str(error)[:200]) from None
    if type(form) is not dict or type(form.get("format")) is not int:
        raise ManifestError("not-a-manifest")
    if form["format"] > FORMAT:
        raise ManifestError("future-format", f"format {form['format']:#x}, this version reads {FORMAT}")
    try:
        return _manifest(form, expect)
    except (Unencodable, RecursionError) as error:
        raise ManifestError("bad-field", str(error)[:200]) from None


def _manifest(form: dict[str, Any], expect: Key | str | None) -> Manifest:
    _members(form, _FIELDS, "manifest", optional=frozenset({"signature"}))
    if form["format"] != FORMAT:
        _bad("format")
    if type(form["key"]) is not str or not _HEX64.fullmatch(form["key"]):
        _bad("key")
    if isinstance(expect, Key) and type(form["parts"]) is dict and json_text(form["parts"]) == expect.text:
        key = expect  # the same parts, letter by letter: saves hashing a large region again
    else:
        key = Key.from_json(form["parts"])
    digest = expect.digest if isinstance(expect, Key) else expect
    if key.digest != form["key"] or digest not in (None, key.digest):
        raise ManifestError("key-mismatch")
    if type(form["blobs"]) is not list or len(form["blobs"]) > MAX_BLOBS:
        _bad("blobs")
    blobs = tuple(_blob(item, f"blobs[{i}]") for i, item in enumerate(form["blobs"]))
    if len({blob.name for blob in blobs}) != len(blobs):
        _bad("blobs: a name twice")
    origin = _members(form["origin"], _ORIGIN_FIELDS, "origin")
    features = origin["cpu_features"]
    if type(features) is not list or len(features) > 10_000:
        _bad("origin.cpu_features")
    versions = form["versions"]
    if type(versions) is not dict or len(versions) > 1000:
        _bad("versions")
    if type(form["metadata"]) is not dict:
        _bad("metadata")
    return Manifest(
        key=key,
        blobs=blobs,
        versions=freeze({name: _text(value, f"versions.{name}") for name, value in versions.items()}, "versions"),
        origin=Origin(
            _text(origin["host_class"], "origin.host_class"),
            _text(origin["device_kind"], "origin.device_kind"),
            tuple(_text(item, "origin.cpu_features") for item in features),
        ),
        created=_count(form["created"], "created"),
        metadata=freeze({k: from_json(v, f"metadata.{k}") for k, v in form["metadata"].items()}, "metadata"),
        signature=_signature(form["signature"]) if "signature" in form else None,
    )


def _blob(form: Any, path: str) -> Blob:
    _members(form, _BLOB_FIELDS, path)
    if type(form["name"]) is not str or not _NAME.fullmatch(form["name"]):
        _bad(f"{path}.name")
    for member in ("sha256", "raw_sha256"):
        if type(form[member]) is not str or not _HEX64.fullmatch(form[member]):
            _bad(f"{path}.{member}")
    if type(form["compression"]) is not str or form["compression"] not in CODECS:
        _bad(f"{path}.compression")
    for member in ("size", "raw_size"):
        _count(form[member], f"{path}.{member}")
    return Blob(**form)


def _signature(form: Any) -> Signature:
    _members(form, _SIGNATURE_FIELDS, "signature")
    try:
        value = base64.b64decode(_text(form["value"], "signature.value"), validate=True)
    except (ValueError, binascii.Error):
        _bad("signature.value")
    return Signature(_text(form["algorithm"], "signature.algorithm"), _text(form["key_id"], "signature.key_id"), value)


def _members(form: Any, names: frozenset[str], path: str, optional: frozenset[str] = frozenset()) -> dict[str, Any]:
    # an unknown member would be outside the signature, so a field can only be added with a new format number
    if type(form) is not dict or form.keys() - optional != names:
        _bad(f"{path} must have exactly the members {sorted(names)}")
    return form


def _text(value: Any, path: str) -> str:
    if type(value) is not str or len(value) > 4096:
        _bad(path)
    return str(freeze(value, path))


def _count(value: Any, path: str) -> int:
    if type(value) is not int or not 0 <= value < _LIMIT:
        _bad(path)
    return value


def _bad(path: str) -> NoReturn:
    raise ManifestError("bad-field", path)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    form = dict(pairs)
    if len(form) != len(pairs):
        raise ValueError("a member twice in one object")
    return form


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text[:30]} is not an integer")
