"""Programs with one fault each, and the same cured: what a forecast says of both. `python -m tests.targets.advice`
prints the table that is in docs/targets.md."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LOOP = """
import sys, torch
from torch import nn
import torch.nn.functional as F
CURED = sys.argv[1] == "cured"
torch.manual_seed(0)
{model}
model = Model().to("tpu", {dtype})
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    loss = model(*batch(step))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
_DENSE = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDE, WIDE) for _ in range(4)])
    def forward(self, x):
        return self.layers(x).float().sum()
def batch(step):
    return (torch.ones(ROWS, WIDE, device="tpu", dtype=DTYPE),)
"""
# By kind of advice: the dtype, and the program, which does it right where CURED is true.
PROGRAMS: dict[str, tuple[str, str]] = {
    "heads": ("torch.bfloat16", """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = 8 if CURED else 16
        self.qkv, self.out = nn.Linear(1024, 3072), nn.Linear(1024, 1024)
    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(b, t, c)).float().sum()
def batch(step):
    return (torch.ones(8, 512, 1024, device="tpu", dtype=torch.bfloat16),)
"""),
    "padding": ("torch.bfloat16", "ROWS = WIDE = 128 if CURED else 136\nDTYPE = torch.bfloat16" + _DENSE),
    "precision": (
        "torch.float32",
        "torch.set_float32_matmul_precision('medium' if CURED else 'highest')\n"
        "ROWS, WIDE, DTYPE = 1024, 1024, torch.float32" + _DENSE,
    ),
    "lookup": ("torch.bfloat16", """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Parameter(torch.randn(128, 768)), nn.Linear(768, 768)
    def forward(self, ids):
        if CURED:
            rows = F.one_hot(ids, 128).to(self.table.dtype) @ self.table
        else:
            rows = F.embedding(ids, self.table)
        return self.out(rows).float().sum()
def batch(step):
    return (torch.zeros(8, 1024, dtype=torch.int64, device="tpu"),)
"""),
    "layout": ("torch.bfloat16", """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            if CURED:
                x = layer(x).relu()
            else:
                x = layer(x.transpose(1, 2).contiguous()).relu().transpose(1, 2).contiguous()
        return x.float().sum()
def batch(step):
    shape = (8, 1024, 512) if CURED else (8, 512, 1024)
    return (torch.ones(shape, device="tpu", dtype=torch.bfloat16),)
"""),
    "rounding": ("torch.bfloat16", """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1024, 1024)
    def forward(self, x):
        out = self.layer(x)
        return out.sum(dtype=torch.float32) if CURED else out.sum()
def batch(step):
    return (torch.ones(4096, 1024, device="tpu", dtype=torch.bfloat16),)
"""),
    "island": ("torch.float32", """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1024, 1024)
    def forward(self, x):
        out = self.layer(x)
        return torch.where(out > 0, out, 0).sum() if CURED else out[out > 0].sum()
def batch(step):
    return (torch.ones(4096, 1024, device="tpu"),)
"""),
    "recompiles": ("torch.float32", """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1024, 1024)
    def forward(self, x):
        return self.layer(x).sum()
def batch(step):
    return (torch.ones(256 if CURED else 128 + 8 * step, 1024, device="tpu"),)
"""),
}  # fmt: skip


@dataclass(frozen=True)
class Figures:
    """Of one program: a step's seconds in each mode, with what the compiler does not count, and the advice by kind."""

    seconds: dict[str, float]
    advice: dict[str, dict[str, Any]]
    failed: dict[str, str]


def figures(kind: str, cured: bool, folder: Path) -> Figures:
    """The forecast of a program for v5e, in a process of its own; entries are kept in the folder."""
    dtype, model = PROGRAMS[kind]
    script = folder / f"{kind}.py"
    script.write_text(_LOOP.format(dtype=dtype, model=model))
    command = [sys.executable, "-m", "fused_eager", "forecast", "--target", "v5e:2x2", "--json", "--jobs", "1"]
    command += ["--steps", "4", "--valueless", str(script), "cured" if cured else "faulty"]
    environ = {**os.environ, "FUSED_EAGER_CACHE": "", "FUSED_EAGER_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    told = json.loads(done.stdout)
    seconds = {mode["name"]: mode["seconds"] + told["uncounted"] for mode in told["modes"]}
    return Figures(seconds, {cure["kind"]: cure for cure in reversed(told["advice"])}, told["failed"])


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=list(PROGRAMS))
    print("| advice | strict, before | after | claimed | gained | fused, before | after |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for kind in parser.parse_args(argv).kinds:
            before, after = (figures(kind, cured, Path(folder)) for cured in (False, True))
            found, left = before.advice.get(kind), after.advice.get(kind)
            claimed = found["seconds"] if found else float("nan")
            us = [1e6 * s for s in (before.seconds["strict"], after.seconds["strict"], claimed,
                                    before.seconds["strict"] - after.seconds["strict"],
                                    before.seconds["fused"], after.seconds["fused"])]  # fmt: skip
            print(f"| {kind} | " + " | ".join(f"{x:.0f} us" for x in us) + " |", flush=True)
            print(found, left, before.failed, after.failed, sorted(before.advice), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
