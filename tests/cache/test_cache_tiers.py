"""The cache over its tiers: filling, writing, refusing, counting, and never raising or hanging."""

from __future__ import annotations

import json
import os
import threading
import time
import weakref

import cache_alone
import pytest
from fused_eager.cache import guard as guards
from fused_eager.cache.background import Writer
from fused_eager.cache.guard import Breaker, Guard
from fused_eager.cache.key import Key
from fused_eager.cache.lease import Lead
from fused_eager.cache.local import LocalStore
from fused_eager.cache.manifest import Origin
from fused_eager.cache.memory import MemoryStore
from fused_eager.cache.read import MISSES
from fused_eager.cache.sign import generate, load_keyring
from fused_eager.cache.store import StoreError
from fused_eager.cache.tiers import Cache, Entry, Miss, Tier
from fused_eager.cache.url import open_cache

KEY = Key({"region": {"nodes": ["add"], "inputs": [{"shape": (31, 8)}]}, "jax": "0.10.2"})
BLOBS = {"executable": b"native code " * 1000, "hlo": b"text", "empty": b""}
WRITER = load_keyring(generate("hmac-sha256")["writer"].encode())
HERE = Origin("test", "cpu", ("avx2", "fma"))


def make(tmp_path, *shared, **options):
    """Memory, a local disk, and the shared stores (MemoryStores unless given) behind them."""
    tiers = [Tier(MemoryStore()), Tier(LocalStore(tmp_path / "local"))]
    tiers += [Tier(store, shared=True, timeout_s=options.pop("timeout_s", 2.0)) for store in shared]
    return Cache(tiers, **{"keyring": WRITER, "origin": HERE, **options})


def codes(miss):
    assert isinstance(miss, Miss)
    assert all(tier.code in MISSES for tier in miss.tiers)
    return [tier.code for tier in miss.tiers]


def test_publish_then_hit_in_every_tier(tmp_path):
    shared = MemoryStore(label="shared")
    events = []
    cache = make(tmp_path, shared, versions={"jax": "0.10.2"}, on_event=lambda kind, data: events.append((kind, data)))
    assert codes(cache.lookup(KEY)) == ["absent"] * 3
    done = cache.publish(KEY, BLOBS, metadata={"choice": "xla", "seconds": 0.5})
    assert done.written == ("memory", "local") and done.queued == ("shared",) and done.refused == ()
    assert cache.flush(10)
    got = cache.lookup(KEY)
    assert isinstance(got, Entry) and got.tier == "memory" and got.blobs == BLOBS
    assert got.metadata["choice"] == "xla" and got.manifest.versions == {"jax": "0.10.2"}
    assert got.manifest.origin == HERE and abs(got.manifest.created / 1000 - time.time()) < 600

    other_host = make(tmp_path / "other", shared)
    first, second = other_host.lookup(KEY), other_host.lookup(KEY)
    assert (first.tier, second.tier) == ("shared", "memory") and first.blobs == second.blobs == BLOBS
    restarted = make(tmp_path / "other")
    assert restarted.lookup(KEY).tier == "local"
    stats = other_host.stats()
    assert stats["shared"]["hits"] == stats["memory"]["hits"] == 1
    assert stats["memory"]["fills"] == stats["local"]["fills"] == 1
    assert stats["memory"]["miss:absent"] == stats["local"]["miss:absent"] == 1
    assert 0 < stats["shared"]["bytes_read"] < sum(map(len, BLOBS.values()))  # compressed
    assert sorted(kind for kind, _ in events) == ["hit", "miss", "publish", "write", "write", "write"]
    json.dumps(stats)


