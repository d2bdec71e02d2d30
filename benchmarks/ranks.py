"""A training step on several ranks of this host, as `forecast --ranks` predicts it, and as it is.

    python -m benchmarks.ranks --ranks 2,4

Each rank has one core, and where there are fewer cores than ranks, these share them: the prediction is told so. A step
is the fastest of some, in both.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fused_eager.commands.link_times import measured
from fused_eager.reporting.scaling import Rehearsal

ROOT = Path(__file__).parents[1]
GPT = ["--device", "tpu", "--steps", "50", "--layers", "4", "--dim", "128", "--seq", "64", "--batch", "8"]
PROGRAMS = {
    "GPT, DDP": [str(ROOT / "examples/train_gpt_ddp.py"), *GPT],
    "GPT, FSDP2": [str(ROOT / "examples/train_gpt_fsdp.py"), *GPT],
}
STEPS = 8


def _on(core: int) -> Any:
    return partial(os.sched_setaffinity, 0, {core})


def predicted(program: Sequence[str], ranks: int, link: str, cores: Sequence[int]) -> dict[str, Any]:
    """The row of a forecast, by one rank alone on one core."""
    share = max(ranks / len(cores), 1.0)
    command = [sys.executable, "-m", "fused_eager", "forecast", "--json", "--ranks", str(ranks), "--link", link]
    command += ["--compute", str(share), "--steps", str(STEPS)]
    out = subprocess.run([*command, *program], stdout=subprocess.PIPE, check=True, preexec_fn=_on(cores[0]))
    found: dict[str, Any] = json.loads(out.stdout)["rows"][0]
    return found


def real(program: Sequence[str], ranks: int, cores: Sequence[int]) -> float:
    """The seconds of the same step on so many processes."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
        free.close()
        to = Path(folder, "run.json")
        command = [sys.executable, "-m", "fused_eager.commands.rehearsing", "--ranks", "0"]
        command += ["--steps", str(STEPS), "--to", str(to), "--", *program]
        started = []
        for rank in range(ranks):
            env = {"RANK": rank, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "WORLD_SIZE": ranks, "MASTER_PORT": port}
            given = {**os.environ, **{k: str(v) for k, v in env.items()}, "MASTER_ADDR": "localhost"}
            core = cores[rank % len(cores)]
            started.append(subprocess.Popen(command, env=given, stdout=sys.stderr, preexec_fn=_on(core)))
        codes = [process.wait() for process in started]
        assert not any(codes), codes
        ends = Rehearsal.parse(json.loads(to.read_text())).ends
    return min(b - a for a, b in zip(ends[1:], ends[2:], strict=False))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    given = parser.parse_args(argv)
    cores, link = sorted(os.sched_getaffinity(0)), measured()
    print(f"gloo here: {link.alpha * 1e6:.3g} us a message, {link.bandwidth / 1e9:.3g} GB/s, {len(cores)} cores")
    print(f"{'program':<12}{'ranks':>6}{'PREDICTED':>12}{'measured':>12}{'error':>8}")
    for name, program in PROGRAMS.items():
        for ranks in map(int, given.ranks.split(",")):
            it = predicted(program, ranks, f"{link.alpha * 1e6},{link.bandwidth / 1e9}", cores)
            was = real(program, ranks, cores)
            error = it["seconds"] / was - 1
            print(
                f"{name:<12}{ranks:>6}{it['seconds'] * 1e3:>9.1f} ms{was * 1e3:>9.1f} ms{error:>8.0%}"
                f"   (computing {it['compute'] * 1e3:.1f}, sending {it['sending'] * 1e3:.1f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
