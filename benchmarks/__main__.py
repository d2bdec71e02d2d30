"""`python -m benchmarks [WORKLOAD...]`: the table of all workloads, every system beside plain eager."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import check, environment


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Time workloads against plain eager.")
    parser.add_argument("names", nargs="*", metavar="WORKLOAD", help="names or beginnings of names; default: all")
    parser.add_argument("--programs", action="store_true", help="everyday programs instead; no fresh processes")
    parser.add_argument("--list", action="store_true", help="list workloads and systems and stop")
    parser.add_argument("--check", action="store_true", help="hold a few quick workloads to bounds; 1 if one fails")
    parser.add_argument("--modes", default="fused,strict,compile", help="systems beside eager, with commas")
    parser.add_argument("--rounds", type=int, help="blocks per system; the table shows medians over them (default 9)")
    parser.add_argument("--quick", action="store_true", help="three short rounds and no fresh processes: a rough look")
    parser.add_argument("--no-probe", action="store_true", help="no fresh processes: no first steps, counts and memory")
    parser.add_argument("--threads", type=int, default=1, help="threads and cores to pin to (default 1)")
    parser.add_argument(
        "--malloc",
        choices=environment.MALLOC,
        default="default",
        help="raised: glibc keeps freed memory instead of paying for page faults at every large tensor",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--tiny", action="store_true", help="sizes of the tests: shows that it runs, measures nothing")
    args = parser.parse_args(argv)
    if args.threads < 1 or (args.rounds is not None and args.rounds < 1):
        parser.error("--threads and --rounds must be at least 1")
    if args.check and args.programs:
        parser.error("no bounds are set for --programs, so there is nothing to --check")
    return args


def run(args: argparse.Namespace) -> int:
    """Measure, print and write as the arguments say. Returns 1 if a system that is not optional failed, or a
    bound does not hold, else 0."""
    if args.check:  # before anything is loaded: it measures in other processes
        try:
            return check.check(check.select(args.names), check.in_fresh_process)
        except ValueError as error:
            raise SystemExit(str(error)) from None
    from dataclasses import asdict, replace

    from benchmarks import table
    from benchmarks.measure import QUICK, Effort, measure
    from benchmarks.probe import probe
    from benchmarks.programs import PROGRAMS
    from benchmarks.systems import REFERENCE, SYSTEMS
    from benchmarks.workloads import ROWS, Size, select

    known = PROGRAMS if args.programs else ROWS
    if args.list:
        print("\n".join(f"{row.name:28} {row.about}" for row in known))
        print("\n".join(f"{name:28} {system.about}" for name, system in SYSTEMS.items()))
        return 0
    unknown = [name for name in args.modes.split(",") if name not in SYSTEMS]
    if unknown:
        raise SystemExit(f"no system is called {unknown[0]!r}; known: {', '.join(SYSTEMS)}")
    try:
        workloads = select(args.names, known)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    systems = [SYSTEMS[name] for name in args.modes.split(",") if name != REFERENCE.name]
    effort = QUICK if args.quick else Effort()
    effort = replace(effort, rounds=args.rounds or effort.rounds)
    size: Size = "tiny" if args.tiny else "full"
    settings = {**environment.describe(), "follower": environment.build_follower(), "threads": args.threads}
    settings.update(malloc=args.malloc, **asdict(effort))
    print("\n".join(f"{name}: {value}" for name, value in settings.items()), flush=True)

    rows: list[table.Row] = []
    names = [REFERENCE.name, *(system.name for system in systems)]
    probed = [] if args.quick or args.no_probe or args.programs else names
    for workload in workloads:
        print(f"... {workload.name}", file=sys.stderr, flush=True)
        row = table.Row(workload.name, workload.about, workload.trains, measure(workload, systems, effort, size))
        for name in probed:
            try:
                row.probes[name] = probe(workload.name, name, size)
            except RuntimeError as error:
                row.failed_probes[name] = str(error)
        rows.append(row)
        if args.json:  # after every row, so that an interrupted run leaves what it has
            args.json.write_text(table.to_json(rows, settings))
    print(f"\n{table.render(rows, names)}\n\n{table.LEGEND}\n{table.summary(rows, names)}")
    required = {system.name for system in [REFERENCE, *systems] if not system.optional}
    failed = any(
        name in required
        for row in rows
        for name in (*row.failed_probes, *(name for name, timing in row.timings.items() if timing.failure))
    )
    return 1 if failed else 0


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    if not args.list:
        environment.restart(argv, args.threads, args.malloc)
    return run(args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