def test_what_is_in_the_folder_alone_is_spread_to_the_shared_stores(tmp_path):
    shared = MemoryStore(label="shared")
    make(tmp_path).publish(KEY, BLOBS)
    cache = make(tmp_path, shared)
    assert isinstance(cache.peek(KEY), Entry) and cache.flush(10) and not shared.exists(f"ac/{KEY.digest}")
    assert isinstance(cache.spread(KEY), Entry) and cache.flush(10)
    assert make(tmp_path / "another host", shared).lookup(KEY).blobs == BLOBS
    assert isinstance(make(tmp_path).spread(Key({"region": 2})), Miss)
    # A store that wants a signature which the entry has not: whoever asked makes it anew, and signs that.
    make(tmp_path / "unsigned", keyring=load_keyring(b"")).publish(KEY, BLOBS)
    for writer, keyring in ((True, WRITER), (False, load_keyring(b""))):
        found = make(tmp_path / "unsigned", MemoryStore(label="of others"), keyring=keyring).spread(KEY)
        assert isinstance(found, Miss if writer else Entry)


def test_publishing_again_replaces_the_metadata(tmp_path):
    cache = make(tmp_path, MemoryStore(label="shared"))
    cache.publish(KEY, BLOBS, metadata={"choice": "xla"})
    cache.publish(KEY, {}, metadata={"choice": "aten"})
    assert cache.flush(10)
    for reader in (cache, make(tmp_path)):
        entry = reader.lookup(KEY)
        assert entry.metadata == {"choice": "aten"} and entry.blobs == {}


def test_no_tiers_is_off():
    cache = open_cache("off")
    assert cache.lookup(KEY).reason == "off"
    assert cache.publish(KEY, BLOBS).written == ()
    assert isinstance(cache.flight(KEY), Lead) and isinstance(cache.fetch(KEY, 0), Lead)


def test_open_cache(tmp_path):
    keys = generate("hmac-sha256")["writer"].encode()
    cache = open_cache(f"file://{tmp_path}/a, {tmp_path}/b", local_dir=tmp_path / "local", keys=keys)
    assert cache.publish(KEY, BLOBS).queued == (f"file://{tmp_path}/a", f"{tmp_path}/b") or cache.tiers[2].shared
    assert cache.close(10)
    for folder in ("a", "b", "local"):
        assert (tmp_path / folder / "ac" / KEY.digest).is_file()
    reader = open_cache(f"{tmp_path}/b", local_bytes=0, memory_bytes=0, keys=keys)
    assert reader.lookup(KEY).blobs == BLOBS
    with pytest.raises(ValueError, match="one label"):
        open_cache(f"{tmp_path}/b,{tmp_path}/b", local_bytes=0)


def test_shared_tiers_believe_signatures_only(tmp_path):
    shared = MemoryStore(label="shared")
    make(tmp_path / "w", shared).publish(KEY, BLOBS)  # signed by WRITER, queued
    stranger = load_keyring(generate("hmac-sha256")["writer"].encode())
    writer = make(tmp_path / "w", shared)
    assert writer.lookup(KEY).tier == "local"
    for keyring, code in ((stranger, "unknown-signer"), (load_keyring(b""), "unknown-signer")):
        assert eventually(lambda: shared.exists(f"ac/{KEY.digest}"))
        reader = make(tmp_path / code, shared, keyring=keyring)
        assert codes(reader.lookup(KEY)) == ["absent", "absent", code]
        assert reader.stats()["shared"][f"miss:{code}"] == 1
        assert shared.exists(f"ac/{KEY.digest}")  # others may believe it: not ours to remove
    nobody = make(tmp_path / "n", shared, keyring=load_keyring(b""))
    done = nobody.publish(KEY, BLOBS)
    assert [(miss.tier, miss.code) for miss in done.refused] == [("shared", "not-a-writer")]
    unsigned = Cache([Tier(shared, shared=True, signed=False)], keyring=load_keyring(b""), origin=HERE)
    unsigned.publish(KEY, {"x": b"1"})
    assert unsigned.flush(10) and unsigned.lookup(KEY).blobs == {"x": b"1"}
    assert codes(make(tmp_path / "again", shared).lookup(KEY))[-1] == "unsigned"
    other = make(tmp_path / "other", shared, keyring=stranger)
    other.publish(KEY, BLOBS)  # a writer overwrites what it could not believe
    assert other.flush(10) and make(tmp_path / "o2", shared, keyring=stranger).lookup(KEY).blobs == BLOBS


