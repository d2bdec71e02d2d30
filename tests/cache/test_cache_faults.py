"""The fault campaign: whatever happens to the bytes, the disks, the clocks and the servers, the program gets the right
value, in time, without an exception; the fault is counted; and the next process finds a whole entry again."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from dataclasses import replace

import cache_alone
import pytest
from fused_eager.cache import manifest as m
from fused_eager.cache.guard import Breaker
from fused_eager.cache.key import Key
from fused_eager.cache.local import LocalStore
from fused_eager.cache.pack import pack
from fused_eager.cache.read import DAMAGE, MISSES
from fused_eager.cache.sign import generate, load_keyring
from fused_eager.cache.store import blob_name
from fused_eager.cache.tiers import Cache, Entry, Tier

RING = load_keyring(generate("hmac-sha256")["writer"].encode())
STRANGER = load_keyring(generate("hmac-sha256")["writer"].encode())
HERE = m.Origin("here", "cpu", ("avx2",))
PER_KIND = 30
BOMB = pack(bytes(50 << 20), "zlib")[1]


def compiled(key: Key, version: int = 1) -> dict[str, bytes]:
    """What "compiling" a key gives: right for this key and no other, compressible or not, in any version."""
    rng = random.Random(f"{key.digest} {version}")
    size = random.Random(key.digest).randrange(1, 6000)
    return {"executable": rng.randbytes(size), "text": key.digest.encode() * 40}


def right(key: Key, blobs) -> bool:
    return dict(blobs) in (compiled(key, 1), compiled(key, 2))


class World:
    """One store under attack, seen by a cache whose other tiers are empty."""

    def __init__(self, root, shared: bool, rng: random.Random) -> None:
        self.rng = rng
        self.store = LocalStore(root, private=not shared, label="store")
        self.root = root
        self.shared = shared
        self.cache = Cache(
            [Tier(self.store, shared=shared, breaker=Breaker(failures=10**9))], keyring=RING, origin=HERE
        )

    def publish(self, key, version=1):
        done = self.cache.publish(key, compiled(key, version), metadata={"version": version})
        assert self.cache.flush(30)
        return done.manifest

    def manifest(self, key):
        return self.root / "ac" / key.digest

    def blob(self, manifest):
        return self.root / "cas" / self.rng.choice(manifest.blobs).sha256

    def any_file(self, key, manifest):
        return self.rng.choice([self.manifest(key), self.blob(manifest), self.blob(manifest)])

    def forge(self, key, manifest, keyring=None):
        """Writes a manifest, signed by `keyring` when given."""
        self.manifest(key).write_bytes((keyring.sign(manifest) if keyring else manifest).to_bytes())


def bit_flip(world, key, other, manifest):
    path = world.any_file(key, manifest)
    data = bytearray(path.read_bytes())
    data[world.rng.randrange(len(data))] ^= 1 << world.rng.randrange(8)
    path.write_bytes(data)


def truncation(world, key, other, manifest):
    path = world.any_file(key, manifest)
    os.truncate(path, world.rng.randrange(path.stat().st_size))


def empty_file(world, key, other, manifest):
    os.truncate(world.any_file(key, manifest), 0)


def appended_bytes(world, key, other, manifest):
    with open(world.any_file(key, manifest), "ab") as out:
        out.write(world.rng.randbytes(world.rng.randrange(1, 5000)))


def zeroed_block(world, key, other, manifest):
    """What a file system may leave of a file after a power cut."""
    path = world.any_file(key, manifest)
    data = bytearray(path.read_bytes())
    start = world.rng.randrange(len(data))
    data[start : start + 512] = bytes(len(data[start : start + 512]))
    path.write_bytes(data)


def swapped_blobs(world, key, other, manifest):
    """Another key's good blob under this one's name: cos in the place of sin."""
    shutil.copyfile(world.blob(world.publish(other)), world.blob(manifest))


def swapped_manifest(world, key, other, manifest):
    world.publish(other)
    shutil.copyfile(world.manifest(other), world.manifest(key))


def blobs_of_another_manifest(world, key, other, manifest):
    """A manifest for this key that points to another key's blobs; its signature was for other blobs."""
    world.forge(key, replace(manifest, blobs=world.publish(other).blobs))


