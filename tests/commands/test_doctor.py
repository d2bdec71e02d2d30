"""Doctor: each known-bad combination is found where it holds and nowhere else; what is printed is complete."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from fused_eager.cache import default_root

from fused_eager.commands import diagnostics, doctor, features
from fused_eager.commands.diagnostics import Facts, gather
from fused_eager.commands.doctor import CHECKS, describe, findings, version_of
from fused_eager.config import OptionError
from fused_eager.executing import load

GOOD = Facts(
    python="3.11.7",
    versions={"torch": "2.13.0+cpu", "jax": "0.10.2", "jaxlib": "0.10.2", "numpy": "2.4.6", "fused-eager": None},
    jaxlib_wanted="jaxlib<=0.10.2,>=0.10.1",
    cores=2,
    torch_devices=("cpu",),
    torch_threads=2,
    torch_openmp=True,
    jax_devices=("cpu:0 (cpu)",),
    environment={"OMP_WAIT_POLICY": "passive", "XLA_FLAGS": "--xla_cpu_enable_fast_math=false", "JAX_PLATFORMS": "cpu"},
)


def versions(**changed: str | None) -> dict[str, Any]:
    return {"versions": {**GOOD.versions, **changed}}


def environment(**changed: str) -> dict[str, Any]:
    return {"environment": {**GOOD.environment, **changed}}


# Every check with facts under which it alone must speak, and a word that its text must have.
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("package-missing", versions(numpy=None), "numpy"),
    ("something-fails", {"failures": {"jax": "ImportError: no such symbol"}}, "no such symbol"),
    ("bad-option", {"options": "option 'mode' cannot be 'fast'"}, "'fast'"),
    ("torch-too-old", versions(torch="2.10.1+cu128"), "2.10.1"),
    ("newer-than-tested", versions(torch="3.0.0"), "torch is 3.0.0"),
    ("newer-than-tested", {**versions(jaxlib="0.13.0"), "jaxlib_wanted": "jaxlib"}, "jaxlib is 0.13.0"),
    ("jaxlib-mismatch", versions(jaxlib="0.10.3"), "0.10.3"),
    ("jaxlib-mismatch", versions(jaxlib="0.9.9"), "0.9.9"),
    ("fast-math", environment(XLA_FLAGS="--a --xla_cpu_enable_fast_math=true"), "fast_math"),
    ("fast-math", environment(XLA_FLAGS="--xla_gpu_enable_fast_min_max --b"), "fast_min_max"),
    ("wide-vectors", environment(XLA_FLAGS="--xla_cpu_prefer_vector_width=512 --b"), "vector_width=512"),
    ("openmp-spins", environment(OMP_WAIT_POLICY=""), "not set"),
    ("openmp-spins", environment(OMP_WAIT_POLICY="ACTIVE"), "ACTIVE"),
    ("too-many-threads", {"torch_threads": 8}, "8 threads on 2"),
    ("jax-preallocates", {"jax_devices": ("gpu:0 (NVIDIA)", "cpu:0 (cpu)")}, "three quarters"),
    ("gpu-not-fused", {"torch_devices": ("cpu", "cuda:0")}, "cuda:0"),
    ("jax-without-cpu", environment(JAX_PLATFORMS="tpu"), "tpu"),
    ("jax-no-jit", environment(JAX_DISABLE_JIT="1"), "JAX_DISABLE_JIT=1"),
    ("jax-debug-nans", environment(JAX_DEBUG_NANS="True"), "JAX_DEBUG_NANS"),
    ("jax-matmul-precision", environment(JAX_DEFAULT_MATMUL_PRECISION="bfloat16"), "bfloat16"),
    ("jax-x64", {"jax_x64": True}, "64-bit"),
    ("cache-unwritable", {"cache_problem": "/c cannot be written to"}, "/c"),
    ("cache-without-keys", {"cache_keys": False}, "keys"),
    ("no-follower", {"follower_obstacle": "there is no C++ compiler"}, "no C++ compiler"),
    ("not-cpython", {"implementation": "PyPy"}, "PyPy"),
    ("no-gil", {"gil": False}, "lock"),
]


def test_good_facts_have_no_findings() -> None:
    assert findings(GOOD) == ()
    assert describe(GOOD, ()).endswith("No known problem was found.")


def test_every_check_has_an_example() -> None:
    assert {code for code, _, _ in BAD} == {check.code for check in CHECKS}


@pytest.mark.parametrize(("code", "changed", "word"), BAD)
def test_each_check_speaks_alone_where_it_holds(code: str, changed: dict[str, Any], word: str) -> None:
    (finding,) = findings(dataclasses.replace(GOOD, **changed))
    assert finding.code == code
    assert word in finding.text
    assert finding.cure


@pytest.mark.parametrize(
    "changed",
    [
        {"torch_threads": 1, **environment(OMP_WAIT_POLICY="")},
        {"torch_openmp": False, **environment(OMP_WAIT_POLICY="")},
        {"jax_devices": ("gpu:0 (NVIDIA)",), **environment(XLA_PYTHON_CLIENT_PREALLOCATE="false")},
        {"jax_devices": ("gpu:0 (NVIDIA)",), **environment(XLA_PYTHON_CLIENT_PREALLOCATE="0")},
        environment(JAX_PLATFORMS="cuda,cpu"),
        environment(JAX_DEBUG_NANS="false"),
        environment(XLA_FLAGS="--xla_cpu_enable_fast_mathematics=true"),
        environment(XLA_FLAGS="--xla_cpu_prefer_vector_width=256"),
        versions(torch="2.11.0"),
        versions(torch="2.14.2"),
        versions(jaxlib="0.10.1"),
    ],
)
def test_what_is_cured_is_not_found(changed: dict[str, Any]) -> None:
    assert findings(dataclasses.replace(GOOD, **changed)) == ()


def test_errors_come_first() -> None:
    bad = dataclasses.replace(GOOD, jax_x64=True, gil=False, implementation="PyPy")
    assert [finding.severity for finding in findings(bad)] == ["error", "warning", "note"]


def test_versions_compare_as_numbers() -> None:
    assert version_of("2.13.0+cpu") == (2, 13, 0)
    assert version_of("2.9.1") < version_of("2.11") < version_of("2.11.0rc1")
    assert version_of(None) == version_of("unknown") == ()


def test_gather_finds_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    monkeypatch.setenv("FUSED_EAGER_CACHE", f"{tmp_path},redis://user:secret@host/0")
    facts = gather()
    # A package need not say which build it is.
    assert facts.versions["torch"] in (torch.__version__, torch.__version__.partition("+")[0])
    assert facts.torch_threads == torch.get_num_threads() == 1
    assert "cpu" in facts.torch_devices and facts.jax_devices and facts.cores >= 1
    assert facts.jaxlib_wanted.startswith("jaxlib")
    assert facts.cache == (str(default_root()), str(tmp_path), "redis://***@host/0")
    assert "cache-without-keys" in {finding.code for finding in findings(facts)}
    assert not facts.cache_problem
    assert "secret" not in describe(facts, findings(facts))
    assert set(facts.failures) <= {"storage trap"}


def test_what_raises_while_looking_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    trap = types.ModuleType("fused_eager.devices.host.trap")
    trap.self_test = lambda: "reads of pending memory are not seen"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fused_eager.devices.host.trap", trap)
    monkeypatch.setenv("FUSED_EAGER_MODE", "fast")
    monkeypatch.setattr(diagnostics, "_jax_facts", lambda: (_ for _ in ()).throw(RuntimeError("no backend")))
    facts = gather()
    assert "not seen" in facts.failures["storage trap"]
    assert "'fast'" in facts.options
    assert facts.failures["jax"] == "RuntimeError: no backend"
    assert "torch" not in facts.failures
    (finding,) = [finding for finding in findings(facts) if finding.code == "something-fails"]
    assert finding.severity == "error"


def test_regions_that_do_not_compile_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*args: object) -> None:
        raise TypeError("jaxlib takes other arguments")

    load.forget()
    monkeypatch.setattr("fused_eager.compiling.compile.build", build)
    facts = gather()
    assert facts.failures["fusing"] == "RuntimeError: not compiled: TypeError: jaxlib takes other arguments"
    assert "other arguments" in describe(facts, ())
    assert [finding.severity for finding in findings(facts) if finding.code == "something-fails"] == ["error"]
    load.forget()
    monkeypatch.undo()
    assert "fusing" not in gather().failures


def test_a_working_trap_is_said_to_work(monkeypatch: pytest.MonkeyPatch) -> None:
    trap = types.ModuleType("fused_eager.devices.host.trap")
    trap.self_test = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fused_eager.devices.host.trap", trap)
    facts = gather()
    assert "storage trap" not in facts.failures
    assert any(line.split() == ["storage", "trap", "works"] for line in describe(facts, ()).splitlines())


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert diagnostics._cache_facts() == {"cache": ("off",)}
    monkeypatch.delenv("FUSED_EAGER_CACHE")
    there = (str(tmp_path / "fused_eager"),)
    assert diagnostics._cache_facts() == {"cache": there, "cache_problem": "", "cache_keys": True}
    monkeypatch.setenv("FUSED_EAGER_CACHE_DIR", str(tmp_path / "other"))
    assert diagnostics._cache_facts()["cache"] == (str(tmp_path / "other"),)
    monkeypatch.setenv("FUSED_EAGER_CACHE", f"{tmp_path}/a/b,file://{tmp_path},s3://bucket/x")
    assert diagnostics._cache_facts()["cache_problem"] == "" and list(tmp_path.iterdir()) == []
    monkeypatch.setenv("FUSED_EAGER_CACHE", "a/b")
    with pytest.raises(OptionError, match="'a/b'"):
        diagnostics._cache_facts()


def test_a_cache_that_the_store_refuses_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, everyones = tmp_path / "file", tmp_path / "everyones"
    file.touch()
    everyones.mkdir()
    everyones.chmod(0o777)
    monkeypatch.setenv("FUSED_EAGER_CACHE", "")
    for folder, words in (
        (file, f"{file} is not a folder"),
        (file / "a", f"{file} is not a folder"),
        (Path("/proc/fused_eager"), "/proc cannot be written to"),
        (everyones, f"{everyones} must be yours"),
    ):
        monkeypatch.setenv("FUSED_EAGER_CACHE_DIR", str(folder))
        (finding,) = findings(dataclasses.replace(GOOD, **diagnostics._cache_facts()))
        assert finding.code == "cache-unwritable" and words in finding.text
        assert "FUSED_EAGER_CACHE_DIR" in finding.cure
    # A shared folder may belong to others.
    monkeypatch.setenv("FUSED_EAGER_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("FUSED_EAGER_CACHE", f"{everyones},{file}")
    assert diagnostics._cache_facts()["cache_problem"] == f"io: {file} is not a folder"


@pytest.mark.parametrize(("changed", "code"), [({}, 0), ({"gil": False}, 0), ({"implementation": "PyPy"}, 1)])
def test_the_exit_code_is_one_for_an_error(
    changed: dict[str, Any], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = dataclasses.replace(GOOD, **changed)
    monkeypatch.setattr(doctor, "gather", lambda: facts)
    assert doctor.main([], "doctor") == code
    text = capsys.readouterr().out
    assert doctor.main(["--json"], "doctor") == code
    data = json.loads(capsys.readouterr().out)
    assert data["facts"]["torch_threads"] == 2
    assert len(data["findings"]) == len(changed)
    for finding in data["findings"]:
        assert f"[{finding['code']}]" in text and finding["cure"] in text
    for version in ("2.13.0+cpu", "0.10.2", "3.11.7"):
        assert version in text


def test_every_feature_says_what_it_needs_and_what_installs_it() -> None:
    found = features.obstacles()
    assert list(found) == [feature.name for feature in features.FEATURES]
    text = describe(dataclasses.replace(GOOD, features={**dict.fromkeys(found, ""), "export": "not installed: x"}), ())
    assert "feature redis" in text and "works: a shared cache in Redis" in text
    assert "no: not installed: x; pip install 'fused-eager[export]'" in text


def test_a_feature_that_is_needed_and_cannot_work_is_an_error() -> None:
    facts = dataclasses.replace(GOOD, features={"export": "not installed: flatbuffers", "redis": ""})
    assert findings(facts, ["redis"]) == ()
    (found,) = findings(facts, ["redis", "export"])
    assert (found.code, found.severity) == ("feature-missing", "error")
    assert "flatbuffers" in found.text and found.cure == "pip install 'fused-eager[export]'"


def test_extras_that_features_name_exist() -> None:
    rows = (Path(__file__).parents[2] / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1]
    extras = set(re.findall(r"^(\w[\w-]*) = \[", rows.split("\n[")[0], re.MULTILINE))
    named = {m.group(1) for f in features.FEATURES if (m := re.search(r"fused-eager\[(\w+)\]", f.cure))}
    assert named and named <= extras


def test_the_command_ends_by_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "gather", lambda: dataclasses.replace(GOOD, features={"targets": "no libtpu"}))
    assert doctor.main(["--json"], "doctor") == 0
    capsys.readouterr()
    assert doctor.main(["--need", "targets"], "doctor") == 1
    assert "error: targets" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        doctor.main(["--need", "nothing"], "doctor")
    assert "invalid choice: 'nothing'" in capsys.readouterr().err
