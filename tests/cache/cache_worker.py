"""What the multi-process tests run in their children: `python cache_worker.py COMMAND ARGUMENTS`."""

from __future__ import annotations

import random
import sys

import cache_alone

cache_alone.install()

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


if __name__ == "__main__":
    {"churn": churn}[sys.argv[1]](*sys.argv[2:])
