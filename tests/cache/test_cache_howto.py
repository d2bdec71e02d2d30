"""docs/cache.md, tried: two hosts (folders of their own) share each kind of store, through the runtime."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from fused_eager.cache import generate

ROOT = Path(__file__).parents[2]


def child(folder: Path, url: str, keys: str) -> dict:
    environ = {
        **os.environ, "FUSED_EAGER_CACHE": url, "FUSED_EAGER_CACHE_DIR": str(folder), "FUSED_EAGER_CACHE_KEYS": "env:K",
        "K": keys, "FUSED_EAGER_CACHE_TIMEOUT": "60",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.cached_program", "small"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_two_hosts_share_a_store(shared_url, tmp_path):
    made = generate("hmac-sha256")
    first = child(tmp_path / "a", shared_url, made["writer"])
    second = child(tmp_path / "b", shared_url, made["reader"])
    stranger = child(tmp_path / "c", shared_url, generate("hmac-sha256")["writer"])
    assert first["flushed"] and first["compilations"] == 3
    assert second["compilations"] == second["traces"] == 0 and second["counts"]["cache-load"] == 3
    assert stranger["compilations"] == 3  # nobody it knows vouches for them
    assert first["value"] == second["value"] == stranger["value"]
