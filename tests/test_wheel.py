"""The wheel, installed alone into an empty environment: every entry point works there, and the sources are inside."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("fused_eager", "cache", "fusion_rules", "pyproject.toml", "README.md", "LICENSE")
HOOK = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"

# What runs in the empty environment: it finds the project nowhere but in the wheel.
ENTRY_POINTS = """
import importlib.metadata, pkgutil, sys
from pathlib import Path

import fused_eager, torch

home = Path(fused_eager.__file__).parent
assert home.is_relative_to(sys.prefix), home
assert (home / "py.typed").exists()
assert [p.name for p in (home / "follower").glob("*.cpp")], "no C++ sources"
assert [p.name for p in (home / "reporting").glob("*.j2")], "no templates"
for module in pkgutil.walk_packages(fused_eager.__path__, "fused_eager."):
    if not module.name.endswith("__main__"):
        __import__(module.name)
        assert Path(sys.modules[module.name].__file__).is_relative_to(home)
for name in fused_eager.__all__:
    assert getattr(fused_eager, name).__doc__

(script,) = [e for e in importlib.metadata.entry_points(group="console_scripts") if e.name == "fused-eager"]
assert callable(script.load())
assert len(fused_eager.fusion_rules.RULES) > 500

x = torch.arange(6.0)
with fused_eager.fused_eager(compile="wait", native="never", progress=False), fused_eager.expect(max_compiles=5):
    y = (x * 2 + 1).sum().item()
assert y == 36.0
assert fused_eager.report().compilations
print("fine")
"""
FOLLOWER = """
from fused_eager.follower import build
build.obstacle() or build.build(patiently=False)
assert build.obstacle() or build.is_built()
"""
COMMANDS = ("run", "report", "diff", "top", "explain", "config", "cache", "warm", "forecast", "export", "ops", "doctor")
pytestmark = pytest.mark.slow


def run(*command: str | Path, folder: Path) -> str:
    # Neither this environment's paths nor the folder with the sources.
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `python -m build --no-isolation` makes: the sdist from the tree, and the wheel from the sdist."""
    folder = tmp_path_factory.mktemp("build")
    tree = folder / "tree"
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        tree.mkdir(exist_ok=True)
        copy(ROOT / name, tree / name)
    run(sys.executable, "-c", HOOK, "build_sdist", folder, folder=tree)
    (sdist,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(sdist, folder / "sdist")
    (unpacked,) = (folder / "sdist").iterdir()
    run(sys.executable, "-c", HOOK, "build_wheel", folder, folder=unpacked)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and with torch and jax from this one's folders, whose .pth files do not count."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "v", folder=folder)
    found = folder / "v" / "bin" / "python"
    install = (sys.executable, "-m", "pip", "--python", found, "install", "-q", "--no-deps", "--no-index", wheel)
    run(*install, folder=folder)
    (site,) = (folder / "v" / "lib").glob("python*/site-packages")
    others = sorted({str(Path(module.__file__ or "").parents[1]) for module in (torch, jax)})
    (site / "others.pth").write_text("\n".join(others) + "\n")
    return found


def test_the_wheel_holds_what_the_tree_holds(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    for folder, package in {"fused_eager": "", "cache": "cache/", "fusion_rules": "fusion_rules/"}.items():
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix != ".pyc":
                assert f"fused_eager/{package}{path.relative_to(ROOT / folder)}" in inside


def test_entry_points_work_from_the_wheel_alone(python: Path, tmp_path: Path) -> None:
    (tmp_path / "entry_points.py").write_text(ENTRY_POINTS)
    assert run(python, "entry_points.py", folder=tmp_path).strip().endswith("fine")


def test_the_follower_is_built_from_the_wheel_alone(python: Path, tmp_path: Path) -> None:
    run(python, "-c", FOLLOWER, folder=tmp_path)


def test_commands_work_from_the_wheel_alone(python: Path, tmp_path: Path) -> None:
    script = python.with_name("fused-eager")
    for command in COMMANDS:
        assert "usage:" in run(script, command, "--help", folder=tmp_path)
    (tmp_path / "program.py").write_text("import torch\nprint(float((torch.ones(3) * 2).sum()))\n")
    log = f"import os; os.environ['FUSED_EAGER_REPORT'] = 'run.jsonl'\n{ENTRY_POINTS}"
    (tmp_path / "logged.py").write_text(log)
    assert run(python, "-m", "fused_eager", "run", "program.py", folder=tmp_path).startswith("6.0")
    run(python, "logged.py", folder=tmp_path)
    run(script, "report", "run.jsonl", "--html", "-o", "run.html", folder=tmp_path)
    assert "<html" in (tmp_path / "run.html").read_text()
    assert "mode = fused" in run(script, "config", folder=tmp_path)
    assert "stats" in run(script, "cache", "--help", folder=tmp_path)
    run(script, "cache", "stats", folder=tmp_path)
