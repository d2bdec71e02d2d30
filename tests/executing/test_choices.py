"""The measured way to run a segment travels through the compile cache; what is wrong with it stays there."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_eager.cache import generate

from fused_eager.commands.cli import main
from fused_eager.compiling import caching, surroundings
from fused_eager.executing import choices, load
from fused_eager.executing.choices import Absurd, from_bytes, to_bytes
from fused_eager.policy import autotuner
from fused_eager.policy.autotuner import FLUSHES
from fused_eager.policy.segment import AGAIN, Choice
from fused_eager.policy.times import SAMPLES, SURPRISES
from tests.cached_program import autotuned, small
from tests.compiling.test_caching import _machine, child, own_process, run
from tests.streams import events, open_stream

__all__ = ["own_process"]  # the fixture that keeps each test's caches apart

MEASURED = [False] * (1 + SAMPLES) + [True] * (15 - SAMPLES)  # the first round compiles
ADOPTED = [False] * 2 + [True] * 14
KEYS = generate("ed25519")


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    autotuner.forget()


def process(
    folder: Path, program: Callable[[], Any] = autotuned, **options: Any
) -> tuple[list[bool], list[dict[str, Any]], list[str]]:
    """What `paced` did in a process that knows only the cache in `folder`: its ways, its choices, and what became of
    the questions and answers."""
    autotuner.forget()
    with events("choice", "cache-choice") as seen:
        ways, _ = run(program, folder, **{"native": "measured", **options})
    told = [e.data for e in seen if e.kind == "choice"]
    return ways, told, [e.data["outcome"] for e in seen if e.kind == "cache-choice"]


# ---- a second process --------------------------------------------------------------------------------------------


@pytest.mark.slow  # by one process, as if it were two, in every run
def test_a_second_process_takes_the_choice_without_measuring(tmp_path: Path) -> None:
    environ = {"FUSED_EAGER_NATIVE": "measured"}
    cold, warm = child("autotuned", tmp_path, **environ), child("autotuned", tmp_path, **environ)
    assert cold["value"] == MEASURED and warm["value"] == ADOPTED
    assert cold["counts"]["choice absent"] == cold["counts"]["choice written"] == 1
    assert warm["counts"]["choice found"] == 1 and "choice written" not in warm["counts"]
    assert "cache-publish" not in warm["counts"] and "compile" not in warm["counts"]


def test_what_was_chosen_is_told_as_remembered(tmp_path: Path) -> None:
    _, (here,), outcomes = process(tmp_path)
    assert outcomes == ["absent", "written"]
    _, (there,), outcomes = process(tmp_path)
    assert outcomes == ["found"]
    assert (here["remembered"], there["remembered"]) == (False, True)
    assert all(here[name] == there[name] for name in ("site", "native", "fused_s", "native_s"))


def test_fused_is_a_choice_too(tmp_path: Path) -> None:
    program = functools.partial(autotuned, fused=1.0, native=2.0)
    ways, _, _ = process(tmp_path, program)
    assert any(ways)
    ways, (told,), _ = process(tmp_path, program)
    assert not any(ways) and told["remembered"] and not told["native"]


def test_a_choice_that_is_wrong_here_is_found_out_measured_and_replaced(tmp_path: Path) -> None:
    process(tmp_path)
    program = functools.partial(autotuned, fused=2.0, native=40.0, rounds=32)
    ways, told, outcomes = process(tmp_path, program)
    assert ways[2 : 2 + SURPRISES] == [True] * SURPRISES and not any(ways[-8:])
    assert [(t["remembered"], t["native"]) for t in told] == [(True, True), (False, False)]
    assert outcomes == ["found", "written"]
    ways, (told,), _ = process(tmp_path, program)
    assert not any(ways) and told["remembered"]


def test_a_remembered_choice_is_tried_again_as_one_that_was_measured_here(tmp_path: Path) -> None:
    program = functools.partial(autotuned, rounds=AGAIN + 16)
    process(tmp_path)
    ways, told, outcomes = process(tmp_path, program)
    assert ways[2 : 2 + AGAIN] == [True] * AGAIN and not all(ways[2 + AGAIN :])
    assert [t["remembered"] for t in told] == [True, False]
    assert outcomes == ["found", "confirmed"]  # and the stores are left alone


def test_lines_and_names_do_not_matter(tmp_path: Path) -> None:
    def elsewhere() -> list[bool]:
        return autotuned()

    elsewhere.__code__ = elsewhere.__code__.replace(co_filename="/elsewhere/train.py")
    process(tmp_path)
    assert process(tmp_path, elsewhere)[0] == ADOPTED


def test_it_travels_through_a_shared_store_by_signature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = {"cache": f"file://{tmp_path}/shared", "cache_keys": "env:TEST_KEYS"}
    monkeypatch.setenv("TEST_KEYS", KEYS["writer"])
    process(tmp_path / "a", **shared)
    monkeypatch.setenv("TEST_KEYS", KEYS["reader"])
    assert process(tmp_path / "b", **shared)[0] == ADOPTED
    assert process(tmp_path / "b", cache="")[0] == ADOPTED  # reading has filled the nearer store
    monkeypatch.setenv("TEST_KEYS", generate("ed25519")["reader"])
    ways, _, outcomes = process(tmp_path / "c", **shared)
    assert ways == MEASURED and outcomes[0] == "unknown-signer"


# ---- who does not share ------------------------------------------------------------------------------------------


def test_another_processor_measures_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process(tmp_path)
    with monkeypatch.context() as m:
        _machine(m, "avx2", "fma")
        assert process(tmp_path)[0] == MEASURED
    surroundings._of_process.cache_clear()
    assert process(tmp_path)[0] == ADOPTED


@pytest.mark.parametrize("what", ["device", "cores"])
def test_another_device_or_number_of_cores_is_another_key(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, before = (("xla", "0" * 64),), dict(surroundings._of_process())
    here = choices.key(pieces, "", 1)
    if what == "device":
        other = {"backend": {**before["backend"], "device": "another"}}
    else:
        other = {"threads": {**before["threads"], "cores": 1000}}
    monkeypatch.setattr(surroundings, "_of_process", lambda: {**before, **other})
    assert choices.key(pieces, "", 1) != here


def test_the_key_of_a_choice_is_all_that_it_depends_on() -> None:
    keys = [
        choices.key((("xla", "0" * 64),), "", 1),
        choices.key((("xla", "0" * 64),), "", 2),
        choices.key((("xla", "0" * 64),), "salt", 1),
        choices.key((("aten", "0" * 64),), "", 1),
        choices.key((("xla", "1" * 64),), "", 1),
        choices.key((("xla", "0" * 64), ("xla", "1" * 64)), "", 1),
        choices.key((("xla", "1" * 64), ("xla", "0" * 64)), "", 1),
    ]
    assert len({k.digest for k in keys}) == len(keys)
    assert all(choices.is_choice(k.parts) and k.parts["cpu"] and k.parts["backend"] and k.parts["torch"] for k in keys)


def test_another_number_of_threads_measures_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process(tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert process(tmp_path)[0] == MEASURED


@pytest.mark.parametrize("options", [{"compile": "blocking"}, {"native": "never"}, {"mode": "strict"}], ids=str)
def test_where_nothing_is_measured_nothing_is_taken(options: dict[str, str], tmp_path: Path) -> None:
    process(tmp_path)
    ways, told, outcomes = process(tmp_path, **options)
    assert not any(ways) and not told and not outcomes


# ---- what is not kept --------------------------------------------------------------------------------------------


def test_a_segment_with_a_region_that_has_no_key_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise caching.Unencodable("region", "nothing is known of it")

    monkeypatch.setattr(caching.canonical, "to_parts", refuse)
    ways, _, outcomes = process(tmp_path)
    assert ways == MEASURED and set(outcomes) == {"no-key"}


def test_regions_on_aten_are_part_of_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def program() -> list[Any]:
        x = torch.linspace(-1, 1, 8)
        for _ in range(3):
            (x.relu() * 2).sum().item()
        return [ran for s in autotuner.SEGMENTS.values() for ran in s.ran.values()]

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("XLA does not want to")

    (ran,), _, _ = process(tmp_path, program)
    monkeypatch.setattr(load, "load_or_compile", fails)
    (native,), _, _ = process(tmp_path, program)
    ((whole,),), (islands,) = ran, native
    assert whole[0] == "xla" and {how for how, _ in islands} == {"aten"}
    assert all(len(digest) == 64 for _, digest in (whole, *islands))


def test_what_cannot_be_told_from_others_is_not_kept() -> None:
    assert choices._pieces(()) == choices._pieces(((),)) == "no-region"
    assert choices._pieces(((("xla", "a"),), None)) == "no-key"
    assert choices._pieces(((("xla", "a"),), (("aten", "b"), ("xla", "c")))) == (
        ("xla", "a"), ("aten", "b"), ("xla", "c"),
    )  # fmt: skip
    own = autotuner.Autotuner()
    for _ in range(2 * FLUSHES):
        own.flushed((("xla", "a"),))
    assert choices._pieces(tuple(own.flushes)) == "too-long"


# ---- damage ------------------------------------------------------------------------------------------------------


GOOD = {"format": 1, "native": True, "fused_s": 2.0, "native_s": 1}
ABSURD = [
    b"",
    b"not json",
    b"\xff\xfe",
    b"[" * 1000,
    b" " * 2000 + json.dumps(GOOD).encode(),
    b"[]",
    b"null",
    b"{}",
    *(
        json.dumps({**GOOD, **change}).encode()
        for change in (
            {"format": 2}, {"format": True}, {"format": "1"}, {"native": 1}, {"native": None}, {"native": "yes"},
            {"fused_s": -1.0}, {"native_s": 0}, {"native_s": True}, {"fused_s": "2"}, {"fused_s": float("nan")},
            {"fused_s": float("inf")}, {"native_s": 10**300}, {"native_s": 3.0}, {"more": 1}, {"fused_s": [2.0]},
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("data", ABSURD, ids=lambda data: repr(data[:70]))
def test_absurd_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(Absurd):
        from_bytes(data)


def test_a_choice_comes_back_from_its_bytes() -> None:
    for choice in (Choice(True, 2.0, 1.0), Choice(False, 1e-6, 0.125)):
        assert from_bytes(to_bytes(choice)) == choice
    assert from_bytes(json.dumps(GOOD).encode()) == Choice(True, 2.0, 1.0)


def test_the_entry_is_what_the_format_says(tmp_path: Path) -> None:
    """Section 8 of docs/cache_format.md."""
    process(tmp_path)
    manifests = [json.loads(path.read_text()) for path in (tmp_path / "ac").iterdir()]
    (choice,) = [m for m in manifests if "choice" in m["parts"]]
    regions = {m["key"]: set(m["parts"]) for m in manifests if "region" in m["parts"]}
    segment = choice["parts"]["choice"]["m"]
    assert set(segment) == {"format", "regions"} and segment["format"] == 1
    assert segment["regions"] and all(who == "xla" and digest in regions for who, digest in segment["regions"])
    only_regions = {"region", "format", "numerics", "check_bounds"}
    assert set(choice["parts"]) == set.union(*regions.values()) - only_regions | {"choice", "follower"}
    assert choice["parts"]["follower"] in ("compiled", "python")
    assert set(choice["parts"]["threads"]["m"]) == {"cores", "NPROC", "torch"}
    (blob,) = choice["blobs"]
    stored = json.loads((tmp_path / "cas" / blob["sha256"]).read_text())
    assert (blob["name"], blob["compression"]) == ("choice", "none")
    assert stored == {"format": 1, "native": True, "fused_s": 2.0, "native_s": 1.0}


@pytest.mark.parametrize("data", [ABSURD[1], ABSURD[-4]], ids=["no JSON", "a huge time"])
def test_an_absurd_entry_is_counted_and_measured_over(data: bytes, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as m:
        m.setattr(choices, "to_bytes", lambda choice: data)
        process(tmp_path)
    ways, _, outcomes = process(tmp_path)
    assert ways == MEASURED and outcomes == ["absurd", "written"]
    assert process(tmp_path)[0] == ADOPTED


def _blob_of_choice(folder: Path) -> Path:
    return next(p for p in (folder / "cas").iterdir() if p.read_bytes().startswith(b'{"format": 1, "native"'))


def test_a_damaged_entry_is_put_aside_and_measured_over(tmp_path: Path) -> None:
    process(tmp_path)
    blob = _blob_of_choice(tmp_path)
    blob.write_bytes(blob.read_bytes().replace(b"true", b"tru3"))
    ways, _, outcomes = process(tmp_path)
    assert ways == MEASURED and outcomes == ["blob-damaged", "written"]
    blob.unlink()
    assert process(tmp_path)[2] == ["blob-missing", "written"]
    assert process(tmp_path)[0] == ADOPTED


def test_a_cache_that_raises_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*args: Any) -> Any:
        raise ZeroDivisionError("as no store does")

    monkeypatch.setattr(caching.Cache, "peek", breaks)
    monkeypatch.setattr(choices, "to_bytes", breaks)
    ways, _, outcomes = process(tmp_path)
    assert ways == MEASURED and set(outcomes) == {"unusable"}


def test_without_a_cache_it_is_measured_as_ever(tmp_path: Path) -> None:
    ways, _, outcomes = process(tmp_path, cache="off")
    assert ways == MEASURED and not outcomes


# ---- the command `cache` -----------------------------------------------------------------------------------------


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a cache with regions and one choice, which the environment names."""
    run(small, tmp_path / "cache")
    process(tmp_path / "cache")
    monkeypatch.setenv("FUSED_EAGER_CACHE", "")
    monkeypatch.setenv("FUSED_EAGER_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main(["cache", *arguments]) == code
    return capsys.readouterr().out


def test_it_is_listed_and_explained(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(said(capsys, "ls", "--json"))
    (row,) = [r for r in rows if r["kind"] == "choice"]
    assert row["choice"] == {"native": True, "fused_s": 2.0, "native_s": 1.0}
    assert all(r["choice"] is None and r["ops"] for r in rows if r["kind"] == "region")
    assert "choice: native, 2000.00 ms fused, 1000.00 ms natively" in said(capsys, "ls")
    assert f"{len(rows)} entries, 1 of them choices" in said(capsys, "stats")
    (group,) = json.loads(said(capsys, "stats", "--json"))["groups"]
    assert group["choices"] == 1
    parts = json.loads(said(capsys, "explain", row["key"]))
    ((how, digest),) = parts["choice"]["m"]["regions"]
    assert how == "xla" and digest in {r["key"] for r in rows if r["kind"] == "region"}
    other = next(r["key"] for r in rows if r["kind"] == "region")
    assert "choice" in said(capsys, "explain", row["key"], other)


def test_it_is_verified_and_not_recompiled(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = len(json.loads(said(capsys, "ls", "--json")))
    assert said(capsys, "verify") == f"{entries} sound, 0 not\n"
    out = said(capsys, "verify", "--recompile")
    assert out.splitlines()[-1] == f"{entries - 1} proved, 0 not, 1 choices, which are measured and not compiled"
    blob = _blob_of_choice(filled)
    blob.write_bytes(blob.read_bytes()[:-1] + b" ")
    for arguments in (["verify"], ["verify", "--recompile"]):
        assert "blob-damaged" in said(capsys, *arguments, code=1)


def test_it_moves_in_a_bundle_and_is_not_warmed(
    filled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = len(json.loads(said(capsys, "ls", "--json")))
    bundle = str(tmp_path / "bundle")
    assert f"{entries} entries written" in said(capsys, "export", bundle)
    monkeypatch.setenv("FUSED_EAGER_CACHE_DIR", str(tmp_path / "other"))
    caching._KEEPERS.clear()
    out = said(capsys, "warm", bundle, "--unsigned")
    assert "1 skipped: choices" in out and "failed" not in out and f"{entries - 1} compiled" in out
    assert f"{entries} entries imported, 0 refused" in said(capsys, "import", bundle, "--unsigned")
    assert process(tmp_path / "other")[0] == ADOPTED


def test_it_is_deleted_when_it_is_old(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = len(json.loads(said(capsys, "ls", "--json")))
    assert f"{entries} entries deleted" in said(capsys, "gc", "--older-than", "0")
    assert process(filled)[0] == MEASURED


def test_one_flush_per_segment_is_noted_and_forgotten(tmp_path: Path) -> None:
    def program() -> list[int]:
        x, counts = torch.linspace(-1, 1, 8), []
        for _ in range(3):
            (x * 2).sum().item()
            counts.append(len(open_stream().policy.autotuner.flushes))
        return counts

    assert process(tmp_path, program)[0] == [0, 0, 0]
