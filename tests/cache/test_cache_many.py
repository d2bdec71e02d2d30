"""Many processes on one folder for a minute, and two hosts with addresses of their own on one store."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fused_eager.cache import generate

from tests.services.programs import command

IP, REDIS = command("ip") or [], command("redis-server")
WORKER = Path(__file__).parent / "cache_worker.py"


def used(root: Path) -> int:
    total = 0
    for folder in ("ac", "cas", "quarantine"):
        for path in (root / folder).glob("*"):
            try:
                total += path.stat().st_size
            except FileNotFoundError:  # evicted since it was listed
                pass
    return total


@pytest.mark.slow
def test_64_processes_keep_the_bound_for_a_minute(tmp_path):
    bound, seconds = 1_000_000, 60.0
    root = tmp_path / "cache"
    deadline = str(time.time() + seconds + 30)  # starting 64 interpreters takes a while
    start = [sys.executable, str(WORKER), "busy", str(root), str(bound)]
    processes = [
        subprocess.Popen([*start, str(seed), deadline], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for seed in range(64)
    ]
    most = 0
    while time.time() < float(deadline):
        most = max(most, used(root))
        time.sleep(0.2)
    outs = [p.communicate(timeout=120) for p in processes]
    assert [(p.returncode, err) for p, (_, err) in zip(processes, outs, strict=True) if p.returncode] == []
    rounds = [int(out) for out, _ in outs]
    print(f"{sum(rounds)} rounds, {min(rounds)} to {max(rounds)} a process; at most {most} of {bound} bytes")
    assert min(rounds) > 0
    assert bound / 4 < most <= bound


def ip(*arguments: str) -> None:
    subprocess.run([*IP, *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture
def hosts():
    """Two network namespaces, joined by a cable: (name, address) of each."""
    if not IP or REDIS is None:
        pytest.skip("ip and redis-server are not both there (make test-services gets them)")
    names = [f"fe{os.getpid()}a", f"fe{os.getpid()}b"]
    addresses = ["10.97.31.1", "10.97.31.2"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
            for name, address in zip(names, addresses, strict=True):
                ip("link", "set", name, "netns", name)
                for words in (
                    ("addr", "add", f"{address}/24", "dev", name),
                    ("link", "set", name, "up"),
                    ("link", "set", "lo", "up"),
                ):
                    ip("-n", name, *words)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode()[:200]}")
        yield list(zip(names, addresses, strict=True))
    finally:
        for name in names:
            subprocess.run([*IP, "netns", "del", name], capture_output=True, timeout=20)


def inside(host: str, *start: str, **how) -> subprocess.Popen:
    return subprocess.Popen([*IP, "netns", "exec", host, *start], **how)


@pytest.mark.services
def test_two_hosts_with_their_own_addresses_share_a_store(hosts, tmp_path):
    (first, address), (second, _) = hosts
    server = inside(
        first, *REDIS, "--bind", address, "--protected-mode", "no", "--port", "6391", "--save", "",
        "--dir", str(tmp_path), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert any("Ready to accept connections" in line for line in server.stdout)
        log, keys = tmp_path / "log", generate("hmac-sha256")["writer"]
        processes = []
        for name in (first, second):
            arguments = (f"redis://{address}:6391/0", str(tmp_path / name), keys, "0.05", "5", str(log), "12")
            start = (sys.executable, str(WORKER), "make", *arguments)
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            processes.append(inside(name, *start, **pipes))
        for p in processes:
            assert p.stdout.readline() == "ready\n"
        outs = [p.communicate("\n", timeout=120)[0] for p in processes[::-1]]
        assert outs == ["ok\n", "ok\n"]
        made = [line.split()[0] for line in log.read_text().splitlines()]
        assert len(made) == len(set(made)) == 12
    finally:
        server.terminate()
        server.wait(20)
