"""Reading one entry from one store: authenticate the manifest, verify the digests, only then hand out bytes.

Every way in which an entry can be wrong is a row of MISSES. Nothing here writes to the store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fused_eager.cache.key import Key
from fused_eager.cache.manifest import CODES as MANIFEST_CODES
from fused_eager.cache.manifest import MAX_BYTES, Blob, Manifest, ManifestError, Origin, parse
from fused_eager.cache.pack import PackError, unpack
from fused_eager.cache.sign import REFUSALS, Keyring
from fused_eager.cache.store import CODES as STORE_CODES
from fused_eager.cache.store import Store, StoreError

MISSES = {
    "absent": "nothing under this key",
    "foreign-machine": "made on a machine with another device kind or other CPU features",
    "too-old": "older than the age limit of this cache",
    "blob-missing": "the manifest is there, a blob is not: evicted, or not yet written",
    "blob-damaged": "a blob's bytes do not have the digest or size that the manifest says",
    "blob-undecodable": "a blob's bytes are as written, but do not decompress to what the manifest says",
    "codec-missing": "compressed with a library that is not installed here",
    "blobs-too-large": "the manifest promises more bytes than this reader takes",
    "off": "the cache has no tiers",
    **MANIFEST_CODES,
    **REFUSALS,
    **STORE_CODES,
}

# damage that is damage for every reader: the local tier moves it to quarantine. An entry that only this reader
# cannot use (other keys, another machine, a later format) stays, and is overwritten when this process publishes.
DAMAGE = frozenset(
    {"too-large", "not-json", "not-a-manifest", "bad-field", "key-mismatch", "blob-damaged", "blob-undecodable"}
)


@dataclass(frozen=True)
class Policy:
    """What a reader accepts. `signed`: only manifests that the keyring vouches for. `origin` None: from any machine.
    `max_age_ms` None: of any age; a creation time in the future counts as now."""

    keyring: Keyring
    signed: bool
    origin: Origin | None
    max_age_ms: int | None
    now_ms: int
    max_bytes: int


@dataclass(frozen=True)
class Found:
    """A verified entry, and the bytes as stored, for the faster tiers."""

    manifest: Manifest
    manifest_bytes: bytes
    blobs: Mapping[str, bytes]
    stored: Mapping[str, bytes]  # by name in the store


@dataclass(frozen=True)
class Refused:
    """Why there is no entry. `culprit` is the damaged name in the store, where one is."""

    code: str
    detail: str = ""
    culprit: str = ""


@dataclass(frozen=True)
class Entry:
    """A verified hit: the blobs by name, as they were published, and the tier that had them."""

    key: Key
    manifest: Manifest
    blobs: Mapping[str, bytes]
    tier: str
    seconds: float

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.manifest.metadata


@dataclass(frozen=True)
class TierMiss:
    tier: str
    code: str
    detail: str = ""


@dataclass(frozen=True)
class Miss:
    """No entry. `reason` is a row of MISSES (or of lease.WAITS after waiting): the first tier's that is not
    plain absence."""

    key: Key
    reason: str
    tiers: tuple[TierMiss, ...] = ()
    seconds: float = 0.0


def read_entry(store: Store, key: Key, policy: Policy) -> Found | Refused:
    """Raises StoreError when the store fails, and nothing else."""
    name = f"ac/{key.digest}"
    try:
        data = store.get(name, MAX_BYTES)
    except StoreError as error:
        if error.code != "too-large":
            raise
        return Refused("too-large", str(error), name)
    if data is None:
        return Refused("absent")
    try:
        manifest = parse(data, key)
    except ManifestError as error:
        return Refused(error.code, str(error), name if error.code in DAMAGE else "")
    refused = _refused(manifest, policy)
    if refused is not None:
        return refused
    blobs: dict[str, bytes] = {}
    stored: dict[str, bytes] = {}
    for blob in manifest.blobs:
        got = _blob(store, blob, name)
        if isinstance(got, Refused):
            return got
        stored[f"cas/{blob.sha256}"], blobs[blob.name] = got
    return Found(manifest, data, blobs, stored)


def _refused(manifest: Manifest, policy: Policy) -> Refused | None:
    refusal = policy.keyring.refusal(manifest) if policy.signed else ""
    if refusal:
        signature = manifest.signature
        return Refused(refusal, f"by {signature.algorithm[:20]} {signature.key_id[:20]}" if signature else "")
    foreign = manifest.origin.foreign_to(policy.origin) if policy.origin is not None else ""
    if foreign:
        return Refused("foreign-machine", foreign)
    age = policy.now_ms - manifest.created
    if policy.max_age_ms is not None and age > policy.max_age_ms:
        return Refused("too-old", f"{age / 1000:.0f} s old")
    if sum(max(blob.size, blob.raw_size) for blob in manifest.blobs) > policy.max_bytes:
        return Refused("blobs-too-large")
    return None


def _blob(store: Store, blob: Blob, manifest_name: str) -> tuple[bytes, bytes] | Refused:
    name = f"cas/{blob.sha256}"
    try:
        data = store.get(name, blob.size)
    except StoreError as error:
        if error.code != "too-large":
            raise
        return Refused("blob-damaged", f"{blob.name}: longer than promised", name)
    if data is None:
        return Refused("blob-missing", blob.name)
    if len(data) != blob.size or hashlib.sha256(data).hexdigest() != blob.sha256:
        return Refused("blob-damaged", f"{blob.name}: {len(data)} bytes, {blob.size} promised", name)
    try:
        raw = unpack(blob.compression, data, blob.raw_size)
    except PackError as error:
        if error.code == "codec-missing":
            return Refused("codec-missing", str(error))
        return Refused("blob-undecodable", f"{blob.name}: {error}", manifest_name)
    if hashlib.sha256(raw).hexdigest() != blob.raw_sha256:
        return Refused("blob-undecodable", f"{blob.name}: another content", manifest_name)
    return data, raw