def wrong_signature(world, key, other, manifest):
    value = bytes(b ^ world.rng.randrange(1, 256) for b in manifest.signature.value)
    world.forge(key, manifest.signed(replace(manifest.signature, value=value)))


def no_signature(world, key, other, manifest):
    world.forge(key, manifest.signed(None))


def signed_by_a_stranger(world, key, other, manifest):
    world.forge(key, manifest, STRANGER)


def replayed_manifest(world, key, other, manifest):
    """A good manifest of yesterday comes back; its blobs may be gone. Old, but right for this key."""
    old = world.manifest(key).read_bytes()
    world.publish(key, version=2)
    if world.rng.random() < 0.5:
        world.blob(manifest).unlink()
    world.manifest(key).write_bytes(old)


def missing_file(world, key, other, manifest):
    world.any_file(key, manifest).unlink()


def future_format(world, key, other, manifest):
    form = json.loads(world.manifest(key).read_bytes())
    form["format"] = world.rng.choice([2, 3, 10**6])
    form["new field"] = 1
    world.manifest(key).write_text(json.dumps(form))


def foreign_machine(world, key, other, manifest):
    features = world.rng.choice([(), ("avx2", "avx512f"), ("neon",)])
    world.forge(key, replace(manifest, origin=m.Origin("there", "cpu", features)), RING)


def lying_sizes(world, key, other, manifest):
    """Signed by a writer with a bug: sizes and digests that do not fit each other."""
    change = world.rng.choice([{"size": 10**9}, {"raw_size": 10**9}, {"raw_size": 0}, {"raw_sha256": "0" * 64},
                               {"compression": "zlib"}, {"size": 0}])  # fmt: skip
    blobs = list(manifest.blobs)
    i = world.rng.randrange(len(blobs))
    if change.get("compression") == blobs[i].compression:
        change = {"compression": "none"}
    blobs[i] = replace(blobs[i], **change)
    world.forge(key, replace(manifest, blobs=tuple(blobs)), RING)


def compression_bomb(world, key, other, manifest):
    name = blob_name(BOMB)
    world.store.put(name, BOMB)
    bomb = replace(manifest.blobs[0], sha256=name[4:], size=len(BOMB), compression="zlib", raw_size=100)
    world.forge(key, replace(manifest, blobs=(bomb,)), RING)


def garbage_file(world, key, other, manifest):
    world.any_file(key, manifest).write_bytes(world.rng.randbytes(world.rng.randrange(10_000)))


def something_else_in_the_way(world, key, other, manifest):
    path = world.any_file(key, manifest)
    path.unlink()
    world.rng.choice([os.mkfifo, lambda path: os.symlink("/dev/zero", path), lambda path: os.symlink(path, path)])(path)


def clock_skew(world, key, other, manifest):
    """An entry from a host whose clock is years off."""
    world.forge(key, replace(manifest, created=world.rng.choice([0, 1, 2**52, manifest.created * 2])), RING)


FAULTS = [
    bit_flip, truncation, empty_file, appended_bytes, zeroed_block, swapped_blobs, swapped_manifest,
    blobs_of_another_manifest, wrong_signature, no_signature, signed_by_a_stranger, replayed_manifest, missing_file,
    future_format, foreign_machine, lying_sizes, compression_bomb, garbage_file, something_else_in_the_way, clock_skew,
]  # fmt: skip
# faults that leave an entry which is right for its key, and faults that only a signature reveals
HARMLESS = {replayed_manifest, clock_skew}
# a private tier trusts its owner's files; changes that keep every digest right are no damage there
SIGNATURE_ONLY = {wrong_signature, no_signature, signed_by_a_stranger, blobs_of_another_manifest}


