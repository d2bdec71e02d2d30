"""Runs every client at both doors, and writes the table of what came of it: `python -m tests.clients --write FILE`."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, distributions, packages_distributions, version
from pathlib import Path
from tempfile import TemporaryDirectory

from .running import Run, beside, differences, missing, run
from .table import BOTH, CLIENTS, Client, Door

PAGE = """# Programs that run

Programs in the shape in which PyTorch's examples and the libraries around it publish them, small, with synthetic
data. They know nothing of the library: `python -m fused_eager run program.py` runs them in a context, on CPU tensors,
and `python -m fused_eager run --device tpu program.py --device tpu` on the [device](device.md), which a CPU stands
in for. What they compute (losses, outputs, checkpoints, texts) is compared with plain PyTorch on the CPU.
`make test-clients` runs them and writes this page. (`make test-clients SHARD=1/3` writes the rows of every third
program, within 20 minutes on two cores; `python -m tests.clients --write docs/clients.md NAME` those of one.) The
programs are in `tests/clients/examples/`.

[torchtitan](https://github.com/pytorch/torchtitan)'s trainer has several processes, and no row: version 0.2.2 trains
its debug model on the device by FSDP2 within tensor parallel on four ranks, unmodified, and its losses are those of a
plain loop on the CPU (`tests/clients/test_torchtitan.py`). It cannot run on plain CPU tensors. Version 0.3 wants a
newer torch than 2.13.

    torchrun --nproc-per-node 4 -m fused_eager run --device tpu -m torchtitan.train --job.config_file debug_model.toml

A client without a row has not been run for this page yet. torchvision's detection models are none: PyPI's torchvision
needs CUDA's torch, and without its kernels there are no boxes to suppress (`detection.py` writes that out). torchaudio
runs without its kernels too: of them its loss for transducers is missed, and filters take a loop in Python.

Time is that of the whole process over plain PyTorch's, with an empty compile cache: these programs take a second or two
in all, so what it says is how long compiling takes. (The times of this page were taken on two cores with other work
beside them.) How fast the loops of ten of them are in the end is on [another page](performance.md#loops-of-libraries).

| client | version | door | result | time | |
|---|---|---|---|---|---|
"""


def outcome(client: Client, door: Door, plain: Run, found: Run) -> tuple[str, str]:
    """What came of it, in a word, and why."""
    if found.status or found.results is None:
        return "fails", _last_line(found)
    apart = differences(plain.results, found.results, client.tolerance, client.skipped)
    return ("differs", apart[0]) if apart else ("equal", client.differs)


def rows(client: Client) -> list[str]:
    """The rows of one client."""
    told = _version(client)
    why = missing(client)
    if why:
        return [f"| {client.name} | | | not run | | {why} |"]
    with TemporaryDirectory() as folder:
        plain = run(client, None, Path(folder))
        if plain.status or plain.results is None:
            return [f"| {client.name} | {told} | plain | fails | | {_last_line(plain)} |"]
        found = []
        for door in BOTH:
            its = run(client, door, Path(folder))
            result, reason = outcome(client, door, plain, its)
            ratio = f"{its.seconds / plain.seconds:.1f}"
            found.append(f"| {client.name} | {told} | {door.name} | {result} | {ratio} | {reason} |")
            print(f"{found[-1]} {its.seconds:.0f} s, plain {plain.seconds:.0f} s", file=sys.stderr, flush=True)
    return found


def _last_line(found: Run) -> str:
    lines = found.said.strip().splitlines()
    return lines[-1][:120] if lines else f"status {found.status}"


def write(page: Path, found: dict[str, list[str]]) -> None:
    """Write the page. Clients that were not run keep the rows that they have there."""
    lines = page.read_text().splitlines() if page.exists() else []
    kept = {c.name: [line for line in lines if line.startswith(f"| {c.name} | ")] for c in CLIENTS}
    page.write_text(PAGE + "".join(f"{row}\n" for rows_ in (kept | found).values() for row in rows_))


def _version(client: Client) -> str:
    if client.beside and not client.needs:
        (found,) = distributions(name=client.beside[0], path=[str(beside(client.beside[0]))])
        return f"{client.beside[0]} {found.version}"
    package = client.needs[0] if client.needs else "torch"
    package = "transformers" if client.command[0].startswith("transformers") else package
    package = packages_distributions().get(package, [package])[0]
    try:
        return f"{package} {version(package).partition('+')[0]}"
    except PackageNotFoundError:
        return package


def shard(text: str) -> slice:
    """Which of the clients a shard has: `1/4` is the first of four."""
    k, _, n = text.partition("/")
    if not 1 <= int(k) <= int(n):
        raise ValueError(text)
    return slice(int(k) - 1, None, int(n))


def main() -> int:
    """Run them. Returns 1 if one fails or differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("--write", metavar="FILE", help="write the page; rows of clients that are not run stay")
    parser.add_argument("--workers", type=int, default=1, help="how many clients run at a time")
    parser.add_argument("--shard", type=shard, metavar="K/N", help="every N-th client alone, from the K-th on")
    parser.add_argument("names", nargs="*", help="clients; by default all")
    args = parser.parse_args()
    chosen = [c for c in CLIENTS if not args.names or c.name in args.names][args.shard or slice(None)]
    each: dict[str, list[str]] = {}
    with ThreadPoolExecutor(args.workers) as pool:
        for client, rows_ in zip(chosen, pool.map(rows, chosen), strict=True):
            each[client.name] = rows_
            if args.write:  # now, and not at the end: a run that is stopped keeps what it has found
                write(Path(args.write), each)
    found = [row for rows_ in each.values() for row in rows_]
    return int(any("| fails |" in row or "| differs |" in row for row in found))


if __name__ == "__main__":
    sys.exit(main())
