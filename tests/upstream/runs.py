"""Running test files of PyTorch's in processes of their own, and what came of each test."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .plugin import DEVICE, PLAIN, VARIABLE

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "upstream"  # what passes plain, for each file: it is asked for once
PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"
TOLD_EVERY = 10.0  # seconds between two lines of progress
_PERCENT = re.compile(rb"\[ *(\d+)%\]")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one test: `passed`, `skipped` or `failed`, and the first line of what it said."""

    kind: str
    said: str = ""


def files_of(folder: Path, names: list[str]) -> list[Path]:
    """The test files in a folder, or those that are named, relative to it.

    Raises:
        FileNotFoundError: the folder or a named file is not there, or the folder has no test file.
    """
    found = [folder / name for name in names] or sorted(folder.rglob("test_*.py"))
    missing = [str(path) for path in found if not path.is_file()]
    if missing or not found:
        raise FileNotFoundError(f"no test files: {', '.join(missing) or f'{folder} has no test_*.py'}")
    return found


def outcomes(
    folder: Path, file: Path, mode: str, workers: int, timeout: int, select: str = "", device: str = ""
) -> dict[str, Outcome]:
    """Run one file in a mode. Returns the outcome of each test by `class::test`; one that crashed or ran out of time
    is a failure. Of tests on a `device` there are those that were generated for it, by the names they have for the CPU.

    Raises:
        RuntimeError: pytest itself could not run, with what it said.
    """
    kept = KEPT / f"{_digest(file, select)}.json"
    if mode == PLAIN and kept.exists():
        return {test: Outcome(*row) for test, row in json.loads(kept.read_text()).items()}
    with tempfile.TemporaryDirectory() as scratch:
        xml = Path(scratch, "results.xml")
        command = [
            *(sys.executable, "-m", "pytest", "-p", f"{__package__}.plugin", "--noconftest", "-p", "no:cacheprovider"),
            *("-q", "-n", str(workers), "--max-worker-restart=200", f"--timeout={timeout}"),
            *("--timeout-method=thread", f"--junitxml={xml}", "-c", os.devnull, f"--rootdir={folder}"),
            *(("-k", select) if select else ()),
            str(file.relative_to(folder)),
        ]
        environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
        environment |= {VARIABLE: mode, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "ignore"}
        if device:
            environment |= {DEVICE: device, "PYTORCH_TESTING_DEVICE_ONLY_FOR": "privateuse1"}
        environment["FUSED_EAGER_CACHE_DIR"] = str(Path(scratch, "cache"))  # what was compiled before must not matter
        said = _run(command, folder, environment, f"{file.relative_to(folder)} {mode}")
        if not xml.exists():
            raise RuntimeError(f"pytest did not run {file}:\n{said}")
        found = dict(_read(xml))
    if device:
        names = {test: as_on_the_cpu(test, device) for test in found}
        return {name: found[test] for test, name in names.items() if name is not None}
    if mode == PLAIN and found:
        KEPT.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps({test: [o.kind, o.said] for test, o in found.items()}))
    return found


def as_on_the_cpu(test: str, device: str) -> str | None:
    """The name that a test generated for a device has for the CPU; None if it was not generated for one."""
    of, _, name = test.partition("::")
    for suffix in (device.upper(), "PRIVATEUSE1"):
        if of.endswith(suffix):
            for word in (device, "privateuse1"):
                name = re.sub(rf"_{word}(?=_|$)", "_cpu", name)
            return f"{of.removesuffix(suffix)}CPU::{name}"
    return None


def _digest(file: Path, select: str) -> str:
    of = [file.read_bytes(), torch.__version__.encode(), sys.version.encode(), select.encode()]
    return hashlib.sha256(b"\0".join(of)).hexdigest()[:32]


def _run(command: list[str], folder: Path, environment: dict[str, str], what: str) -> str:
    """Run pytest, saying now and then how far it is. Returns the end of what it said."""
    told, last = time.monotonic(), deque[bytes](maxlen=20)
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last.append(line)
            share = _PERCENT.search(line)
            if share and time.monotonic() - told > TOLD_EVERY:
                told = time.monotonic()
                print(f"  {what}: {share[1].decode()} %", file=sys.stderr, flush=True)
    return b"".join(last).decode(errors="replace")


def _read(xml: Path) -> Iterator[tuple[str, Outcome]]:
    for case in ElementTree.parse(xml).getroot().iter("testcase"):
        test = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        bad = [part for part in case if part.tag in ("failure", "error")]
        if bad:
            yield test, Outcome(FAILED, " ".join((bad[0].get("message") or "").split())[:200])
        else:
            yield test, Outcome(SKIPPED if any(part.tag == "skipped" for part in case) else PASSED)
