"""Listing, verifying and carrying whole caches."""

from __future__ import annotations

import io
import tarfile
from collections import Counter

import pytest
from fused_eager.cache.bundle import entries, export_bundle, find, import_bundle, verify
from fused_eager.cache.key import Key
from fused_eager.cache.local import LocalStore
from fused_eager.cache.manifest import Origin
from fused_eager.cache.memory import MemoryStore
from fused_eager.cache.sign import generate, load_keyring
from fused_eager.cache.tiers import Cache, Entry, Tier

RING = load_keyring(generate("hmac-sha256")["writer"].encode())
HERE = Origin("h", "cpu", ("avx2",))


def cache_on(*stores, keyring=RING, origin=HERE):
    return Cache([Tier(store) for store in stores], keyring=keyring, origin=origin)


@pytest.fixture
def full(tmp_path):
    cache = cache_on(LocalStore(tmp_path / "a"))
    for n in range(10):
        assert not cache.publish(Key({"n": n}), {"x": bytes([n]) * 1000, "same": b"in all"}).refused
    return cache


def test_entries_and_find(full, tmp_path):
    store = full.tiers[0].store
    assert {c.digest for c in entries(store)} == {Key({"n": n}).digest for n in range(10)}
    key = Key({"n": 3})
    assert [m.key for m in find(store, key.digest[:12])] == [key] and find(store, "not hex") == []
    (tmp_path / "a" / "ac" / key.digest).write_bytes(b"garbage")
    assert Counter(c.code for c in entries(store)) == {"": 9, "not-json": 1}


def test_verify_finds_what_a_lookup_would(full, tmp_path):
    tier = full.tiers[0]
    assert all(c.code == "" for c in verify(tier.store, full.policy(tier)))
    blob = next(c for c in entries(tier.store)).manifest.blobs[0]
    (tmp_path / "a" / "cas" / blob.sha256).write_bytes(b"x")
    assert Counter(c.code for c in verify(tier.store, full.policy(tier))) == {"": 9, "blob-damaged": 1}
    other = cache_on(tier.store, origin=Origin("h", "gpu", ()))
    assert {c.code for c in verify(tier.store, other.policy(tier))} == {"foreign-machine"}
    assert not list((tmp_path / "a" / "quarantine").iterdir())


def test_a_bundle_carries_entries_with_their_signatures(full, tmp_path):
    tier = full.tiers[0]
    assert export_bundle(tier.store, full.policy(tier), tmp_path / "one.tar") == 10
    assert export_bundle(tier.store, full.policy(tier), tmp_path / "few.tar", only={Key({"n": 1}).digest}) == 1
    there = cache_on(MemoryStore(), LocalStore(tmp_path / "b"))
    shared = MemoryStore(label="shared")
    there = Cache([*there.tiers, Tier(shared, shared=True)], keyring=RING, origin=HERE)
    assert all(c.code == "" for c in import_bundle(there, tmp_path / "one.tar")) and there.flush(30)
    for n in range(10):
        for store in (there.tiers[1].store, shared):
            got = Cache([Tier(store, signed=True)], keyring=RING, origin=HERE).lookup(Key({"n": n}))
            assert isinstance(got, Entry) and got.blobs == {"x": bytes([n]) * 1000, "same": b"in all"}
    with tarfile.open(tmp_path / "one.tar") as tar:
        names = tar.getnames()
    assert len(names) == len(set(names)) == 21  # ten manifests, ten blobs, and the one that all share


def test_a_bundle_is_believed_by_its_signatures(full, tmp_path):
    tier = full.tiers[0]
    export_bundle(tier.store, full.policy(tier), tmp_path / "one.tar")
    stranger = cache_on(LocalStore(tmp_path / "b"), keyring=load_keyring(b""))
    assert {c.code for c in import_bundle(stranger, tmp_path / "one.tar")} == {"unknown-signer"}
    assert list(entries(stranger.tiers[0].store)) == []
    assert {c.code for c in import_bundle(stranger, tmp_path / "one.tar", allow_unsigned=True)} == {""}


def test_hostile_bundles(full, tmp_path):
    bad = tmp_path / "bad.tar"
    with tarfile.open(bad, "w") as tar:
        for name in (
            "../../escape",
            "/abs",
            "ac/short",
            "tmp/x",
            "ac/" + "a" * 64,
            "cas/" + "b" * 64,
            "lease/" + "c" * 64,
        ):
            member = tarfile.TarInfo(name)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"evil"))
        link = tarfile.TarInfo("cas/" + "d" * 64)
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert [(c.digest, c.code) for c in import_bundle(full, bad)] == [("a" * 64, "not-json")]
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    (tmp_path / "no.tar").write_bytes(b"no tar at all" * 100)
    with pytest.raises(tarfile.TarError):
        import_bundle(full, tmp_path / "no.tar")