# who can rewrite the manifests of a private tier is the user: nothing to defend there
CASES = [
    (fault, shared) for fault in FAULTS for shared in (False, True) if shared or fault is not blobs_of_another_manifest
]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("fault", "shared"), CASES, ids=lambda x: x.__name__ if callable(x) else "shared" if x else "private"
)
def test_no_fault_gives_a_wrong_value(fault, shared, tmp_path):
    world = World(tmp_path / "store", shared, random.Random(f"{fault.__name__} {shared}"))
    refused = 0
    for i in range(PER_KIND):
        key, other = Key({"fault": fault.__name__, "n": i}), Key({"fault": fault.__name__, "other": i})
        before = world.publish(key)
        fault(world, key, other, before)
        got = world.cache.lookup(key)
        if isinstance(got, Entry):
            assert right(key, got.blobs), "a wrong value came out of the cache"
        else:
            refused += 1
            assert got.reason in MISSES and got.reason != "breaker-open"
            # what the program does then: compile, publish, and the next process finds it
            done = world.cache.publish(key, compiled(key))
            assert not done.refused and world.cache.flush(30)
            again = world.cache.lookup(key)
            assert isinstance(again, Entry) and dict(again.blobs) == compiled(key)
        assert isinstance(world.cache.lookup(key), Entry)
    stats = world.cache.stats()["store"]
    assert sum(n for what, n in stats.items() if what.startswith("miss:")) == refused
    if fault in SIGNATURE_ONLY:
        assert refused == (PER_KIND if shared else 0)
    elif fault not in HARMLESS:
        # a bit flip may turn an insignificant byte (a letter of a metadata string in a private tier) at most
        assert refused >= PER_KIND * 0.9
    damaged = sum(n for what, n in stats.items() if what.removeprefix("miss:") in DAMAGE)
    assert stats.get("quarantined", 0) == (0 if shared else damaged)


def test_the_campaign_is_large_enough():
    assert len(CASES) * PER_KIND >= 1000


