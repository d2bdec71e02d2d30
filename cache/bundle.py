"""Whole caches: what is in them, whether it is sound, and bundles that carry entries to hosts without a network.

A bundle is an uncompressed tar file of `ac/<hex>` and `cas/<hex>`, each entry's blobs before its manifest: a store in
one file. It is trusted like a shared store, by the signatures in it.
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace

from fused_eager.cache.key import Key
from fused_eager.cache.local import LocalStore
from fused_eager.cache.manifest import MAX_BYTES, Manifest, ManifestError, parse
from fused_eager.cache.read import Found, Policy, Refused, read_entry
from fused_eager.cache.store import NAME, Store, StoreError
from fused_eager.cache.tiers import Cache


@dataclass(frozen=True)
class Checked:
    """One entry looked at: `code` is "" for a sound one, else a row of read.MISSES."""

    where: str
    digest: str
    code: str = ""
    detail: str = ""
    manifest: Manifest | None = None


def entries(store: Store) -> Iterator[Checked]:
    """Every manifest in a store that can list (StoreError "unsupported" from one that cannot). Blobs are not read, and
    nothing is authenticated."""
    for stat in store.list("ac"):
        digest = stat.name[3:]
        try:
            data = store.get(stat.name, MAX_BYTES)
            if data is not None:  # evicted since it was listed
                yield Checked(store.label, digest, manifest=parse(data, digest))
        except (ManifestError, StoreError) as error:
            yield Checked(store.label, digest, error.code, str(error))


def verify(store: Store, policy: Policy) -> Iterator[Checked]:
    """Reads every entry of a store as a lookup would, digests and all; changes nothing."""
    for checked in entries(store):
        if checked.manifest is not None:
            found = _read(store, checked.manifest.key, policy)
            if isinstance(found, Refused):
                checked = replace(checked, code=found.code, detail=found.detail)
        yield checked


def find(store: Store, prefix: str) -> list[Manifest]:
    """The manifests whose key digests start with `prefix`."""
    return [c.manifest for c in entries(store) if c.manifest is not None and c.digest.startswith(prefix)]


def export_bundle(
    store: Store, policy: Policy, path: str | os.PathLike[str], only: Container[str] | None = None
) -> int:
    """Writes the sound entries of a store (those whose digests are in `only`, if given) and returns how many. The file
    appears when it is whole. Raises OSError, which names `path`, and StoreError."""
    count = 0
    written: set[str] = set()
    tmp = f"{os.fspath(path)}.{os.getpid()}.tmp"
    try:
        with tarfile.open(tmp, "w") as tar:
            for checked in entries(store):
                if checked.manifest is None or (only is not None and checked.digest not in only):
                    continue
                found = _read(store, checked.manifest.key, policy)
                if isinstance(found, Found):
                    for name, data in {**found.stored, f"ac/{checked.digest}": found.manifest_bytes}.items():
                        if name not in written:
                            written.add(name)
                            member = tarfile.TarInfo(name)  # no owner, no time: equal entries give equal bundles
                            member.size = len(data)
                            tar.addfile(member, io.BytesIO(data))
                    count += 1
        os.replace(tmp, path)
    except OSError as error:
        # only this file raises it, stores raise their own; nobody has heard of `tmp`, or can find it any more
        raise OSError(error.errno, error.strerror or str(error), os.fspath(path)) from error
    finally:
        if os.path.exists(tmp):
            os.unlink(tmp)
    return count


def import_bundle(cache: Cache, path: str | os.PathLike[str], *, allow_unsigned: bool = False) -> list[Checked]:
    """Adopts the sound entries of a bundle into every tier of `cache`; flush it after. Entries for other machines too:
    a shared store may serve those. Says of each entry what became of it.

    Raises OSError and tarfile.TarError for a file that is no bundle: one that has something in it, and nothing of a
    cache's, is none. Takes the bundle's size again in temporary files.
    """
    results = []
    with tempfile.TemporaryDirectory(prefix="fused-eager-import-") as folder:
        store = LocalStore(folder, max_bytes=1 << 62, label=os.fspath(path))
        any_fits = False
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                # only names that a store can hold, only plain files of bounded size: a tar may hold anything
                fits = member.isreg() and member.size <= cache.max_entry_bytes
                if fits and NAME.fullmatch(member.name) and not member.name.startswith("lease/"):
                    any_fits = True
                    stream = tar.extractfile(member)
                    if stream is not None:
                        store.put(member.name, stream.read())
            if tar.getmembers() and not any_fits:
                raise tarfile.ReadError("no entries in it")
        policy = Policy(cache.keyring, not allow_unsigned, None, None, 0, cache.max_entry_bytes)
        for checked in entries(store):
            if checked.manifest is not None:
                found = _read(store, checked.manifest.key, policy)
                if isinstance(found, Found):
                    cache.adopt(found)
                else:
                    checked = replace(checked, code=found.code, detail=found.detail)
            results.append(checked)
    return results


def _read(store: Store, key: Key, policy: Policy) -> Found | Refused:
    try:
        return read_entry(store, key, policy)
    except StoreError as error:
        return Refused(error.code, str(error))
