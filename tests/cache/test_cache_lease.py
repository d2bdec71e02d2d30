"""Single flight: one maker per key, on every kind of store, and nobody waits for the dead."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import cache_alone
import pytest
from fused_eager.cache import alive
from fused_eager.cache.key import Key
from fused_eager.cache.lease import MAX_TTL_S, WAITS, Follow, Lead, Leases
from fused_eager.cache.local import LocalStore
from fused_eager.cache.memory import MemoryStore
from fused_eager.cache.sign import generate
from fused_eager.cache.store import StoreError
from fused_eager.cache.tiers import Cache, Entry, Miss, Tier
from fused_eager.cache.url import open_store

KEY = Key({"n": 1})
KEYS = generate("hmac-sha256")["writer"]
WORKER = Path(__file__).with_name("cache_worker.py")


def on(*stores, ttl=10.0):
    return Cache([Tier(store) for store in stores], lease_ttl_s=ttl)


def test_one_leads_the_other_follows_and_gets_the_entry():
    shared = MemoryStore(label="shared")
    a, b = on(shared), on(shared)
    lead, follow = a.flight(KEY), b.flight(KEY)
    assert isinstance(lead, Lead) and lead.held and isinstance(follow, Follow)
    assert follow.wait(0.0).reason == "wait-timeout" in WAITS
    got = []
    waiting = threading.Thread(target=lambda: got.append(follow.wait(30.0)))
    waiting.start()
    a.publish(KEY, {"x": b"1"}, lead=lead)
    waiting.join()
    assert isinstance(got[0], Entry) and got[0].blobs == {"x": b"1"}
    assert not lead.held and shared.get(f"lease/{KEY.digest}", 100) is None
    late = b.flight(KEY)  # asked after the fact: no second compilation
    assert isinstance(late, Follow) and late.wait(0.0).blobs == {"x": b"1"}
    assert shared.get(f"lease/{KEY.digest}", 100) is None


def test_a_lead_that_gives_up_frees_the_others():
    shared = MemoryStore(label="shared")
    a, b = on(shared), on(shared)
    with pytest.raises(RuntimeError, match="compiler"), a.flight(KEY):
        follow = b.flight(KEY)
        raise RuntimeError("the compiler's")
    assert follow.wait(30.0).reason == "lease-free" in WAITS
    assert isinstance(b.fetch(KEY, 30.0), Lead)


def test_publish_keeps_the_lease_until_the_slow_tier_is_written():
    shared = MemoryStore(label="shared")
    gate = threading.Event()

    class Slow(MemoryStore):
        def put(self, name, data):
            gate.wait(60)
            shared.put(name, data)

        def get(self, name, limit):
            return shared.get(name, limit)

        def swap(self, *arguments):
            return shared.swap(*arguments)

    cache = Cache([Tier(MemoryStore()), Tier(Slow(label="slow"), shared=True, signed=False)])
    with cache.flight(KEY) as lead:
        cache.publish(KEY, {"x": b"1"}, lead=lead)
    assert lead.held and isinstance(on(shared).flight(KEY), Follow)
    gate.set()
    assert cache.flush(30.0) and not lead.held
    assert isinstance(on(shared).lookup(KEY), Entry)


def test_heartbeats_keep_a_lease_and_a_silent_one_is_taken_over(tmp_path):
    ttl = 0.6
    store = LocalStore(tmp_path)
    holder, other = on(store, ttl=ttl), on(LocalStore(tmp_path), ttl=ttl)
    lead = holder.flight(KEY)
    first = store.get(f"lease/{KEY.digest}", 4096)
    began = time.monotonic()
    while time.monotonic() - began < 2.5 * ttl:
        assert isinstance(other.flight(KEY), Follow)
        time.sleep(0.02)
    assert store.get(f"lease/{KEY.digest}", 4096)[:32] == first[:32] != store.get(f"lease/{KEY.digest}", 4096)
    holder._leases._held.clear()  # as when the process dies: no more heartbeats, no release
    follow = other.flight(KEY)
    result = follow.wait(60.0)
    assert result.reason == "lease-free"
    # the follower saw the last record for a whole time to live, and not much longer (the machine may be busy)
    taken = other.flight(KEY)
    assert isinstance(taken, Lead) and other.stats()["local"]["takeovers"] == 1
    assert not lead.held


def test_a_lost_lease_is_noticed(tmp_path):
    store = LocalStore(tmp_path)
    cache = on(store, ttl=0.3)
    lead = cache.flight(KEY)
    name = f"lease/{KEY.digest}"
    current = store.get(name, 4096)
    while not store.swap(name, current, b"f" * 32 + b" 0 300 thief", 1.0):
        current = store.get(name, 4096)
    deadline = time.monotonic() + 30
    while lead.held and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not lead.held and cache.stats()["local"]["leases-lost"] == 1
    lead.release()
    assert store.get(name, 4096).endswith(b"thief")


@pytest.mark.parametrize(
    "record",
    [b"garbage", b"\xff" * 100, b"0" * 32 + b" 1 999999999 forever", b"0" * 32 + b" x y z", b"0" * 5000],
)
def test_foreign_records_delay_for_a_bounded_time(record, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    store = MemoryStore(label="shared")
    store.put(f"lease/{KEY.digest}", record)
    leases = Leases([Tier(store)], 10.0, lambda label, what: None)
    first = leases.take(KEY)
    if len(record) <= 4096:
        assert not isinstance(first, Lead)
        now[0] += MAX_TTL_S + 1
        assert isinstance(leases.take(KEY), Lead)
    else:
        assert isinstance(first, Lead) and first.tier == ""  # a store with nonsense in it is no store for leases


def test_clocks_play_no_part(monkeypatch):
    shared = MemoryStore(label="shared")
    a, b = on(shared), on(shared)
    lead = a.flight(KEY)
    for wrong in (0.0, 10.0**10):
        monkeypatch.setattr(time, "time", lambda wrong=wrong: wrong)
        assert isinstance(b.flight(KEY), Follow) and lead.held


class NoLeases(MemoryStore):
    def swap(self, *arguments):
        raise StoreError("read-only")


def test_leases_move_to_a_faster_tier_when_the_store_cannot_hold_them():
    broken, host = NoLeases(label="broken"), MemoryStore(label="host")
    a, b = on(host, broken), on(host, broken)
    lead = a.flight(KEY)
    assert lead.tier == "host" and isinstance(b.flight(KEY), Follow)
    alone = on(NoLeases(label="broken"))
    assert isinstance(alone.flight(KEY), Lead) and isinstance(alone.flight(KEY), Lead)
    assert alone.stats()["broken"]["lease-failed:read-only"] == 2
    lead.release()


def test_fetch_waits_no_longer_than_asked():
    shared = MemoryStore(label="shared")
    a, b = on(shared), on(shared)
    lead = a.flight(KEY)
    began = time.monotonic()
    got = b.fetch(KEY, 0.2)
    assert isinstance(got, Miss) and got.reason == "wait-timeout" and time.monotonic() - began >= 0.2
    assert lead.held


def test_a_wait_ends_as_soon_as_it_is_given_up():
    shared = MemoryStore(label="shared")
    lead = on(shared).flight(KEY)
    asked = []
    began = time.monotonic()
    got = on(shared).fetch(KEY, 60.0, lambda: asked.append(1) or len(asked) == 3)
    assert isinstance(got, Miss) and got.reason == "given-up" in WAITS and time.monotonic() - began < 10
    assert lead.held
    lead.release()
    assert isinstance(on(shared).fetch(KEY, 60.0, lambda: True), Lead), "where there is nothing to wait for"


def test_a_holder_that_is_stopped_for_a_moment_keeps_its_lease(monkeypatch):
    now, state = [1000.0], [alive.STOPPED]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(alive, "state_of", lambda mark: state[0])
    shared = MemoryStore(label="shared")
    shared.put(f"lease/{KEY.digest}", b"0" * 32 + b" 0 10000 host:1 mark")
    leases = Leases([Tier(shared)], 10.0, lambda label, what: None)
    for seen, passed in ((alive.STOPPED, 0.9), (alive.ALIVE, 0.9), (alive.STOPPED, 0.9), (alive.STOPPED, 0.0)):
        state[0] = seen
        assert not leases.is_free(KEY) and leases.take(KEY).owner == "host:1"
        now[0] += passed
    now[0] += 1.0
    assert leases.is_free(KEY) and isinstance(leases.take(KEY), Lead)


def test_a_forked_child_speaks_for_itself():
    told = cache_alone.run("""
