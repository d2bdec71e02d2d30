"""Real servers for the shared stores, on loopback, one of each per test session."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

import pytest

from tests.services.programs import command


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def have(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def serve(start, ready, log: Path, env=None):
    """Starts a server and waits until `ready()` is true; fails with its log when it ends or stays silent."""
    with open(log, "wb") as out:
        process = subprocess.Popen(start, stdout=out, stderr=out, env=env)
    for _ in range(600):
        if process.poll() is not None:
            break
        if ready():
            return process
        time.sleep(0.05)
    process.kill()
    process.wait()
    raise RuntimeError(f"{start} does not start:\n{log.read_text()[-2000:]}")


def accepts(port: int):
    def ready() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    return ready


def stop(process) -> None:
    process.kill()
    process.wait()


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory):
    server = command("redis-server")
    if server is None:
        pytest.skip("redis-server is not there (make test-services gets it)")
    if not have("redis"):
        pytest.skip("the package redis is not installed")
    folder = tmp_path_factory.mktemp("redis")
    port = free_port()
    start = [*server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = serve(start, accepts(port), folder / "log")
    yield f"redis://127.0.0.1:{port}/0"
    stop(process)


NGINX = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{}}
http {{
  access_log off; client_max_body_size 0; client_body_temp_path {folder}/body; proxy_temp_path {folder}/p;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  server {{
    listen 127.0.0.1:{port}; root {folder}/www;
    location / {{ dav_methods PUT DELETE; create_full_put_path on; }}
    location /readonly/ {{ alias {folder}/www/; limit_except GET {{ deny all; }} }}
  }}
}}
"""


@pytest.fixture(scope="session")
def nginx_url(tmp_path_factory):
    server = command("nginx")
    if server is None:
        pytest.skip("nginx is not there (make test-services gets it)")
    folder = tmp_path_factory.mktemp("nginx")
    (folder / "www").mkdir()
    port = free_port()
    (folder / "conf").write_text(NGINX.format(folder=folder, port=port))
    start = [*server, "-c", str(folder / "conf"), "-p", str(folder), "-e", str(folder / "start.log")]
    process = serve(start, accepts(port), folder / "log")
    yield f"http://127.0.0.1:{port}"
    stop(process)


@pytest.fixture(scope="session")
def s3_url(tmp_path_factory):
    """s3://bucket at a moto server; AWS_* in the environment point every process there."""
    for module in ("moto", "flask", "s3fs"):
        if not have(module):
            pytest.skip(f"the package {module} is not installed (make test-services gets it)")
    folder = tmp_path_factory.mktemp("s3")
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    start = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = serve(start, accepts(port), folder / "log")
    given = {
        "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }  # fmt: skip
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    for _ in range(100):
        try:
            urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT")).close()
            break
        except urllib.error.URLError:
            time.sleep(0.1)
    yield "s3://bucket"
    stop(process)
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


SERVED = [pytest.param(kind, marks=pytest.mark.services) for kind in ("redis", "http", "s3")]
KINDS = ["memory", "local", "file", "fsspec-memory", "fsspec-file", *SERVED]
SHARED = ["file", *SERVED]


def store_url(kind: str, request, tmp_path) -> str:
    """The URL of an empty shared store of this kind; skips, saying why, where its server cannot be had."""
    mark = uuid.uuid4().hex
    if kind == "file":
        return f"file://{tmp_path}/shared"
    if kind == "redis":
        url = request.getfixturevalue("redis_url")  # skips without the package
        from redis import Redis

        Redis.from_url(url).flushall()
        return url
    if kind == "http":
        return f"{request.getfixturevalue('nginx_url')}/{mark}"
    if kind == "s3":
        return f"{request.getfixturevalue('s3_url')}/{mark}"
    if not have("fsspec"):
        pytest.skip("the package fsspec is not installed")
    return f"memory://{mark}"


@pytest.fixture(params=SHARED)
def shared_url(request, tmp_path):
    return store_url(request.param, request, tmp_path)


@pytest.fixture(params=KINDS)
def store(request, tmp_path):
    from fused_eager.cache.fs import FsspecStore
    from fused_eager.cache.local import LocalStore
    from fused_eager.cache.memory import MemoryStore
    from fused_eager.cache.url import open_store

    if request.param == "memory":
        made = MemoryStore()
    elif request.param == "local":
        made = LocalStore(tmp_path / "cache")
    elif request.param == "fsspec-file":
        if not have("fsspec"):
            pytest.skip("the package fsspec is not installed")
        made = FsspecStore(f"file://{tmp_path}/fs")
    else:
        made = open_store(store_url(request.param, request, tmp_path))
    yield made
    made.close()
