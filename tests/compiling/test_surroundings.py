"""Surroundings: whatever changes machine code besides the region changes the key, and nothing else does."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from fused_eager.cache import Key, Unencodable

from fused_eager.compiling import surroundings
from fused_eager.quiet import default_dtype


@pytest.fixture(autouse=True)
def looked_at_anew() -> Iterator[None]:
    """Each test sees this machine for the first time, and leaves nothing of what it pretended."""
    cached = (surroundings.lowering_digest, surroundings.cpu, surroundings._of_process)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def digest() -> str:
    return Key(surroundings.parts(True, "")).digest


@contextmanager
def patched(where: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as m:
        m.setattr(where, name, value)
        yield


@contextmanager
def torch_level(level: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(level)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def cpuinfo(change: Callable[[str], str]) -> Iterator[None]:
    real = Path("/proc/cpuinfo").read_text()
    read = Path.read_text
    with patched(Path, "read_text", lambda p, *a: change(real) if str(p) == "/proc/cpuinfo" else read(p, *a)):
        yield


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as m:
        m.setenv(name, value)
        yield


CHANGES: dict[str, Callable[[], Any]] = {
    "jax": lambda: patched(surroundings.jax, "__version__", "0.0.1"),
    "jaxlib": lambda: patched(surroundings.jaxlib, "__version__", "0.0.1"),
    "torch": lambda: patched(torch, "__version__", "0.0.1"),
    "the lowering": lambda: patched(surroundings, "lowering_digest", lambda: "0" * 64),
    "the processor": lambda: cpuinfo(lambda text: text.replace("model\t", "model\t1")),
    "an instruction set": lambda: cpuinfo(lambda text: text.replace(" sse2 ", " sse2 avx1024 ")),
    "cores": lambda: patched(os, "sched_getaffinity", lambda pid: set(range(97))),
    "XLA's threads": lambda: environment("NPROC", "7"),
    "XLA's flags": lambda: environment("XLA_FLAGS", "--xla_cpu_enable_fast_min_max=true"),
    "JAX's precision": lambda: jax.default_matmul_precision("bfloat16"),
    "JAX's promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "torch's precision": lambda: torch_level("medium"),
    "the default dtype": lambda: default_dtype(torch.float64),
    "the format": lambda: patched(surroundings.executable, "FORMAT", 99),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_what_the_code_depends_on_changes_the_key(name: str) -> None:
    before = digest()
    surroundings._of_process.cache_clear()
    surroundings.cpu.cache_clear()
    with CHANGES[name]():
        assert digest() != before
    surroundings._of_process.cache_clear()
    surroundings.cpu.cache_clear()
    assert digest() == before


def test_the_options_are_in_the_key() -> None:
    found = [surroundings.parts(bounds, salt) for bounds in (True, False) for salt in ("", "a")]
    assert len({Key(parts).digest for parts in found}) == 4


def test_what_does_not_matter_is_not_in_the_key() -> None:
    before = digest()
    for name in ("HOME", "FUSED_EAGER_MAX_REGION", "JAX_COMPILATION_CACHE_DIR"):
        with environment(name, "/elsewhere"):
            surroundings._of_process.cache_clear()
            assert digest() == before
    assert str(os.getcwd()) not in str(surroundings.parts(True, ""))


def test_flags_that_xla_has_read_count_even_if_the_variable_is_gone() -> None:
    code = (
        "import os, jax; jax.devices(); del os.environ['XLA_FLAGS']\n"
        "from fused_eager.compiling import surroundings\nprint(surroundings.parts(True, '')['xla_options'])"
    )
    found = set()
    for isa in ("AVX2", "SSE4_2"):
        environ = {**os.environ, "XLA_FLAGS": f"--xla_cpu_max_isa={isa}"}
        found.add(subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, check=True).stdout)
    assert len(found) == 2


@pytest.mark.parametrize(("name", "module"), [("fusion_rules", "lower_norm"), ("lowering", "xla_cpu/stages")])
def test_the_source_of_every_lowering_is_in_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    before = surroundings.lowering_digest()
    package: types.ModuleType = getattr(surroundings, name)
    shutil.copytree(Path(str(package.__file__)).parent, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(package, "__file__", str(tmp_path / "__init__.py"))
    surroundings.lowering_digest.cache_clear()
    assert surroundings.lowering_digest() == before  # where it lies does not matter
    with open(tmp_path / f"{module}.py", "a") as out:
        out.write("\n")
    surroundings.lowering_digest.cache_clear()
    assert surroundings.lowering_digest() != before


def test_what_lowering_imports_is_in_the_digest_but_for_types(monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[str] = set()
    original = Path.read_bytes

    def watched(path: Path) -> bytes:
        read.add(path.stem)
        return original(path)

    monkeypatch.setattr(Path, "read_bytes", watched)
    surroundings.lowering_digest.cache_clear()
    surroundings.lowering_digest()
    trees = [ast.parse(path.read_text()) for path in Path(surroundings.lowering.__file__).parent.rglob("*.py")]
    found = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level]
    imported = {str(n.module).rpartition(".")[2] for n in found}
    assert {"images", "stages", "straight_line"} <= imported
    assert imported - {"plan", "stream", "node"} <= read | {"xla_cpu"}
    assert {"turning", "row_blocks", "conv_rows"} <= read  # what is one platform's alone, too


def test_a_machine_that_does_not_say_what_it_is_has_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    with cpuinfo(lambda text: "processor : 0\n"), pytest.raises(Unencodable, match="names no features"):
        surroundings.parts(True, "")

    def gone(path: Path, *rest: Any) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", gone)
    with pytest.raises(Unencodable, match="unknown here"):
        surroundings.origin()


def test_the_origin_tells_machines_apart() -> None:
    here = surroundings.origin()
    assert here.cpu_features and here.device_kind
    surroundings.cpu.cache_clear()
    with cpuinfo(lambda text: text.replace(" sse2 ", " ")):
        assert "CPU features differ" in here.foreign_to(surroundings.origin())
