"""What every store promises, asked of every store, and what the local one promises beyond."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import cache_alone
import pytest
from fused_eager.cache.fs import FsspecStore
from fused_eager.cache.http import HttpStore
from fused_eager.cache.local import LocalStore, default_root
from fused_eager.cache.memory import MemoryStore
from fused_eager.cache.store import StoreError, blob_name
from fused_eager.cache.url import open_store

A, B = "a" * 64, "b" * 64
WORKER = Path(__file__).with_name("cache_worker.py")


def refused(code, work, *arguments):
    with pytest.raises(StoreError) as caught:
        work(*arguments)
    assert caught.value.code == code


def test_bytes_come_back(store):
    assert store.get(f"ac/{A}", 100) is None
    assert store.stat(f"ac/{A}") is None and not store.exists(f"ac/{A}")
    big = random.Random(1).randbytes(3 << 20)
    for name, data in ((f"ac/{A}", b"one"), (f"cas/{A}", b""), (f"cas/{B}", big), (f"ac/{A}", b"two, longer")):
        store.put(name, data)
        assert store.get(name, len(data)) == data
        assert store.stat(name).size == len(data) and store.exists(name)
    assert store.get(f"ac/{B}", 100) is None
    refused("too-large", store.get, f"cas/{B}", len(big) - 1)
    refused("too-large", store.get, f"ac/{A}", 3)
    if isinstance(store, HttpStore):
        refused("unsupported", store.list, "ac")
    else:
        assert [s.name for s in store.list("ac")] == [f"ac/{A}"]
        assert sorted((s.name, s.size) for s in store.list("cas")) == [(f"cas/{A}", 0), (f"cas/{B}", len(big))]
    store.delete(f"ac/{A}")
    store.delete(f"ac/{A}")
    assert store.get(f"ac/{A}", 100) is None
    store.quarantine(f"cas/{B}", "blob-damaged")
    assert not store.exists(f"cas/{B}")


@pytest.mark.parametrize("name", ["", "ac", "ac/", "ac/../x", f"ac/{A}x", f"ac/{A.upper()}", f"/ac/{A}", f"xx/{A}",
                                  f"ac/{A}\n", f"ac\\{A}", "ac/" + "\u0661" * 64])  # fmt: skip
def test_no_other_name_reaches_the_store(store, name):
    for work in (lambda: store.get(name, 9), lambda: store.put(name, b""), lambda: store.delete(name),
                 lambda: store.stat(name), lambda: store.swap(name, None, b"x", 1.0)):  # fmt: skip
        with pytest.raises(ValueError):
            work()


def test_swap_compares(store):
    store.quiet_s = 0.02
    name = f"lease/{A}"
    mine, other = b"0" * 32 + b" mine", b"1" * 32 + b" other"
    assert not store.swap(name, mine, other, 30.0)
    assert not store.swap(name, mine, None, 30.0)
    assert store.swap(name, None, mine, 30.0)
    assert not store.swap(name, None, other, 30.0)
    assert store.swap(name, mine, mine + b"2", 30.0)
    assert not store.swap(name, mine, other, 30.0)
    assert store.get(name, 4096) == mine + b"2"
    assert store.swap(name, mine + b"2", other, 30.0)
    assert not store.swap(name, mine, None, 30.0)
    assert store.swap(name, other, None, 30.0)
    assert not store.get(name, 4096)
    assert store.swap(name, None, mine, 30.0)


def test_of_many_threads_one_swaps(store):
    for i in range(3):
        wins = []
        start = threading.Barrier(8)

        def race(n, i=i, wins=wins, start=start):
            start.wait()
            if store.swap(f"lease/{i:064x}", None, b"%032x record" % n, 30.0):
                wins.append(n)

        threads = [threading.Thread(target=race, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(wins) == 1
        assert store.get(f"lease/{i:064x}", 4096) == b"%032x record" % wins[0]


def test_readers_never_see_a_mixture(store):
    """Overwrites under readers: old or new, whole."""
    values = [bytes([n]) * (200_000 + n) for n in range(4)]
    store.put(f"cas/{A}", values[0])
    stop, bad = threading.Event(), []

    def read():
        while not stop.is_set():
            data = store.get(f"cas/{A}", 1 << 20)
            if data not in values:
                bad.append(data)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for n in range(20):
        store.put(f"cas/{A}", values[n % 4])
    stop.set()
    for reader in readers:
        reader.join()
    assert not bad


def test_memory_is_bounded_and_forgets_the_least_recently_used():
    store = MemoryStore(1000)
    names = [f"cas/{i:064x}" for i in range(20)]
    for name in names[:10]:
        store.put(name, bytes(100))
    assert store.get(names[0], 100) == bytes(100)
    store.put(names[10], bytes(100))
    assert store.exists(names[0]) and not store.exists(names[1])
    store.put(names[11], bytes(2000))
    assert not store.exists(names[11])
    assert sum(s.size for s in store.list("cas")) <= 1000


def test_default_root(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_root() == tmp_path / "fused_eager"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_root() == tmp_path / ".cache" / "fused_eager"


def test_local_permissions_are_private(tmp_path):
    old = os.umask(0)
    try:
        store = LocalStore(tmp_path / "cache")
        store.put(f"ac/{A}", b"x")
    finally:
        os.umask(old)
    for path in (tmp_path / "cache", *(tmp_path / "cache").rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_directory_that_others_can_write_is_refused(tmp_path):
    root = tmp_path / "cache"
    LocalStore(root).put(f"ac/{A}", b"x")
    root.chmod(0o770)
    store = LocalStore(root)
    refused("unsafe-directory", store.get, f"ac/{A}", 10)
    refused("unsafe-directory", store.put, f"ac/{A}", b"y")
    assert LocalStore(root, private=False).get(f"ac/{A}", 10) == b"x"


def test_the_obstacle_is_what_writing_meets(tmp_path):
    def obstacle(root):
        store = LocalStore(root)
        before, why = sorted(tmp_path.rglob("*")), store.obstacle()
        assert sorted(tmp_path.rglob("*")) == before  # it leaves nothing, and takes nothing away
        if why is not None:
            with pytest.raises(StoreError):
                store.put(f"ac/{A}", b"x")
        return why

    file, everyones, dangling = tmp_path / "file", tmp_path / "everyones", tmp_path / "dangling"
    file.write_bytes(b"")
    everyones.mkdir()
    everyones.chmod(0o777)
    dangling.symlink_to(tmp_path / "nothing")
    assert (why := obstacle(everyones)) is not None and why.code == "unsafe-directory"
    for root, there in ((file, file), (file / "a" / "b", file), (dangling, dangling), (Path("/proc/x"), "/proc")):
        assert (why := obstacle(root)) is not None and str(there) in str(why)
    assert obstacle(tmp_path / "a" / "b") is None
    LocalStore(tmp_path / "a").put(f"cas/{A}", b"x")
    assert obstacle(tmp_path / "a") is None
    (tmp_path / "a" / "ac").rmdir()
    (tmp_path / "a" / "ac").write_bytes(b"")
    assert "ac is not a folder" in str(obstacle(tmp_path / "a"))


def test_links_fifos_and_folders_in_the_way(tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    store = LocalStore(tmp_path / "cache")
    store.put(f"ac/{A}", b"x")
    path = tmp_path / "cache" / "cas" / A
    path.symlink_to(tmp_path / "secret")
    refused("io", store.get, f"cas/{A}", 100)
    store.put(f"cas/{A}", b"replaces the link")
    assert (tmp_path / "secret").read_bytes() == b"secret" and store.get(f"cas/{A}", 100) == b"replaces the link"
    path.unlink()
    os.mkfifo(path)
    refused("io", store.get, f"cas/{A}", 100)
    path.unlink()
    path.mkdir()
    refused("io", store.get, f"cas/{A}", 100)
    refused("io", store.put, f"cas/{A}", b"")
    assert not list((tmp_path / "cache" / "tmp").iterdir())


def test_local_bound_and_order_of_eviction(tmp_path):
    store = LocalStore(tmp_path, max_bytes=100_000)
    names = [f"cas/{i:064x}" for i in range(40)]
    for i, name in enumerate(names[:9]):
        store.put(name, bytes(10_000))
        os.utime(tmp_path / name, (1000 + i, 1000 + i))
    assert store.get(names[0], 10_000) == bytes(10_000)
    for name in names[9:12]:
        store.put(name, bytes(10_000))
        assert store.usage() <= 100_000
    assert store.exists(names[0]) and store.exists(names[11])
    assert not store.exists(names[1]) and not store.exists(names[2])
    refused("full", store.put, names[0], bytes(100_001))
    for _ in range(50):  # overwriting is not growth
        store.put(names[11], bytes(10_000))
    assert store.exists(names[0])
    assert store.gc(20_000) == store.usage() <= 20_000


def test_a_manifest_goes_before_its_blobs(tmp_path):
    store = LocalStore(tmp_path, max_bytes=100_000)
    store.put(f"cas/{A}", bytes(50_000))
    store.put(f"ac/{A}", bytes(100))
    store.gc(50_000)
    assert store.exists(f"cas/{A}") and not store.exists(f"ac/{A}")


def test_quarantine_is_kept_bounded_and_counted(tmp_path):
    store = LocalStore(tmp_path, max_bytes=100_000)
    for i in range(60):
        store.put(f"cas/{i:064x}", bytes(100))
        store.quarantine(f"cas/{i:064x}", "blob-damaged/../x")
    kept = list((tmp_path / "quarantine").iterdir())
    assert len(kept) == 32 and all(path.name.endswith(".blob-damaged-x") for path in kept)
    assert store.usage() == 3200
    store.quarantine(f"cas/{A}", "absent already")
    store.put(f"cas/{A}", bytes(100_000))
    assert store.usage() == 100_000


def test_what_killed_writers_leave_is_swept(tmp_path):
    store = LocalStore(tmp_path, max_bytes=100_000)
    store.put(f"ac/{A}", b"x")
    for name, age in (("old", 7200), ("new", 10)):
        (tmp_path / "tmp" / name).write_bytes(b"half")
        os.utime(tmp_path / "tmp" / name, (time.time() - age,) * 2)
    (tmp_path / "lease" / B).write_bytes(b"dead")
    os.utime(tmp_path / "lease" / B, (1, 1))
    store.gc()
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == ["new"]
    assert not (tmp_path / "lease" / B).exists() and store.get(f"ac/{A}", 10) == b"x"


@pytest.mark.parametrize("text", [b"", b"nonsense", b"-1", b"9" * 20 + b"\n", b"\xff" * 100])
def test_a_damaged_account_is_counted_anew(tmp_path, text):
    store = LocalStore(tmp_path, max_bytes=50_000)
    for i in range(4):
        store.put(f"cas/{i:064x}", bytes(10_000))
    (tmp_path / ".lock").write_bytes(text)
    for i in range(4, 8):
        store.put(f"cas/{i:064x}", bytes(10_000))
        assert store.exists(f"cas/{i:064x}") and store.usage() <= 50_000
    assert store.usage() >= 30_000


def test_a_stopped_lock_holder_is_not_waited_for_for_ever(tmp_path):
    import fcntl

    store = LocalStore(tmp_path, lock_wait_s=0.05)
    store.put(f"ac/{A}", b"x")
    with open(tmp_path / ".lock", "rb") as lock, open(tmp_path / "lease" / ".lock", "wb") as lease:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fcntl.flock(lease, fcntl.LOCK_EX)
        refused("busy", store.put, f"ac/{B}", b"y")
        refused("busy", store.swap, f"lease/{B}", None, b"y", 1.0)
        assert store.get(f"ac/{A}", 10) == b"x"
    store.put(f"ac/{B}", b"y")


def test_fsync_policy_calls_it(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    LocalStore(tmp_path / "a").put(f"ac/{A}", b"x")
    assert synced == []
    LocalStore(tmp_path / "b", fsync=True).put(f"ac/{A}", b"x")
    assert len(synced) == 2


def test_many_processes_keep_the_bound(tmp_path):
    """16 processes write, read and overwrite under a bound that holds a fraction of what they write."""
    bound = 400_000
    root = tmp_path / "cache"
    processes = [
        subprocess.Popen([sys.executable, str(WORKER), "churn", str(root), str(bound), str(seed), "60"],
                         stdout=subprocess.PIPE, text=True)
        for seed in range(16)
    ]  # fmt: skip
    store = LocalStore(root, max_bytes=bound)
    highest = 0
    while any(process.poll() is None for process in processes):
        highest = max(highest, store.usage())
        time.sleep(0.01)
    for process in processes:
        assert process.communicate()[0].strip() == "ok" and process.returncode == 0
    assert 0 < highest <= bound
    assert not list((root / "tmp").iterdir())
    # the account is never below the truth
    assert int((root / ".lock").read_text()) >= store.usage() > 0


def test_processes_killed_at_random_points_leave_a_working_store(tmp_path):
    rng = random.Random(11)
    root = tmp_path / "cache"
    for seed in range(4):
        command = [sys.executable, str(WORKER), "churn", str(root), "200000", str(seed), "1000000"]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
        for process in processes:
            process.stdout.readline()  # "started"
        time.sleep(rng.uniform(0.0, 0.2))
        for process in processes:
            process.kill()
            process.communicate()
    store = LocalStore(root, max_bytes=200_000)
    for stat_ in store.list("cas"):
        assert blob_name(store.get(stat_.name, 1 << 20)) == stat_.name
    store.put(f"ac/{A}", b"still works")
    assert store.get(f"ac/{A}", 100) == b"still works" and store.usage() <= 200_000


@pytest.mark.parametrize("url", ["", "relative/path", "file://host/path", "file:relative", "http://", "https:///x"])
def test_urls_that_are_no_store(url):
    with pytest.raises(ValueError):
        open_store(url)


def test_urls_open_their_store_and_labels_hide_passwords(tmp_path):
    assert isinstance(open_store(f"file://{tmp_path}/with%20space"), LocalStore)
    assert open_store(f"file://{tmp_path}/with%20space").root == tmp_path / "with space"
    assert open_store(str(tmp_path)).root == tmp_path
    store = open_store("https://me:hunter2@example.org:8443/base?token=hunter2")
    assert isinstance(store, HttpStore) and store.label == "https://me@example.org:8443/base"
    assert isinstance(open_store("memory://x"), FsspecStore)


@pytest.mark.parametrize(
    ("url", "module", "extra"), [("redis://x", "redis", "redis"), ("s3://x/y", "fsspec", "remote")]
)
def test_a_missing_library_names_its_extra(url, module, extra):
    out = cache_alone.run(f"""
sys.modules["{module}"] = sys.modules["{module}.core"] = None
from fused_eager.cache.extras import MissingExtra
from fused_eager.cache.url import open_store
try:
    open_store("{url}")
except MissingExtra as error:
    print(error.extra, error)
""")
    assert out.startswith(f"{extra} ") and f"pip install 'fused-eager[{extra}]'" in out


def test_the_package_imports_no_framework():
    out = cache_alone.run("""
import importlib, pkgutil
import fused_eager.cache
for module in pkgutil.iter_modules(fused_eager.cache.__path__):
    importlib.import_module("fused_eager.cache." + module.name)
heavy = {"torch", "jax", "jaxlib", "numpy", "fsspec", "redis", "zstandard", "cryptography", "aiohttp"}
print(sorted(heavy & {name.split(".")[0] for name in sys.modules}))
print(sorted(n for n in sys.modules if n.startswith("fused_eager.") and not n.startswith("fused_eager.cache")))
""")
    assert out == "[]\n[]\n"
