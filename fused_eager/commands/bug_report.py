"""The command `bug-report`: run a program, and put into a zip file what somebody else needs to work on what goes wrong.

The program runs in a process of its own, so that one that is killed or hangs leaves a report as well. What is in the
file is text that its owner can read before sending it: no tensor's values, no environment but the variables that
`doctor` shows, and the machine's, the user's and the folders' names are left out.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import zipfile
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..folder import FOLDER
from .diagnostics import gather, redact
from .doctor import as_json, describe, findings

_TOLD = 200  # lines of what the program wrote to stderr
_README = """What is in this file
====================

Read it before you send it. It holds no value of a tensor. Names of folders, of the machine and of the user have been
left out. In it are file names and line numbers of the program, the numbers that it gives to ops (a learning rate), and
what it wrote to stderr.

doctor.txt, doctor.json   the machine: versions, devices, cache, known-bad combinations
options.txt               every option, and where its value comes from
run.txt                   how the program ended, and the last lines that it wrote to stderr
report.txt                what fused_eager says of the run
events.jsonl              the event log that the report is made of
streams/*.py              what fused_eager was given, as programs: the same ops on random tensors of the same shapes.
                          Each runs by itself and says whether its results differ from plain PyTorch's. The last
                          one is where the program was when it ended.
"""


class _Names:
    """What is to be left out of texts, and what stands in its place."""

    def __init__(self) -> None:
        home, here = os.path.expanduser("~"), os.getcwd()
        names = {here: ".", home: "~", socket.gethostname(): "HOST", getpass.getuser(): "USER"}
        names |= dict.fromkeys((os.path.dirname(FOLDER[:-1]), sysconfig.get_path("purelib")), "SITE")
        names[tempfile.gettempdir()] = "TMP"
        self._rows = [
            (re.compile(rf"(?<![\w/]){re.escape(name)}(?!\w)"), other)
            for name, other in sorted(names.items(), key=lambda row: -len(row[0]))
            if len(name) > 2
        ]

    def without(self, text: str) -> str:
        """`text` without these names."""
        text = redact(text)
        for name, other in self._rows:
            text = name.sub(other, text)
        return text


def _events(lines: Iterator[str], names: _Names) -> Iterator[str]:
    """The event log without the command line and the machine's name."""
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:  # the last one, of a process that was killed
            continue
        event.pop("argv", None)
        event.pop("host", None)
        yield names.without(json.dumps(event))


def _run(command: list[str], folder: Path, seconds: float) -> tuple[str, list[str]]:
    """Run the program; how it ended, in words, and the last lines that it wrote to stderr, which are passed on."""
    environment = {**os.environ, "FUSED_EAGER_REPORT": str(folder / "events.jsonl")}
    began, ended, last = time.monotonic(), "", deque[str](maxlen=_TOLD)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace", env=environment)
    assert process.stderr is not None

    def pass_on(lines: Iterable[str]) -> None:
        for line in lines:
            last.append(line)
            sys.stderr.write(line)

    reader = threading.Thread(target=pass_on, args=(process.stderr,), daemon=True)
    reader.start()
    try:
        process.wait(seconds or None)
    except subprocess.TimeoutExpired:
        ended = f"its end, after {seconds:g} s (--seconds)"
    except KeyboardInterrupt:
        ended = "Ctrl-C"
    if ended:
        process.kill()
    code = process.wait()
    reader.join(5.0)  # what the program has started may still have it open
    ended = ended or (f"signal {-code}" if code < 0 else f"exit code {code}")
    return f"{ended}, {time.monotonic() - began:.1f} s after its start", list(last)


def _report(folder: Path) -> str:
    log = folder / "events.jsonl"
    if not log.exists():
        return "There is no event log: the program entered no context."
    command = [sys.executable, "-m", "fused_eager", "report", str(log)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout or done.stderr


def _write(to: Path, folder: Path, ended: str, told: str) -> int:
    """Write the zip file; returns how many streams are in it."""
    names = _Names()
    facts = gather()
    found = findings(facts)
    options = subprocess.run([sys.executable, "-m", "fused_eager", "config"], capture_output=True, text=True).stdout
    streams = sorted((folder / "streams").glob("*.py"))
    log = folder / "events.jsonl"
    with zipfile.ZipFile(to, "x", zipfile.ZIP_DEFLATED) as made:
        made.writestr("README.txt", _README)
        made.writestr("doctor.txt", names.without(describe(facts, found)))
        made.writestr("doctor.json", names.without(as_json(facts, found)))
        made.writestr("options.txt", names.without(options))
        made.writestr("run.txt", names.without(f"{ended}\n\n{told}\n"))
        made.writestr("report.txt", names.without(_report(folder)))
        if log.exists():
            with log.open(errors="replace") as lines:
                made.writestr("events.jsonl", "\n".join(_events(lines, names)) + "\n")
        for stream in streams:
            made.writestr(f"streams/{stream.name}", stream.read_text())
    return len(streams)


def main(argv: list[str], prog: str) -> int:
    """The command; returns 0 where the file was written, however the program ended, 2 where it cannot be."""
    end = 0
    while argv[end : end + 1] and argv[end] in ("--to", "--seconds"):
        end += 2
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [--to FILE] [--seconds N] [what `run` takes]... (SCRIPT | -m MODULE) [ARG...]",
        description="Run a program as the command `run` does, and write a zip file with what a bug report needs.",
        allow_abbrev=False,
    )
    to = Path("fused-eager-bug.zip")
    parser.add_argument("--to", type=Path, default=to, metavar="FILE", help=f"the file to write (default: {to})")
    parser.add_argument("--seconds", type=float, default=0.0, metavar="N", help="end the program after so many seconds")
    asks = argv[end : end + 1] in (["-h"], ["--help"])
    given, theirs = parser.parse_args(["--help"] if asks else argv[:end]), argv[end:]
    if not theirs:
        parser.error("name a program")
    if given.to.exists():
        print(f"{prog}: there is a file {str(given.to)!r} already; name another one with --to", file=sys.stderr)
        return 2
    if not given.to.absolute().parent.is_dir():
        print(f"{prog}: there is no folder {str(given.to.parent)!r}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="fused-eager-bug-") as made:
        folder = Path(made)
        (folder / "streams").mkdir()
        command = [sys.executable, "-m", "fused_eager.commands.noting", str(folder / "streams"), *theirs]
        ended, told = _run(command, folder, given.seconds)
        if ended.startswith("exit code 2,") and not (folder / "events.jsonl").exists():
            return 2  # `run` has said what is wrong with how it was called
        streams = _write(given.to, folder, ended, "".join(told))
    print(f"{given.to}: {streams} streams; the program ended by {ended}. Read it before you send it.")
    return 0