import os
from fused_eager.cache.lease import Leases
leases = Leases([], 10.0, print)
child = os.fork()
if child == 0:
    print(os.getpid() == int(leases._owner.partition(" ")[0].rpartition(":")[2]), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(os.getpid() == int(leases._owner.partition(" ")[0].rpartition(":")[2]))
""")
    assert told == "True\nTrue\n"


def spawn(urls, tmp_path, *, processes, keys, seconds, ttl, first=0):
    """`processes` workers on empty local tiers of their own, ready to start at a line on stdin."""
    children = []
    for n in range(first, first + processes):
        arguments = [urls, str(tmp_path / f"local{n}"), KEYS, str(seconds), str(ttl), str(tmp_path / "log"), str(keys)]
        children.append(
            subprocess.Popen([sys.executable, str(WORKER), "make", *arguments], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
        )  # fmt: skip
    for child in children:
        assert child.stdout.readline() == "ready\n"
    return children


def go(child) -> None:
    child.stdin.write("\n")
    child.stdin.flush()


def made(tmp_path):
    return Counter(line.split()[0] for line in (tmp_path / "log").read_text().splitlines())


def test_eight_processes_make_each_key_once(shared_url, tmp_path):
    children = spawn(shared_url, tmp_path, processes=8, keys=4, seconds=0.1, ttl=20)
    for child in children:
        go(child)
    for child in children:
        assert child.communicate()[0] == "ok\n" and child.returncode == 0
    assert made(tmp_path) == {Key({"n": n}).digest: 1 for n in range(4)}
    store = open_store(shared_url)
    assert all(store.exists(f"ac/{Key({'n': n}).digest}") for n in range(4))
    assert not any(store.get(f"lease/{Key({'n': n}).digest}", 4096) for n in range(4))


def test_a_holder_killed_in_mid_compile_delays_nobody_for_long(shared_url, tmp_path):
    others = spawn(shared_url, tmp_path, processes=3, keys=1, seconds=0.1, ttl=2.0)
    # this one "compiles" for an hour
    (holder,) = spawn(shared_url, tmp_path, processes=1, keys=1, seconds=3600, ttl=2.0, first=3)
    go(holder)
    while not (tmp_path / "log").exists() or not made(tmp_path):
        time.sleep(0.02)
    for child in others:
        go(child)
    time.sleep(0.3)
    assert all(child.poll() is None for child in others)  # they wait for the holder
    holder.kill()
    holder.communicate()
    for child in others:
        assert child.communicate()[0] == "ok\n" and child.returncode == 0
    assert made(tmp_path) == {Key({"n": 0}).digest: 2}  # the dead one's, and one of the others


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_holder_of_this_host_that_is_killed_or_stopped_delays_nobody(number, tmp_path):
    url = f"file://{tmp_path / 'shared'}"
    (other,) = spawn(url, tmp_path, processes=1, keys=1, seconds=0.1, ttl=50.0)
    (holder,) = spawn(url, tmp_path, processes=1, keys=1, seconds=3600, ttl=50.0, first=1)
    try:
        go(holder)
        while not (tmp_path / "log").exists() or not made(tmp_path):
            time.sleep(0.02)
        go(other)
        time.sleep(0.3)
        assert other.poll() is None  # it waits for the holder
        began = time.monotonic()
        holder.send_signal(number)
        assert other.communicate()[0] == "ok\n" and other.returncode == 0
        assert time.monotonic() - began < 25, "half of the time to live"
    finally:
        holder.kill()
        holder.communicate()
    assert made(tmp_path) == {Key({"n": 0}).digest: 2}
