"""A client run plain or at a door, in a process of its own, and what it computed compared."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .table import Client, Door

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
SETTINGS = {
    "FUSED_EAGER_RNG": "torch_cpu",  # the device's own numbers would be others than the CPU's
    "FUSED_EAGER_VALIDATE": "1",
    "FUSED_EAGER_PROGRESS": "0",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Run:
    """What a run came to: its results, how long it took, and what it said."""

    status: int
    results: Any
    seconds: float
    said: str


def missing(client: Client) -> str:
    """Why a client cannot be run here; empty if it can."""
    absent = [name for name in client.needs if importlib.util.find_spec(name) is None]
    absent += [name for name in client.beside if not (beside(name) / name).is_dir()]
    return f"{', '.join(absent)} not installed; make test-clients installs it" if absent else ""


def beside(name: str) -> Path:
    """Where make test-clients has put a package that is in a folder of its own."""
    return Path(sys.prefix) / "beside" / name


def run(client: Client, door: Door | None, folder: Path, timeout: float = 900) -> Run:
    """Run a client at a door, or plain. What it keeps goes to `folder`, the compile cache as well."""
    out = folder / "results.pt"
    out.unlink(missing_ok=True)
    script, *arguments = client.command
    way = [] if door is None else ["-m", "fused_eager", "run", *door.ours]
    command = [sys.executable, *way, str(FOLDER / "examples" / script), *arguments, "--out", str(out)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("FUSED_EAGER_", "TESTS_ON"))}
    environment.update(SETTINGS, FUSED_EAGER_CACHE_DIR=str(folder / "cache"))
    paths = [*(str(beside(name)) for name in client.beside), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command += [*(door.theirs if door else ()), *(client.on_device if door and door.theirs else ())]
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
        said = said.decode(errors="replace") if isinstance(said, bytes) else said
        return Run(124, None, timeout, f"{said}\nnot done after {timeout:.0f} s")
    seconds = time.perf_counter() - began
    results = torch.load(out, map_location="cpu", weights_only=False) if out.exists() else None
    return Run(done.returncode, results, seconds, done.stdout)


def differences(plain: Any, found: Any, tolerance: float, skipped: tuple[str, ...] = (), at: str = "") -> list[str]:
    """Where what was computed is not what plain PyTorch computed, in words."""
    if isinstance(plain, dict):
        if plain.keys() != found.keys():
            return [f"{at}: other names: {sorted(map(str, plain.keys() ^ found.keys()))}"]
        kept = [k for k in plain if not (at == "" and k in skipped)]
        return [d for k in kept for d in differences(plain[k], found[k], tolerance, (), f"{at}/{k}")]
    if isinstance(plain, (list, tuple)):
        if len(plain) != len(found):
            return [f"{at}: {len(found)} of them, not {len(plain)}"]
        pairs = enumerate(zip(plain, found, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, tolerance, (), f"{at}[{i}]")]
    if isinstance(plain, torch.Tensor):
        if (plain.shape, plain.dtype) != (found.shape, found.dtype):
            return [f"{at}: {found.dtype}{tuple(found.shape)}, not {plain.dtype}{tuple(plain.shape)}"]
        if not plain.numel():
            return []
        if plain.is_floating_point() and not torch.equal(plain.isnan(), found.cpu().isnan()):
            return [f"{at}: NaN in other places"]
        apart = (plain.double() - found.cpu().double()).nan_to_num(0.0).abs().max().item()
        reach = plain.double().nan_to_num(0.0).abs().max().item()
        allowed = tolerance * max(reach, 0.1) if plain.is_floating_point() else 0.0
        return [] if apart <= allowed else [f"{at}: {apart:.2e} apart, {allowed:.2e} is allowed"]
    if isinstance(plain, float) and plain == plain:
        return [] if abs(plain - found) <= tolerance * max(abs(plain), 0.1) else [f"{at}: {found}, not {plain}"]
    return [] if plain == found or (plain != plain and found != found) else [f"{at}: {found}, not {plain}"]