def eventually(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_read_only_tier_is_never_written(tmp_path):
    shared = MemoryStore(label="shared")
    cache = Cache([Tier(MemoryStore()), Tier(shared, shared=True, writable=False)], keyring=WRITER)
    assert cache.publish(KEY, BLOBS).refused[0].code == "read-only"
    assert cache.flush(10) and not list(shared.list("ac"))
    assert cache.flight(Key({"other": 1})).tier == "memory" and not list(shared.list("lease"))


def test_machines_that_differ_never_exchange_entries(tmp_path):
    shared = MemoryStore(label="shared")
    origins = {
        "same": HERE,
        "same-other-order": Origin("x", "cpu", ("fma", "avx2")),
        "more": Origin("x", "cpu", ("avx2", "fma", "avx512f")),
        "fewer": Origin("x", "cpu", ("avx2",)),
        "device": Origin("x", "gpu", ("avx2", "fma")),
    }
    maker = make(tmp_path / "maker", shared)
    maker.publish(KEY, BLOBS)
    assert maker.flush(10)
    for name, origin in origins.items():
        got = make(tmp_path / name, shared, origin=origin).lookup(KEY)
        if name.startswith("same"):
            assert got.blobs == BLOBS
        else:
            assert codes(got)[-1] == got.reason == "foreign-machine"


def test_age_limit_and_clocks(tmp_path, monkeypatch):
    cache = make(tmp_path, max_age_s=3600)
    now = time.time()
    for offset, code in ((-7200, "too-old"), (-60, None), (10**6, None)):
        monkeypatch.setattr(time, "time", lambda offset=offset: now + offset)
        cache.publish(KEY, BLOBS)
        monkeypatch.setattr(time, "time", lambda: now)
        got = make(tmp_path, max_age_s=3600).lookup(KEY)
        assert isinstance(got, Entry) if code is None else got.reason == code
    assert isinstance(make(tmp_path).lookup(KEY), Entry)


def test_more_than_a_reader_takes(tmp_path):
    make(tmp_path).publish(KEY, BLOBS)
    assert make(tmp_path, max_entry_bytes=100).lookup(KEY).reason == "blobs-too-large"


def test_bad_metadata_and_names_are_refused_not_raised(tmp_path):
    cache = make(tmp_path)
    lead = cache.flight(KEY)
    done = cache.publish(KEY, BLOBS, metadata={"x": object()}, lead=lead)
    assert done.manifest is None and done.refused[0].code == "bad-field" and "metadata.x" in done.refused[0].detail
    assert not lead.held
    assert cache.publish(KEY, {"../x": b""}).refused[0].code == "bad-field"
    assert cache.lookup(KEY).reason == "absent"


def test_damage_in_a_fast_tier_is_mended_from_a_slower_one(tmp_path):
    shared = MemoryStore(label="shared")
    cache = make(tmp_path, shared)
    cache.publish(KEY, BLOBS)
    assert cache.flush(10)
    path = tmp_path / "local" / "ac" / KEY.digest
    path.write_bytes(path.read_bytes()[:-10])
    events = []
    again = make(tmp_path, shared, on_event=lambda kind, data: events.append((kind, data)))
    assert again.lookup(KEY).tier == "shared"
    assert [data["code"] for kind, data in events if kind == "damaged"] == ["not-json"]
    assert again.stats()["local"]["quarantined"] == 1
    assert len(list((tmp_path / "local" / "quarantine").iterdir())) == 1
    assert make(tmp_path).lookup(KEY).tier == "local"


def test_damage_in_a_shared_tier_stays_and_is_overwritten(tmp_path):
    shared = LocalStore(tmp_path / "shared", private=False, label="shared")
    writer = make(tmp_path / "a", shared)
    writer.publish(KEY, BLOBS)
    assert writer.flush(10)
    for path in (tmp_path / "shared" / "cas").iterdir():
        path.write_bytes(b"")
    reader = make(tmp_path / "b", shared)
    assert reader.lookup(KEY).reason == "blob-damaged"
    assert (tmp_path / "shared" / "ac" / KEY.digest).exists()
    reader.publish(KEY, BLOBS)
    assert reader.flush(10)
    assert make(tmp_path / "c", shared).lookup(KEY).blobs == BLOBS


class Trouble(MemoryStore):
    """A store with a switch: "ok", a StoreError code, "hang", or an exception of a library."""

    def __init__(self, mode="ok", label="shared"):
        super().__init__(label=label)
        self.mode = mode
        self.asked = 0
        self.wake = threading.Event()

    def _trouble(self):
        self.asked += 1
        if self.mode == "hang":
            self.wake.wait(60)
        elif self.mode == "bug":
            raise RuntimeError("some library's exception")
        elif self.mode != "ok":
            raise StoreError(self.mode)

    def get(self, name, limit):
        self._trouble()
        return super().get(name, limit)

    def put(self, name, data):
        self._trouble()
        super().put(name, data)

    def swap(self, *arguments):
        self._trouble()
        return super().swap(*arguments)


@pytest.mark.parametrize("mode", ["unreachable", "server-error", "garbage", "bug", "hang"])
def test_a_broken_store_is_left_alone_and_the_rest_goes_on(tmp_path, mode):
    trouble = Trouble(mode)
    cache = make(tmp_path, trouble, timeout_s=0.05)
    code = {"bug": "io", "hang": "timeout"}.get(mode, mode)
    for i in range(10):
        key = Key({"n": i})
        assert codes(cache.lookup(key))[-1] == (code if i == 0 else "breaker-open")
        lead = cache.flight(key)
        assert isinstance(lead, Lead)
        assert cache.publish(key, BLOBS, lead=lead).written == ("memory", "local")
        assert cache.lookup(key).tier == "memory"
    assert cache.flush(10)
    stats = cache.stats()["shared"]
    assert stats["breaker_open"] == 1 and trouble.asked == 3
    assert sum(n for what, n in stats.items() if what.startswith("write-failed:")) == 10
    trouble.wake.set()


def test_the_breaker_lets_one_probe_through_and_closes_again():
    now = [0.0]
    breaker = Breaker(failures=2, pause_s=10, max_pause_s=35, clock=lambda: now[0])
    guard = Guard("x", threads=False, breaker=breaker)
    calls = []

    def fail():
        calls.append(now[0])
        raise StoreError("unreachable")

    def attempt(work):
        try:
            return guard.call(work, 1.0)
        except StoreError as error:
            return error.code

    assert [attempt(fail) for _ in range(4)] == ["unreachable", "unreachable", "breaker-open", "breaker-open"]
    for pause in (10, 20, 35, 35):
        now[0] += pause - 0.1
        assert attempt(fail) == "breaker-open" and breaker.is_open
        now[0] += 0.2
        assert [attempt(fail), attempt(fail)] == ["unreachable", "breaker-open"]
    now[0] += 36
    assert attempt(lambda: 7) == 7 and not breaker.is_open
    assert [attempt(fail), attempt(fail), attempt(fail)] == ["unreachable", "unreachable", "breaker-open"]
    assert attempt(fail) == "breaker-open"
    now[0] += 36
    for code in ("full", "read-only", "denied", "unsupported", "too-large"):

        def refuse(code=code):
            raise StoreError(code)

        assert [attempt(refuse) for _ in range(4)] == [code] * 4
    assert not breaker.is_open and code not in guards.BREAKING


def test_hanging_calls_are_bounded():
    guard = Guard("x", threads=True, breaker=Breaker(failures=10**9))
    wake = threading.Event()
    before = threading.active_count()
    for _ in range(10):
        with pytest.raises(StoreError) as caught:
            guard.call(lambda: wake.wait(60), 0.01)
        assert caught.value.code == "timeout"
    assert threading.active_count() - before <= guards.MAX_STUCK
    wake.set()
    assert eventually(lambda: threading.active_count() <= before)
    assert guard.call(lambda: "alive", 5.0) == "alive"


def test_an_observer_that_raises_changes_nothing(tmp_path):
    def observer(kind, data):
        raise RuntimeError("the observer's own bug")

    cache = make(tmp_path, on_event=observer)
    cache.publish(KEY, BLOBS)
    assert cache.lookup(KEY).blobs == BLOBS
    assert cache.stats()[""]["observer-errors"] >= 3


def test_the_write_queue_is_bounded_and_says_so(tmp_path):
    trouble = Trouble("hang")
    cache = make(tmp_path, trouble)
    cache._writer.max_bytes = 5000
    done = [cache.publish(Key({"n": i}), {"x": os.urandom(1000)}) for i in range(20)]
    dropped = [d for d in done if d.refused]
    assert 14 <= len(dropped) <= 18 and {d.refused[0].code for d in dropped} == {"queue-full"}
    assert cache.stats()["shared"]["write-failed:queue-full"] == len(dropped)
    assert not cache.flush(0.05)
    trouble.mode = "ok"
    trouble.wake.set()
    assert cache.flush(10)
    assert len(list(trouble.list("ac"))) == 20 - len(dropped)


def test_the_writer_lets_go_of_a_job_that_is_done():
    class Blob:
        pass

    writer, blob = Writer(), Blob()
    kept = weakref.ref(blob)
    writer.submit(1, lambda held=blob: None)
    del blob
    assert writer.flush(10) and eventually(lambda: kept() is None)


def test_the_writer_outlives_a_job_that_raises(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    writer = Writer()
    ran = []
    writer.submit(1, lambda: 1 / 0)
    assert writer.flush(10)
    assert eventually(lambda: writer._thread is None or not writer._thread.is_alive())
    assert writer.submit(1, lambda: ran.append(1)) and writer.flush(10) and ran == [1]


def test_what_is_queued_at_exit_is_written(tmp_path):
    out = cache_alone.run(f"""
from fused_eager.cache import *
cache = open_cache("file://{tmp_path}/shared", local_dir="{tmp_path}/local", allow_unsigned=True)
print(cache.publish(Key({{"a": 1}}), {{"x": b"1" * 3_000_000}}).queued != ())
""")
    assert out == "True\n"
    digest = Key({"a": 1}).digest
    assert (tmp_path / "shared" / "ac" / digest).is_file()


def test_exit_does_not_wait_for_a_hanging_store(tmp_path):
    cache_alone.run("""
import time
from fused_eager.cache import *
class Hang(MemoryStore):
    def put(self, name, data):
        time.sleep(1000)
cache = Cache([Tier(Hang(), shared=True, signed=False, write_timeout_s=1000)], exit_flush_s=0.2)
cache.publish(Key({"a": 1}), {"x": b"1"})
""")  # run() has a time-out far below 1000 s


def test_a_forked_child_can_go_on(tmp_path):
    """Locks held by other threads at the fork, background threads and leases stay with the parent."""
    out = cache_alone.run(f"""
import os, threading
from fused_eager.cache import *
cache = open_cache("file://{tmp_path}/shared", local_dir="{tmp_path}/local", allow_unsigned=True)
lead = cache.flight(Key({{"held": 1}}))
cache.publish(Key({{"a": 0}}), {{"x": b"0"}})
memory = cache.tiers[0].store
memory._lock.acquire(); cache._lock.acquire()
pid = os.fork()
if pid == 0:
    ok = cache.lookup(Key({{"a": 0}})).blobs == {{"x": b"0"}}
    ok = ok and cache.publish(Key({{"a": 1}}), {{"x": b"1"}}).queued != () and cache.flush(10)
    ok = ok and not lead.held and isinstance(cache.flight(Key({{"held": 1}})), Follow)
    os._exit(0 if ok else 1)
memory._lock.release(); cache._lock.release()
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), lead.held, cache.flush(10))
""")
    assert out == "0 True True\n"
