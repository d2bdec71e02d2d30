"""PyTorch's own tests of process groups come to the same in a context."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WAIT = {"compile": "wait"}


def outcomes(options: dict[str, Any] | None, folder: Path, *names: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FUSED_EAGER_")}
    own = {"FUSED_EAGER_CACHE_DIR": str(folder), "FUSED_EAGER_PROGRESS": "0", "OMP_NUM_THREADS": "1"}
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.distributed.torchs", json.dumps(options), *names],
        cwd=ROOT, env={**kept, **own}, stdout=subprocess.PIPE, text=True, timeout=1800,
    )  # fmt: skip
    assert out.returncode == 0
    found: dict[str, str] = json.loads(out.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("options", [WAIT, {}, {"mode": "strict"}, {"mode": "debug"}], ids=str)
def test_all_that_pass_plain(options: dict[str, Any], tmp_path: Path) -> None:
    plain = [name for name, wrong in outcomes(None, tmp_path).items() if not wrong]
    assert len(plain) >= 80
    ours = outcomes(options, tmp_path, *plain)
    assert {name: wrong for name, wrong in ours.items() if wrong} == {}
    assert set(ours) == set(plain)
