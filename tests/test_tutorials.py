"""The tutorials' programs run, and the pages show them and what they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fused_eager.follower import build

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"), key=lambda page: page.name)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


# One run of the shared cache's page in twenty was seen to differ, for a cause that is not found: left to the full run.
# Several devices are four processes, one after two. What compile and export show, tests of both doors try as well.
SLOW = {"shared_cache", "several_devices", "compile_and_export"}


@pytest.mark.parametrize(
    "page", [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] if p.stem in SLOW else []) for p in PAGES]
)
def test_a_page_shows_its_program_and_what_that_prints(page: Path, tmp_path: Path) -> None:
    program = ROOT / "examples" / "tutorials" / f"{page.stem}.py"
    shown = blocks(page, "python")
    assert len(shown) > 3
    assert [block for block in shown if block not in program.read_text()] == []
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FUSED_EAGER_")}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    build.lend(tmp_path / "fused_eager")  # else it would be built beside the test, and after it
    done = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "```text" in page.read_text()
    for line in "".join(b for b in blocks(page, "text") if "with fused_eager" not in b).splitlines():
        # The last digit of a loss is the processor's.
        for part in re.sub(r"(\d\.\d\d\d)\d\b", r"\1", line).split("', '"):
            assert re.sub(r"'?\]$", "", part) in done.stdout, f"{part!r} is not in\n{done.stdout}"
