"""Servers that hang, drip, lie, flood and fail: the cache misses in time and goes on with what it has."""

from __future__ import annotations

import random
import socket
import threading
import time

import pytest
from fused_eager.cache.guard import Breaker
from fused_eager.cache.key import Key
from fused_eager.cache.lease import Lead
from fused_eager.cache.local import LocalStore
from fused_eager.cache.read import MISSES
from fused_eager.cache.sign import generate
from fused_eager.cache.store import StoreError
from fused_eager.cache.tiers import Cache, Tier
from fused_eager.cache.url import open_cache, open_store

BLOBS = {"executable": b"native code " * 200, "text": b"hlo"}


class Server:
    """A TCP server that answers as badly as it is told to."""

    def __init__(self, behave):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.closed = threading.Event()
        self.behave = behave
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            try:
                client, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        try:
            with client:
                self.behave(client, self.closed)
        except OSError:
            return  # the client gave up, as it should

    def close(self):
        self.closed.set()
        self.socket.close()


def hang(client, closed):
    closed.wait(60)


def answer(data: bytes):
    def behave(client, closed):
        while client.recv(65536):
            client.sendall(data)

    return behave


def drip(data: bytes):
    """One byte every now and then: no socket time-out ever fires."""

    def behave(client, closed):
        client.recv(65536)
        client.sendall(data)
        while not closed.wait(0.02):
            client.sendall(b"x")

    return behave


def close_at_once(client, closed):
    client.recv(10)


def noise(client, closed):
    rng = random.Random(8)
    while client.recv(65536):
        client.sendall(rng.randbytes(300))


def flood(client, closed):
    """An endless body."""
    client.recv(65536)
    client.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + b"$99999999\r\n")
    while not closed.is_set():
        client.sendall(bytes(1 << 16))


OK = b"HTTP/1.1 200 OK\r\nContent-Length: "
SERVERS = {
    "hang": hang,
    "drip-head": drip(b"HTTP/1.1 200 OK\r\nX: "),
    "drip-body": drip(OK + b"1000000\r\n\r\n"),
    "drip-bulk": drip(b"$1000000\r\n"),
    "close": close_at_once,
    "noise": noise,
    "flood": flood,
    "500": answer(b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\noops"),
    "503": answer(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"),
    "403": answer(b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n"),
    "redirect": answer(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"),
    "html": answer(OK + b"13\r\n\r\n<html></html>"),
    "short-body": answer(OK + b"100000\r\n\r\nabc"),
    "bad-length": answer(OK + b"minus one\r\n\r\n"),
    "wrong-type": answer(b":7\r\n"),
    "error": answer(b"-ERR no\r\n"),
    "denied": answer(b"-NOAUTH Authentication required.\r\n"),
    "loading": answer(b"-LOADING Redis is loading the dataset in memory\r\n"),
    "oom": answer(b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("scheme", ["http", "redis"])
@pytest.mark.parametrize("behaviour", [*SERVERS, "nothing-listens"])
def test_bad_servers(behaviour, scheme, tmp_path):
    if scheme == "redis":
        pytest.importorskip("redis", reason="the package redis is not installed")
    server = Server(SERVERS.get(behaviour, hang))
    if behaviour == "nothing-listens":
        server.close()
    timeout = 0.3
    url = f"{scheme}://127.0.0.1:{server.port}"
    cache = open_cache(url, local_dir=tmp_path / "local", keys=generate("hmac-sha256")["writer"].encode(),
                       timeout_s=timeout)  # fmt: skip
    cache.tiers[-1].write_timeout_s = timeout
    slowest = 0.0
    for i in range(4):
        key = Key({"n": i})
        began = time.monotonic()
        got = cache.lookup(key)
        slowest = max(slowest, time.monotonic() - began)
        assert got.reason in MISSES and got.reason not in ("absent", "off")
        lead = cache.flight(key)  # a server that says yes to everything "holds" the lease for somebody, for a while
        lead = lead if isinstance(lead, Lead) else None
        assert cache.publish(key, BLOBS, lead=lead).written == ("memory", "local")
        assert cache.lookup(key).blobs == BLOBS
    # far below what a hanging server would take; the machine may be busy
    assert slowest < timeout + 10
    assert cache.flush(60)
    assert not cache.stats()[cache.tiers[-1].label].get("hits")
    server.close()


@pytest.mark.parametrize("behaviour", ["hang", "500", "close"])
def test_the_store_itself_codes_its_errors(behaviour):
    server = Server(SERVERS[behaviour])
    store = open_store(f"http://127.0.0.1:{server.port}", timeout_s=0.2)
    expected = {"hang": "timeout", "500": "server-error", "close": "unreachable"}[behaviour]
    name = f"cas/{'a' * 64}"
    for work in (lambda: store.get(name, 10), lambda: store.put(name, b"x" * 100), lambda: store.stat(name),
                 lambda: store.delete(name), lambda: store.swap(name, None, b"x", 1.0)):  # fmt: skip
        with pytest.raises(StoreError) as caught:
            work()
        assert caught.value.code == expected
    server.close()


def test_a_store_that_comes_back_is_used_again(tmp_path):
    """Down, then up: what was refused meanwhile costs misses, and the breaker closes at its next probe."""
    store = LocalStore(tmp_path / "shared", private=False, label="shared")
    now = [0.0]
    tier = Tier(store, shared=True, signed=False, breaker=Breaker(failures=2, pause_s=5, clock=lambda: now[0]))
    cache = Cache([tier])
    (tmp_path / "shared").write_bytes(b"a file where the mount was")
    assert [cache.lookup(Key({"n": n})).reason for n in range(4)] == ["io", "io", "breaker-open", "breaker-open"]
    (tmp_path / "shared").unlink()
    key = Key({"n": 0})
    assert cache.publish(key, BLOBS).queued and cache.flush(30)
    assert cache.lookup(key).reason == "breaker-open"
    now[0] += 6
    assert cache.lookup(key).reason == "absent"
    assert cache.publish(key, BLOBS).queued and cache.flush(30)
    assert cache.lookup(key).blobs == BLOBS
