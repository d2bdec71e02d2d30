"""A content-addressed, verified, shared cache of bytes under keys that can be explained.

    cache = open_cache("redis://host", keys=open("keys", "rb").read())
    key = Key({"region": ..., "jax": "0.10.2", ...})
    got = cache.fetch(key, wait_s=60)              # Entry | Lead | Miss; or lookup() and flight(), which never wait
    if isinstance(got, Entry):
        load(got.blobs["executable"])
    else:
        lead = got if isinstance(got, Lead) else None
        cache.publish(key, {"executable": compile()}, metadata={"choice": "xla"}, lead=lead)

Knows bytes only: neither torch nor jax nor the runtime. Nothing that a disk, a network or another writer does raises
into the caller.
"""

from __future__ import annotations

from fused_eager.cache.encode import Unencodable
from fused_eager.cache.extras import MissingExtra
from fused_eager.cache.key import Difference, Key, differences, explain, nearest
from fused_eager.cache.lease import Follow, Lead
from fused_eager.cache.local import LocalStore, default_root
from fused_eager.cache.manifest import Blob, Manifest, ManifestError, Origin
from fused_eager.cache.memory import MemoryStore
from fused_eager.cache.read import Entry, Miss, TierMiss
from fused_eager.cache.sign import Keyring, KeyTextError, generate, load_keyring
from fused_eager.cache.store import Stat, Store, StoreError
from fused_eager.cache.tier import Tier
from fused_eager.cache.tiers import Cache, Published
from fused_eager.cache.url import open_cache, open_store

__all__ = [
    "Blob",
    "Cache",
    "Difference",
    "Entry",
    "Follow",
    "Key",
    "KeyTextError",
    "Keyring",
    "Lead",
    "LocalStore",
    "Manifest",
    "ManifestError",
    "MemoryStore",
    "Miss",
    "MissingExtra",
    "Origin",
    "Published",
    "Stat",
    "Store",
    "StoreError",
    "Tier",
    "TierMiss",
    "Unencodable",
    "default_root",
    "differences",
    "explain",
    "generate",
    "load_keyring",
    "nearest",
    "open_cache",
    "open_store",
]
