"""What a process imports before it needs it: nothing."""

from __future__ import annotations

import os
import subprocess
import sys

ALONE = """
import sys
import torch
import fused_eager

with fused_eager.fused_eager():
    total = torch.ones(3) + 1
assert total.tolist() == [2.0, 2.0, 2.0]
imported = [m for m in sys.modules if m in ("jax", "torch._dynamo") or m.startswith("fused_eager.fusion_rules.lower_")]
assert not imported, imported
with fused_eager.fused_eager(compile="wait", native="never"):
    total = torch.ones(3) + 1
    assert total.tolist() == [2.0, 2.0, 2.0]
assert "jax" in sys.modules
assert not fused_eager.report().facts.islands
"""

TOGETHER = """
import threading
from fused_eager.fusion_rules.rule import rule_for
import torch

found = []
threads = [threading.Thread(target=lambda: found.append(rule_for(torch.ops.aten.exp.default))) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(found) == 8 and len({id(rule) for rule in found}) == 1 and found[0] is not None
"""


def run(program: str) -> None:
    as_a_user = {name: value for name, value in os.environ.items() if not name.startswith("FUSED_EAGER_")}
    as_a_user["FUSED_EAGER_CACHE"] = "off"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=as_a_user)
    assert done.returncode == 0, done.stderr


def test_what_torch_runs_alone_needs_neither_jax_nor_the_table() -> None:
    run(ALONE)


def test_the_table_is_filled_once_among_threads() -> None:
    run(TOGETHER)
