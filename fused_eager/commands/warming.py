"""`warm`: fill the compile cache for chips that this host does not have.

The program's first steps are run on a device that the CPU simulates, or its regions are taken from the event log of
another run. They are compiled for the target, and kept under the keys that a host with those chips asks for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from fused_eager.cache import Entry, Key, LocalStore
from fused_eager.cache.store import CODES

from ..compiling.caching import Keeper
from ..compiling.cross import Cost, Crossed, Refusal
from ..compiling.crossing import Bar, crossed
from ..compiling.logged import for_target
from ..compiling.met import Met, read
from ..config import OptionError, resolve
from ..reporting.reading import LogError
from ..reporting.reading import read as read_logs
from ..targets.device import TargetDevice
from ..targets.target import Target, TargetError
from ..targets.topology import obstacle
from ..xla import use_the_cpu_alone

MODES = ("fused", "strict", "debug")
_COST = {field.name for field in fields(Cost)}


class CannotRun(Exception):
    """The program ended with an error; the number is its exit code. Or it ended well, and `why` says what it lacks."""

    def __init__(self, code: int, why: str = ""):
        super().__init__(why or f"the program ended with exit code {code}")
        self.code = code


def give_up(prog: str, error: Exception) -> int:
    """Say why a command cannot do what it was asked. Returns its exit code: 1 if the program has failed, 2 if what it
    was given is wrong."""
    print(f"{prog}: {error}", file=sys.stderr)
    return 1 if isinstance(error, CannotRun) else 2


@dataclass
class Warmed:
    """What `warm` did: regions met, found in the cache, made; seconds of compiling and bytes; what failed and why; and
    the stores of the cache."""

    regions: int = 0
    hits: int = 0
    made: int = 0
    compiling: float = 0.0
    seconds: float = 0.0
    bytes: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    stores: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"{self.regions} regions: {self.hits} were there already, {self.made} compiled in {self.compiling:.0f} s "
            f"of the compiler's ({self.bytes / 2**20:.1f} MB), {len(self.failed)} failed; {self.seconds:.0f} s in all"
        ]
        lines += [f"  cache: {', '.join(self.stores)}"] if self.stores else []
        lines += [f"  {name}: {why}" for name, why in self.failed.items()]
        return "\n".join(lines)


def add_program(parser: argparse.ArgumentParser, needs_target: bool = True) -> None:
    """The arguments of a command that runs somebody's program for a target."""
    parser.add_argument("--target", required=needs_target, help="the chips, as v5e:2x2, v5p:4x4x4 or v6e:8")
    parser.add_argument(
        "--steps", type=partial(_integer, least=0), default=3, help="optimizer steps to run; 0: to the end (default: 3)"
    )
    parser.add_argument(
        "--jobs", type=_integer, default=os.cpu_count() or 1, help="processes that compile (default: cores)"
    )
    parser.add_argument(
        "--valueless",
        action="store_true",
        help="compute nothing: each value is zeros that take no memory, so that the model may be larger than this host",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="the program, with its arguments after it")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARG")


def _integer(text: str, least: int = 1) -> int:
    """A whole number of a command line's. Raises argparse's error."""
    if not text.strip().isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
    return int(text)


def target_of(text: str) -> Target:
    """The target that a text names, for which there is a compiler here. Raises TargetError, NoCompiler."""
    found = Target.parse(text)
    why = obstacle()
    if why:
        raise TargetError(f"compiling for {found} needs XLA's compiler for TPUs: {why}")
    return found


def check_program(given: argparse.Namespace) -> None:
    """Raises FileNotFoundError: the command line names a program that is not there. (Whether a module is, only its
    import tells.)"""
    if not given.module and not os.path.exists(given.script):
        raise FileNotFoundError(f"there is no file {given.script!r}")


def meet(given: argparse.Namespace, mode: str) -> tuple[list[Met], dict[str, Any]]:
    """Run the program in a process of its own, and return the regions that it met. Raises CannotRun, or
    FileNotFoundError: there is no such program."""
    check_program(given)
    with tempfile.TemporaryDirectory(prefix="fused-eager-met-") as folder:
        to = Path(folder, "met.jsonl")
        command = [sys.executable, "-m", "fused_eager.commands.meeting", "--target", given.target, "--mode", mode]
        command += ["--steps", str(given.steps), "--to", str(to), *["--valueless"] * given.valueless]
        command += [*["--module"] * given.module, "--", given.script, *given.arguments]
        # What the program prints is not this command's answer.
        code = subprocess.run(command, stdout=sys.stderr).returncode
        if code or not to.exists():
            raise CannotRun(code)
        found, about = read(to)
    if not found:
        raise CannotRun(0, "the program computes nothing on the device 'tpu'; has it an option such as --device tpu?")
    return found, about


