"""`forecast --ranks`: what a step would take on more ranks than there are, and what each would need."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from ..reporting.scaling import Rehearsal, Scaling, predict
from ..targets.links import Link, LinkError
from .link_times import CannotMeasure, measured
from .rehearsing import WARM
from .warming import CannotRun, check_program

DIVIDED = re.compile(r"\{(\d+)/ranks\}")
NOTES = (
    "The rank has run alone on this host: no rank waits for a slower one, and no link has other traffic. Collectives",
    "inside of compiled regions are not predicted.",
)


class CannotScale(Exception):
    """What is asked for cannot be predicted; the text says why."""


def numbers(text: str) -> list[int]:
    """Numbers of ranks, with commas. Raises argparse's error."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} are no numbers of ranks, as in 8,64,512")
    return found


def link_of(text: str) -> Link:
    """The link that a text names; `gloo` is measured. Raises LinkError, CannotMeasure."""
    return measured() if text == "gloo" else Link.parse(text)


def arguments_for(arguments: list[str], ranks: int) -> list[str]:
    """The program's arguments, where `{512/ranks}` stands for a part of a whole. Raises CannotScale."""

    def part(found: re.Match[str]) -> str:
        whole = int(found[1])
        if whole % ranks:
            raise CannotScale(f"{found[0]}: {whole} cannot be divided among {ranks} ranks")
        return str(whole // ranks)

    return [DIVIDED.sub(part, argument) for argument in arguments]


def rehearse(given: argparse.Namespace, ranks: int) -> Rehearsal:
    """Run the program as one of so many ranks, in a process of its own. Raises CannotRun, CannotScale."""
    arguments = arguments_for(given.arguments, ranks)
    with tempfile.TemporaryDirectory(prefix="fused-eager-ranks-") as folder:
        to = Path(folder, "run.json")
        command = [sys.executable, "-m", "fused_eager.commands.rehearsing", "--ranks", str(ranks)]
        command += ["--steps", str(given.steps), "--to", str(to), *["--module"] * given.module]
        # What the program prints is not this command's answer.
        code = subprocess.run([*command, "--", given.script, *arguments], stdout=sys.stderr).returncode
        if code or not to.exists():
            raise CannotRun(code)
        found = json.loads(to.read_text(encoding="utf-8"))
    if len(found["ends"]) < 2:
        least = WARM + 2
        raise CannotScale(f"the program has made {found['steps']} steps of an optimizer, and {least} are needed")
    return Rehearsal.parse(found)


def scale(given: argparse.Namespace) -> Scaling:
    """The prediction. Raises CannotRun, CannotScale, LinkError, CannotMeasure, or FileNotFoundError: no program."""
    check_program(given)
    for ranks in given.ranks:
        arguments_for(given.arguments, ranks)
    link = link_of(given.link)
    divided = any(DIVIDED.search(argument) for argument in given.arguments)
    rows = [predict(rehearse(given, ranks), link, given.compute) for ranks in given.ranks]
    return Scaling(link, rows, divided, given.compute, NOTES)


def run(given: argparse.Namespace, prog: str) -> int:
    """The command; returns the exit code."""
    try:
        made = scale(given)
    except (LinkError, CannotScale, FileNotFoundError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except (CannotRun, CannotMeasure) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(made.as_json(), indent=2) if given.json else made.as_text())
    return 0