class Flaky(LocalStore):
    """A disk on which the n-th write fails, at a random byte."""

    def __init__(self, root, rng):
        super().__init__(root, label="disk")
        self.rng = rng
        self.failing = False

    def _write_tmp(self, data):
        if self.failing and self.rng.random() < 0.5:
            real, fail = os.write, self.rng.choice([errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES])

            def write(fd, view):
                if self.rng.random() < 0.5:
                    raise OSError(fail, os.strerror(fail))
                return real(fd, view[: max(1, len(view) // 2)])

            os.write = write
            try:
                return super()._write_tmp(data)
            finally:
                os.write = real
        return super()._write_tmp(data)


def test_writes_that_fail_half_way(tmp_path):
    rng = random.Random(4)
    store = Flaky(tmp_path / "disk", rng)
    cache = Cache([Tier(store, breaker=Breaker(failures=10**9))])
    failed = 0
    for i in range(200):
        key = Key({"n": i % 40, "half way": True})
        store.failing = True
        done = cache.publish(key, compiled(key))
        store.failing = False
        failed += len(done.refused)
        assert {miss.code for miss in done.refused} <= {"full", "read-only", "io", "denied"}
        got = cache.lookup(key)
        assert dict(got.blobs) == compiled(key) if isinstance(got, Entry) else got.reason in ("absent", "blob-missing")
    assert failed > 50 and not list((tmp_path / "disk" / "tmp").iterdir())


def test_a_real_size_limit(tmp_path):
    """The kernel refuses the write half way (RLIMIT_FSIZE), as a full disk does."""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    out = cache_alone.run(
        f"""
import os
from fused_eager.cache import *
cache = Cache([Tier(LocalStore("{tmp_path}/disk"))])
print(cache.publish(Key({{"n": 1}}), {{"x": os.urandom(1_000_000)}}).refused[0].code)
print(cache.publish(Key({{"n": 2}}), {{"x": os.urandom(1_000)}}).refused)
print(cache.lookup(Key({{"n": 1}})).reason, cache.lookup(Key({{"n": 2}})).tier)
""",
        preexec_fn=limit,
    )
    assert out == "full\n()\nabsent local\n" and not list((tmp_path / "disk" / "tmp").iterdir())


@pytest.mark.parametrize("kind", ["full", "read-only"])
def test_a_real_full_or_read_only_file_system(tmp_path, kind):
    code = f"""
import os
from fused_eager.cache import *
cache = Cache([Tier(LocalStore("{tmp_path}/disk/cache"))])
print(cache.publish(Key({{"n": 0}}), {{"x": os.urandom(10_000)}}).refused)
if "{kind}" == "full":
    with open("{tmp_path}/disk/other", "wb", buffering=0) as out:
        try:
            while out.write(bytes(4096)):
                pass
        except OSError:
            pass
else:
    os.system("mount -o remount,ro {tmp_path}/disk")
print(cache.publish(Key({{"n": 1}}), {{"x": os.urandom(100_000)}}).refused[0].code)
print(cache.lookup(Key({{"n": 0}})).tier, cache.lookup(Key({{"n": 1}})).reason)
print(type(cache.flight(Key({{"n": 1}}))).__name__)
"""
    (tmp_path / "disk").mkdir()
    inside = f'mount -t tmpfs -o size=256k none {tmp_path}/disk && exec "$0" "$@"'
    shell = ["unshare", "--mount", "--map-root-user", "sh", "-c", inside]
    if shutil.which("unshare") is None or subprocess.run([*shell, "true"], capture_output=True).returncode:
        pytest.skip("this machine does not let a test mount a tmpfs in a namespace of its own")
    out = subprocess.run([*shell, *cache_alone.command(code)], capture_output=True, text=True, timeout=120)
    assert out.stdout == f"()\n{kind}\nlocal absent\nLead\n", out.stderr


def test_wrong_clocks(tmp_path, monkeypatch):
    """Hosts whose clocks are years apart, with and without an age limit, share entries or miss; nothing else."""
    rng = random.Random(6)
    now = time.time()
    for i in range(100):
        key = Key({"clock": i})
        skew, limit = rng.uniform(-1e9, 1e9), rng.choice([None, 3600.0])
        monkeypatch.setattr(time, "time", lambda skew=skew: now + skew)
        writer = Cache([Tier(LocalStore(tmp_path / "d"))])
        assert not writer.publish(key, compiled(key)).refused
        monkeypatch.setattr(time, "time", lambda: now)
        got = Cache([Tier(LocalStore(tmp_path / "d"))], max_age_s=limit).lookup(key)
        if limit is not None and skew < -3601:
            assert got.reason == "too-old"
        else:
            assert right(key, got.blobs)


def test_writers_killed_at_random_points(tmp_path):
    """SIGKILL in the middle of publications: the readers see whole entries or none."""
    rng = random.Random(9)
    code = f"""
import random
from fused_eager.cache import *
cache = Cache([Tier(LocalStore("{tmp_path}/store"))])
print("started", flush=True)
n = 0
while True:
    n += 1
    rng = random.Random(n % 50)
    cache.publish(Key({{"n": n % 50}}), {{"a": rng.randbytes(20_000), "b": rng.randbytes(100)}})
"""
    killed = 0
    for _ in range(6):
        child = subprocess.Popen(cache_alone.command(code), stdout=subprocess.PIPE)
        child.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.1))
        child.kill()
        child.communicate()
        killed += 1
    cache = Cache([Tier(LocalStore(tmp_path / "store"))])
    seen = 0
    for n in range(50):
        got = cache.lookup(Key({"n": n}))
        rng = random.Random(n)
        if isinstance(got, Entry):
            seen += 1
            assert dict(got.blobs) == {"a": rng.randbytes(20_000), "b": rng.randbytes(100)}
        else:
            assert got.reason == "absent"
    assert killed == 6 and seen > 0