def from_logs(files: Sequence[str], target: Target, salt: str) -> tuple[list[Met], str]:
    """The regions in event logs, and what of these was left out, in words.

    Raises:
        LogError: a file is no event log, or none of the regions in it can be compiled for a target.
        OSError: a file cannot be read.
    """
    events = [event for process in read_logs(files) for event in process.events]
    found, of_the_host = for_target(
        (event.data for event in events if event.kind == "region"), TargetDevice(target), salt
    )
    left = f"{of_the_host} regions of CPU tensors, which no TPU computes" if of_the_host else ""
    if not found:
        why = f"it has {left}" if left else (
            "it tells of none: the cache was off in that run (option 'cache'), or an older version has written it"
        )
        raise LogError(f"no region in {', '.join(files)} can be compiled for {target}: {why}")
    return found, left


def warmed(
    found: Sequence[Met], target: Target, keeper: Keeper, jobs: int, costs: dict[Key, Cost] | None = None
) -> Warmed:
    """Compile what is not in the cache yet, and keep it. Into `costs`, if given, goes what the compiler says of each
    region; an entry that does not tell, for the device itself has made it, is made again."""
    began, done = time.monotonic(), Warmed(regions=len(found))
    keeper.describe_here()
    names = {met.key: met for met in found if met.key is not None}
    done.failed.update({met.name: f"it has no key: {met.why}" for met in found if met.key is None})
    missing = []
    for key in names:
        entry = keeper.cache.spread(key)  # what is in this host's folder alone is of no use to the others
        cost = entry.manifest.metadata.get("cost") if isinstance(entry, Entry) else None
        if cost is not None and set(cost) != _COST:  # of an older version
            cost = None
        if isinstance(entry, Entry) and (costs is None or cost is not None or "executable" not in entry.blobs):
            done.hits += 1
            if costs is not None and cost is not None:
                costs[key] = Cost(**cost)
        else:
            missing.append(key)
    bar = Bar(len(missing), f"compiling for {target}")
    for key, outcome in crossed(missing, target, jobs):
        bar.step(isinstance(outcome, Refusal))
        if outcome.blobs is not None:
            about = {"seconds": outcome.seconds, "cost": asdict(outcome.cost)} if isinstance(outcome, Crossed) else {}
            keeper.cache.publish(key, outcome.blobs, metadata=about)
        if isinstance(outcome, Crossed):
            if costs is not None:
                costs[key] = outcome.cost
            done.made += 1
            done.compiling += outcome.seconds
            done.bytes += sum(map(len, outcome.blobs.values()))
        else:
            done.failed[names[key].name] = outcome.reason
    if not keeper.flush(300.0):
        done.failed["the cache"] = "a shared store did not take what was compiled within five minutes"
    done.stores, unkept = _stores(keeper)
    done.failed.update(unkept)
    done.seconds = time.monotonic() - began
    return done


def _stores(keeper: Keeper) -> tuple[list[str], dict[str, str]]:
    """The stores that entries were looked for and kept in; and which of them did not keep some, with the reason."""
    stores, failed = [], {}
    counts = keeper.cache.stats()
    for tier in keeper.cache.tiers:
        name = str(tier.store.root) if isinstance(tier.store, LocalStore) else tier.label
        is_unsigned = tier.needs_signature and not keeper.cache.keyring.can_sign
        stores.append(name + (" (only read: option 'cache_keys' has no key that signs)" if is_unsigned else ""))
        for what, n in counts[tier.label].items():
            if what.startswith("write-failed:"):
                code = what.removeprefix("write-failed:")
                failed[f"the cache {name}"] = f"{n:.0f} entries were not kept: {CODES.get(code, code)}"
    return stores, failed


def main(argv: list[str], prog: str) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__, allow_abbrev=False)
    parser.add_argument("--modes", default="fused", help=f"with commas, of {', '.join(MODES)} (default: fused)")
    parser.add_argument(
        "--from-log", nargs="+", metavar="FILE", help="run nothing: the regions are those in event logs of other runs"
    )
    add_program(parser)
    given = parser.parse_args(argv)
    if (given.script is None) != bool(given.from_log):
        parser.error("either a program is run, or regions are taken from event logs: give SCRIPT or --from-log FILE")
    modes = given.modes.split(",")
    use_the_cpu_alone()
    try:
        if not set(modes) <= set(MODES):
            raise OptionError(f"--modes is {given.modes!r}; allowed: {', '.join(MODES)}, with commas")
        target = target_of(given.target)
        options = resolve()
        if options.cache.strip() == "off":
            raise OptionError("the cache is off (option 'cache'): there is nothing to warm")
        keeper = Keeper(options)
        found: dict[Any, Met] = {}
        if given.from_log:
            rows, left = from_logs(given.from_log, target, keeper.salt)
            if left:
                print(f"{prog}: {left}, are left out", file=sys.stderr)
        else:
            rows = [met for mode in modes for met in meet(given, mode)[0]]
        for met in rows:
            found.setdefault(met.key or met.name, met)
    except (OptionError, TargetError, LogError, OSError, CannotRun) as error:
        return give_up(prog, error)
    done = warmed(list(found.values()), target, keeper, given.jobs)
    print(json.dumps(vars(done), indent=2) if given.json else done)
    return 1 if done.failed else 0
