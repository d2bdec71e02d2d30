"""The command `top`: follow the event log of a program that is still running."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

from ..errors import FusedEagerError
from .advice import advise
from .facts import Adder, Facts
from .reading import Process, siblings
from .source import short
from .text import WIDTH, duration, headline, show, times


class Follower:
    """Reads what is new in a log and in those of the job's other processes, and keeps the facts up to date."""

    def __init__(self, path: str):
        self.path = path
        self.adder = Adder()
        self.processes: list[Process] = []
        self.offsets: dict[str, int] = {}

    def update(self) -> Facts:
        """Take in what has been written since the last call.

        Raises:
            LogError: the file is a log of another version.
            OSError: the file cannot be read.
        """
        for path in (self.path, *siblings(self.path)):
            self._read(path)
        self.adder.facts.processes = self.processes
        return self.adder.finish()

    def _read(self, path: str) -> None:
        known = next((i for i, p in enumerate(self.processes) if p.file == path), None)
        offset = self.offsets.get(path, 0)
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read()
        # A line that is still being written is left for the next time.
        whole = data[: data.rfind(b"\n") + 1]
        if not whole:
            return
        process = Process(file=path) if known is None else self.processes[known]
        lines = whole.decode("utf-8", "replace").splitlines()
        if known is None:
            process.add(lines.pop(0))
            first = self.processes[0].start.get("job") if self.processes else None
            if self.processes and process.start.get("job") != first:
                return  # of an earlier job
            known = len(self.processes)
            self.processes.append(process)
        self.offsets[path] = offset + len(whole)
        for line in lines:
            event = process.add(line)
            if event is not None:
                self.adder.add(known, event)
        process.events.clear()

    @property
    def ended(self) -> bool:
        """Whether all processes have ended in order."""
        return bool(self.processes) and all(p.ended for p in self.processes)


def screen(f: Facts, before: Facts | None, seconds: float, compiling_for: float) -> str:
    """What is shown: the run so far, and the rates of the last `seconds`."""
    lines = [f"fused_eager: {headline(f)}"]
    if before is not None and seconds > 0:
        rates = [
            f"{(f.steps - before.steps) / seconds:.3g} rounds/s",
            f"{(f.ops - before.ops) / seconds:.4g} ops/s",
            f"{len(f.compiles) - len(before.compiles)} compilations",
            f"{len(f.loads) - len(before.loads)} cache loads",
        ]
        lines.append(f"  last {seconds:.0f} s: " + ", ".join(rates))
    total = sum(s for _, s in times(f)) or 1.0
    for name, spent in times(f):
        bar = "#" * round(40 * spent / total)
        lines.append(f"  {name:<36} {duration(spent):>9} {spent / total:>4.0%} {bar}")
    hits, all_ = len(f.loads), len(f.loads) + len(f.compiles)
    if all_:
        lines.append(f"  compile cache: {hits} of {all_} regions found ({hits / all_:.0%})")
    if f.compiling:
        lines.append(f"  compiling now, for {compiling_for:.0f} s: {f.compiling}")
    for a in advise(f)[:5]:
        lines.append(f"  {duration(a.seconds):>8}  {short(a.site)}: {a.title}; {a.cure}"[:WIDTH])
    return "\n".join(lines)


def frames(path: str, interval: float) -> Iterator[str]:
    """A screen every `interval` seconds until the program has ended. Raises as `Follower.update` does."""
    follower = Follower(path)
    before: dict[str, float] | None = None
    then = began = time.monotonic()
    compiling = ""
    while True:
        f = follower.update()
        now = time.monotonic()
        if f.compiling != compiling:
            compiling, began = f.compiling, now
        past = None
        if before is not None:
            past = Facts(steps=int(before["steps"]), ops=int(before["ops"]))
            past.compiles = f.compiles[: int(before["compiles"])]
            past.loads = f.loads[: int(before["loads"])]
        yield screen(f, past, now - then, now - began)
        if follower.ended:
            return
        before = {"steps": f.steps, "ops": f.ops, "compiles": len(f.compiles), "loads": len(f.loads)}
        then = now
        time.sleep(interval)


def main(argv: list[str], prog: str) -> int:
    """`top FILE`: follow the event log of a running program until it ends."""
    parser = argparse.ArgumentParser(prog=prog, description=main.__doc__)
    parser.add_argument("file", metavar="FILE", help="what the program's option `report` names")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between screens; default 1")
    parser.add_argument("--once", action="store_true", help="one screen, then stop")
    arguments = parser.parse_args(argv)
    if arguments.interval <= 0:
        parser.error("--interval must be more than 0 seconds")
    clear = "\x1b[H\x1b[J" if sys.stdout.isatty() else ""
    try:
        for text in frames(arguments.file, arguments.interval):
            show(clear + text)
            if arguments.once:
                break
    except (FusedEagerError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
    return 0


__all__ = ["Follower", "frames", "main", "screen"]
