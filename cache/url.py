"""From text to tiers: `open_store(url)`, and `open_cache("url,url")` for a whole cache.

/path, file:///path        a directory, shared (NFS and the like)
http://, https://          a server in the layout of Bazel's remote cache
redis://, rediss://, unix: a Redis server
anything else with ://     fsspec: s3://bucket/folder, gs://, abfs://, sftp://, memory://, ...
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from fused_eager.cache.local import LocalStore
from fused_eager.cache.manifest import Origin
from fused_eager.cache.memory import MemoryStore
from fused_eager.cache.sign import load_keyring
from fused_eager.cache.store import Store
from fused_eager.cache.tier import Tier
from fused_eager.cache.tiers import Cache, Observer

SHARED_BYTES = 64 << 30  # bound of a shared directory


def open_store(url: str, *, timeout_s: float = 5.0) -> Store:
    """The store at a URL. Connects to nothing yet: a server that is down is found out by use.

    Raises ValueError for text that is no store, and MissingExtra naming the extra for a library that is missing.
    """
    scheme, separator, _ = url.partition("://")
    if not separator:
        if not os.path.isabs(url):
            raise ValueError(f"neither a URL nor an absolute path: {redacted(url)!r}")
        scheme, url = "file", f"file://{url}"
    opener = _OPENERS.get(scheme.lower(), _fsspec)
    return opener(url, timeout_s, redacted(url))


def _file(url: str, timeout_s: float, label: str) -> Store:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ValueError(f"file:// needs an absolute path: {label}")
    return LocalStore(unquote(parts.path), max_bytes=SHARED_BYTES, private=False, lock_wait_s=timeout_s, label=label)


def _http(url: str, timeout_s: float, label: str) -> Store:
    from fused_eager.cache.http import HttpStore

    return HttpStore(url, timeout_s=timeout_s, label=label)


def _redis(url: str, timeout_s: float, label: str) -> Store:
    from fused_eager.cache.redis import RedisStore

    return RedisStore(url, timeout_s=timeout_s, label=label)


def _fsspec(url: str, timeout_s: float, label: str) -> Store:
    from fused_eager.cache.fs import FsspecStore

    return FsspecStore(url, timeout_s=timeout_s, label=label)


_OPENERS: dict[str, Callable[[str, float, str], Store]] = {
    "file": _file,
    "http": _http,
    "https": _http,
    "redis": _redis,
    "rediss": _redis,
    "unix": _redis,
}


def open_cache(
    urls: str = "",
    *,
    local_dir: str | os.PathLike[str] | None = None,
    local_bytes: int = 8 << 30,
    memory_bytes: int = 256 << 20,
    keys: bytes = b"",
    allow_unsigned: bool = False,
    timeout_s: float = 5.0,
    origin: Origin | None = None,
    versions: Mapping[str, str] | None = None,
    on_event: Observer | None = None,
    **options: Any,
) -> Cache:
    """Memory, the local disk (`local_bytes=0`: none), then the comma-separated shared stores, fastest first.

    `keys` is a key text (sign.load_keyring). Without a key that can sign, shared stores are only read; without any,
    nothing in them is believed, unless `allow_unsigned` says that everybody who can write there is trusted as much as
    the user's own account. "off" for `urls` is a cache that always misses. `options` go to Cache.
    """
    given = [url.strip() for url in urls.split(",") if url.strip()]
    tiers: list[Tier] = []
    if given != ["off"]:
        if memory_bytes:
            tiers.append(Tier(MemoryStore(memory_bytes)))
        if local_bytes:
            tiers.append(Tier(LocalStore(local_dir, max_bytes=local_bytes)))
        for url in given:
            store = open_store(url, timeout_s=timeout_s)
            tiers.append(Tier(store, shared=True, signed=not allow_unsigned, timeout_s=timeout_s))
    return Cache(tiers, keyring=load_keyring(keys), origin=origin, versions=versions, on_event=on_event, **options)


def redacted(url: str) -> str:
    """The URL without its password and query, for labels, events and messages."""
    try:
        parts = urlsplit(url)
        host = parts.netloc.rsplit("@", 1)[-1]
        user = f"{unquote(parts.username)}@" if parts.username else ""
        return urlunsplit((parts.scheme, user + host, parts.path, "", ""))
    except ValueError:
        return "(no URL)"
