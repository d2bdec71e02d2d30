"""The tutorial "A shared cache for a team": one host compiles, another loads, and nobody else is believed."""

import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """
import torch
from fused_eager import fused_eager, report

with fused_eager(compile="wait", native="never"):
    x = torch.ones(1000, 1000)
    for _ in range(3):
        x = torch.sin(x) * 2 + 1
        value = x.mean().item()
print("value", round(value, 3), "compiled", report().compilations, "loaded", len(report().facts.loads))
"""


def keygen():
    command = [sys.executable, "-m", "fused_eager", "cache", "keygen", "ed25519"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return [line for line in lines if line.startswith("ed25519-")]


def host(name, folder, keys):
    """Run the program as on another machine: with a cache folder of its own, and the store that all share."""
    options = [f"cache_dir={folder / name}", f"cache={folder / 'shared'}", f"cache_keys={keys}"]
    arguments = [part for option in options for part in ("--option", option)]
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "fused_eager", "run", *arguments, str(folder / "program.py")]
    print(name, subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip())


with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    private, public = keygen()
    (folder / "writer").write_text(private + "\n")
    (folder / "reader").write_text(public + "\n")
    (folder / "stranger").write_text(keygen()[1] + "\n")

    host("builder", folder, folder / "writer")
    host("laptop", folder, folder / "reader")
    host("stranger", folder, folder / "stranger")
