"""What `make test-services` stands on: a skip that nobody allowed fails, and programs are found where they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import programs
from .skips import ALLOWED

TESTS = """
import pytest
@pytest.mark.skipif(True, reason="by its mark")
def test_mark(): ...
@pytest.fixture
def server(): pytest.skip("by a fixture")
def test_fixture(server): ...
def test_import(): pytest.importorskip("no_such_module")
def test_allowed(): pytest.skip("network namespaces cannot be made here: no rights")
@pytest.mark.xfail
def test_known(): assert False
"""


def test_a_skip_is_a_failure_unless_its_reason_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.services.skips", "-p", "no:cacheprovider", "--rootdir"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [*command, ".", "."], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1 and "1 failed, 1 skipped, 1 xfailed, 2 errors" in done.stdout
    for reason in ("by its mark", "by a fixture", "could not import 'no_such_module'"):
        assert f"skipped ({reason}" in done.stdout
    assert all(ALLOWED.values())


def test_programs_are_the_systems_or_those_that_were_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "ROOT", tmp_path)
    monkeypatch.setattr(programs, "SBIN", "")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert programs.command("nginx") is None and programs.missing() == list(programs.PROGRAMS)
    library = tmp_path / "usr/lib/x86_64-linux-gnu/deeper/libx.so.1"
    for file in (library, tmp_path / "usr/sbin/nginx"):
        file.parent.mkdir(parents=True)
        file.touch(mode=0o755)
    assert programs.command("nginx") == ["env", f"LD_LIBRARY_PATH={library.parent}", str(tmp_path / "usr/sbin/nginx")]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nginx").touch(mode=0o755)
    assert programs.command("nginx") == [str(tmp_path / "bin/nginx")]


def test_who_cannot_get_them_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "missing", lambda: ["chromium", "redis-server"])
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"Install chromium, redis-server .*chromium-headless-shell redis-server"):
        programs.get()


def test_tests_of_services_do_not_hide_a_whole_module() -> None:
    """A module that is skipped when it is collected has no marks to go by; fixtures skip one by one."""
    for path in Path(__file__).parents[1].rglob("test_*.py"):
        text = path.read_text()
        if path != Path(__file__) and "mark.services" in text:
            assert "allow_module_level" not in text and "\npytest.importorskip" not in text, path
