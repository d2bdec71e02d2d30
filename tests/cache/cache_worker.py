"""What the multi-process tests run in their children: `python cache_worker.py COMMAND ARGUMENTS`."""

from __future__ import annotations

import os
import random
import sys
import time

import cache_alone

cache_alone.install()

from fused_eager.cache import Cache, Entry, Key, Lead, Tier, open_cache  # noqa: E402
from fused_eager.cache.local import LocalStore  # noqa: E402
from fused_eager.cache.store import blob_name  # noqa: E402


def churn(root: str, bound: str, seed: str, rounds: str) -> None:
    """Writes and reads random blobs; prints "ok" when nothing was ever wrong."""
    rng = random.Random(int(seed))
    store = LocalStore(root, max_bytes=int(bound), lock_wait_s=30.0)
    if int(rounds) > 1000:
        print("started", flush=True)
    for _ in range(int(rounds)):
        data = bytes([rng.randrange(40)]) * rng.randrange(1, 30_000)
        store.put(blob_name(data), data)
        for stat in list(store.list("cas"))[:2]:
            got = store.get(stat.name, 1 << 20)
            assert got is None or blob_name(got) == stat.name
    print("ok")


def busy(root: str, bound: str, seed: str, deadline: str) -> None:
    """Publishes and looks up entries until then; prints how many rounds. Raises if one is ever wrong."""
    rng = random.Random(int(seed))
    cache = Cache([Tier(LocalStore(root, max_bytes=int(bound), lock_wait_s=30.0))])
    rounds = 0
    while time.time() < float(deadline):
        key = Key({"n": rng.randrange(400)})
        blobs = {"executable": key.digest.encode() * 200, "noise": random.Random(key.digest).randbytes(4000)}
        found = cache.lookup(key)
        if isinstance(found, Entry):
            assert found.blobs == blobs
        elif cache.publish(key, blobs).refused:
            raise RuntimeError(cache.stats())
        rounds += 1
    print(rounds)


def make(urls: str, local: str, keys: str, seconds: str, ttl: str, log: str, count: str) -> None:
    """Wants `count` keys, in an order of its own; "compiles" what it leads, with a line in `log` for each."""
    cache = open_cache(urls, local_dir=local, keys=keys.encode(), lease_ttl_s=float(ttl), timeout_s=30.0)
    print("ready", flush=True)
    sys.stdin.readline()
    wanted = [Key({"n": n}) for n in range(int(count))]
    random.Random(local).shuffle(wanted)
    for key in wanted:
        blobs = {"executable": key.digest.encode() * 100}
        got = cache.fetch(key, wait_s=60.0)
        if not isinstance(got, Entry):
            with open(log, "a") as out:  # O_APPEND: lines of many processes do not mix
                out.write(f"{key.digest} {os.getpid()} {type(got).__name__}\n")
            time.sleep(float(seconds))
            cache.publish(key, blobs, lead=got if isinstance(got, Lead) else None)
        else:
            assert got.blobs == blobs
    assert cache.close(60.0)
    print("ok")


if __name__ == "__main__":
    {"busy": busy, "churn": churn, "make": make}[sys.argv[1]](*sys.argv[2:])
