"""The command `cache`, over caches that a real program filled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from fused_eager.cache import Cache, Key, LocalStore, Tier, generate

from fused_eager.commands.cli import main
from fused_eager.compiling import caching, executable
from tests.cached_program import lapack, small
from tests.compiling.test_caching import ROOT, own_process, run

__all__ = ["own_process"]  # the fixture that keeps each test's caches apart


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a cache with three entries, which the environment names."""
    run(small, tmp_path / "cache")
    monkeypatch.setenv("FUSED_EAGER_CACHE", "")
    monkeypatch.setenv("FUSED_EAGER_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def cache(*arguments: str) -> int:
    return main(["cache", *arguments])


def one_entry(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The manifest of the one entry of a cache in `folder`, which the environment names. Nothing is compiled for it."""
    monkeypatch.setenv("FUSED_EAGER_CACHE", "")
    monkeypatch.setenv("FUSED_EAGER_CACHE_DIR", str(folder / "cache"))
    key = Key({"n": 1})
    Cache([Tier(LocalStore(folder / "cache"))]).publish(key, {"x": b"some bytes"})
    return folder / "cache" / "ac" / key.digest


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert cache("ls", "--json", *arguments) == 0
    return json.loads(capsys.readouterr().out)


def test_ls_and_stats(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = listed(capsys)
    assert len(rows) == 3 and {r["tier"] for r in rows} == {"local"}
    assert all(r["bytes"] > 1000 and r["ops"] > 0 and r["seconds"] > 0 and r["versions"]["jax"] for r in rows)
    assert cache("ls") == 0
    out = capsys.readouterr().out
    assert all(r["key"][:16] in out for r in rows) and "3 entries" in out
    assert cache("stats") == 0 and "local: 3 entries" in capsys.readouterr().out
    assert cache("stats", "--json") == 0
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    assert group["bytes"] == sum(r["bytes"] for r in rows)


def test_explain_one_key_and_the_difference_of_two(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(small, filled, check_bounds=False)
    rows = listed(capsys)
    assert cache("explain", rows[0]["key"][:12]) == 0
    parts = json.loads(capsys.readouterr().out)
    assert parts["region"]["m"]["nodes"] and parts["jax"] and parts["cpu"]["m"]["features"]
    twins = [r["key"] for r in rows if r["first_op"] == "index.Tensor"]
    assert cache("explain", *twins) == 0
    assert capsys.readouterr().out.startswith("only check_bounds changed, ")
    assert cache("explain", rows[0]["key"], rows[0]["key"]) == 0
    assert capsys.readouterr().out == "the keys are equal\n"
    assert cache("explain", "zz") == 2 and "0 entries" in capsys.readouterr().err


def test_verify_finds_damage_and_proves_the_rest(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(lapack, filled)
    assert cache("verify") == 0
    assert cache("verify", "--recompile") == 0
    good = capsys.readouterr().out.splitlines()[-1]
    assert good.endswith(" proved, 0 not")
    blob = max((filled / "cas").iterdir(), key=lambda p: p.stat().st_size)
    blob.write_bytes(blob.read_bytes()[:-1])
    assert cache("verify") == 1
    assert "blob-damaged" in capsys.readouterr().out


def test_recompiling_finds_what_digests_cannot(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A writer with bad intentions: good digests over the code of another region."""
    (filled.parent / "evil").mkdir()
    real, codes = executable.to_blobs, []

    def swapped(*made: Any) -> dict[str, bytes]:
        blobs = real(*made)
        codes.append(blobs["executable"])
        return {**blobs, "executable": codes[0]}

    import torch

    x = torch.linspace(-1, 1, 60)

    def two() -> list[Any]:
        return [x.sin().tolist(), x.cos().tolist()]

    with pytest.MonkeyPatch.context() as m:
        m.setattr(caching, "to_blobs", swapped)
        m.setenv("FUSED_EAGER_CACHE_DIR", str(filled.parent / "evil"))
        run(two, filled.parent / "evil")
        assert cache("verify") == 0
        assert cache("verify", "--recompile") == 1
    out = capsys.readouterr().out
    assert "output 0 differs" in out and "1 proved, 1 not" in out


def test_gc(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = next((filled / "ac").iterdir())
    damaged.write_bytes(b"{}")
    assert cache("gc") == 0 and "1 entries deleted" in capsys.readouterr().out
    assert len(listed(capsys)) == 2
    assert cache("gc", "--older-than", "1") == 0
    assert len(listed(capsys)) == 2
    capsys.readouterr()
    assert cache("gc") == 0 and capsys.readouterr().out.startswith("0 entries deleted, 0 evicted")
    assert cache("gc", "--max-bytes", "1") == 0
    assert capsys.readouterr().out.startswith("0 entries deleted, 2 evicted")
    assert sum(p.stat().st_size for p in (filled / "cas").iterdir()) == 0
    assert cache("gc", "--older-than", "0") == 0
    assert listed(capsys) == []


@pytest.mark.parametrize("option", ["--max-bytes=-4", "--older-than=-5", "--older-than=nan"])
def test_gc_deletes_nothing_where_less_than_nothing_is_asked_for(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = one_entry(tmp_path, monkeypatch)
    assert cache("gc", *option.split("=")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert option.partition("=")[0] in line and "0 or more" in line
    assert kept.is_file() and cache("gc", "--max-bytes", "0", "--older-than", "0.5") == 0 and not kept.exists()
    out = capsys.readouterr().out
    assert out.startswith("0 entries deleted, 1 evicted") and ", 0 bytes" not in out


def test_gc_bounds_folders_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSED_EAGER_CACHE", "")
    monkeypatch.setenv("FUSED_EAGER_CACHE_DIR", str(tmp_path))
    assert cache("gc", "--max-bytes", "5", "--store", "http://localhost:1/x") == 2
    assert "--max-bytes bounds a folder, and http" in capsys.readouterr().err


def test_export_of_no_store_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSED_EAGER_CACHE", "")
    monkeypatch.setenv("FUSED_EAGER_CACHE_BYTES", "0")
    assert cache("export", str(tmp_path / "x")) == 2
    assert "no store to export from" in capsys.readouterr().err


def test_what_is_no_bundle_is_named_with_what_makes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = one_entry(tmp_path, monkeypatch)
    text, other = tmp_path / "notes.txt", tmp_path / "other.tar"
    text.write_text("no tar")
    with tarfile.open(other, "w") as tar:
        tar.add(text, "notes.txt")
    for command in ("import", "warm"):
        for file in (text, other):
            assert cache(command, str(file)) == 1
            (line,) = capsys.readouterr().err.splitlines()
            assert f"{file} is no bundle" in line and "cache export" in line
    nowhere = str(tmp_path / "nowhere" / "x")
    for file in (nowhere, str(kept.parent)):
        assert cache("export", file) == 1
        error = capsys.readouterr().err
        assert repr(file) in error and ".tmp" not in error
    assert not list(tmp_path.rglob("*.tmp"))
    empty = str(tmp_path / "empty.tar")
    assert cache("export", "--store", str(tmp_path / "none"), empty) == 0 and cache("import", empty) == 0


def test_a_bundle_moves_a_cache(
    filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = str(tmp_path / "bundle.tar")
    assert cache("export", bundle) == 0
    monkeypatch.setenv("FUSED_EAGER_CACHE_DIR", str(tmp_path / "elsewhere"))
    capsys.readouterr()
    assert cache("import", bundle) == 1 and "--unsigned" in capsys.readouterr().out  # nobody vouches for it
    assert cache("import", bundle, "--unsigned") == 0
    assert "compile" not in run(small, tmp_path / "elsewhere")[1]


def test_warm_compiles_what_others_will_need(filled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = str(tmp_path / "bundle.tar")
    assert cache("export", bundle) == 0
    environ = {
        **os.environ, "FUSED_EAGER_CACHE_DIR": str(tmp_path / "there"), "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
    }  # fmt: skip
    command = [sys.executable, "-m", "fused_eager", "cache", "warm", bundle, "--unsigned"]
    for expected in ("3 compiled\n", "3 there already\n"):
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200)
        assert (done.returncode, done.stdout) == (0, expected), done.stderr
    program = [sys.executable, "-m", "tests.cached_program", "small"]
    done = subprocess.run(program, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200)
    assert json.loads(done.stdout)["compilations"] == 0


def test_a_store_of_its_own(filled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(small, tmp_path / "fresh", cache=f"file://{tmp_path}/shared", cache_unsigned=True)
    assert len(listed(capsys, "--store", f"{tmp_path}/shared")) == 3
    assert cache("verify", "--store", f"{tmp_path}/shared") == 1  # unsigned, and nobody said to believe that
    assert "unsigned" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["ed25519", "hmac-sha256"])
def test_keygen_makes_keys_that_work(kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cache("keygen", kind) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# writer" and lines[2] == "# reader"
    for name, line in (("writer", lines[1]), ("reader", lines[3])):
        (tmp_path / name).write_text(line)
    shared = f"file://{tmp_path}/shared"
    expected, _ = run(small, tmp_path / "a", cache=shared, cache_keys=str(tmp_path / "writer"))
    value, kinds = run(small, tmp_path / "b", cache=shared, cache_keys=str(tmp_path / "reader"))
    assert value == expected and "compile" not in kinds
    (tmp_path / "stranger").write_text(generate(kind)["reader"])
    assert "compile" in run(small, tmp_path / "c", cache=shared, cache_keys=str(tmp_path / "stranger"))[1]


def test_wrong_calls(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cache("ls") == 2 and "the cache is off" in capsys.readouterr().err
    monkeypatch.setenv("FUSED_EAGER_CACHE", "nonsense")
    assert cache("ls") == 2 and "neither a URL" in capsys.readouterr().err
    monkeypatch.setenv("FUSED_EAGER_CACHE", "")
    monkeypatch.setenv("FUSED_EAGER_CACHE_DIR", str(tmp_path))
    assert cache("import", str(tmp_path / "nothing.tar")) == 1
