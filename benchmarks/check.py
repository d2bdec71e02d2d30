"""Whether the library has become slower: `python -m benchmarks --check` holds ratios against plain eager to bounds.

Ratios, never times: both sides of one are measured in the same process and run, in alternating blocks, so a slow or
busy machine slows both. The bounds are generous, about twice what is usual, and a row that misses its bound is
measured again in a fresh process (what the library chose by measuring it chooses anew) and fails only if it misses
every time. What that leaves is a change of kind: fusing that gains nothing any more, a stream that compiles for ever, a
recording that costs twice as much.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

ATTEMPTS = 3
LIMIT_S = 240.0  # for one attempt at all rows, which takes 40 s on an idle core
_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Bound:
    """A workload's time in a system may be at most `most` of plain eager's. `less`: what is smaller than in the table,
    to be quick."""

    workload: str
    system: str
    most: float
    less: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.workload}/{self.system}"


BOUNDS = (
    Bound("tiny", "fused", 4.0),  # 1.1: torch alone, as soon as measuring has shown that it is ahead
    Bound("tiny", "recorded", 12.0),  # 1.4 followed in C++, 5 to 6 in Python: what recording and launching cost
    Bound("elementwise_1m", "fused", 0.75),  # 0.4
    # 0.5 where eager pays for page faults at each op, 0.9 where malloc keeps the memory.
    Bound("layernorm_gelu_residual", "fused", 1.5, {"batch": 16}),
    Bound("mlp_adam_foreach", "fused", 3.0, {"batch": 64}),  # 1.0 to 1.6
    Bound("decode_32", "fused", 3.0, {"layers": 1, "tokens": 16}),  # 1.1 to 1.5; 14 where each new length is compiled
)

# A ratio, or why there is none because the workload failed. A row that was not measured at all has an infinite ratio.
Found = float | str


def select(names: Sequence[str]) -> list[Bound]:
    """The bounds on workloads of these names; all for no name. Raises ValueError for a name without one."""
    for name in names:
        if all(bound.workload != name for bound in BOUNDS):
            known = ", ".join(dict.fromkeys(bound.workload for bound in BOUNDS))
            raise ValueError(f"no bound is set for {name!r}; there are bounds for: {known}")
    return [bound for bound in BOUNDS if not names or bound.workload in names]


def check(bounds: Sequence[Bound], measure: Callable[[Sequence[Bound]], Mapping[str, Found]]) -> int:
    """Hold what `measure` finds, by a bound's name, to the bounds; print each figure. Returns 1 if a row fails, else 0.

    A workload that raises or computes something else fails at once: that is no noise.
    """
    missed: dict[str, list[float]] = {bound.name: [] for bound in bounds}
    failed: list[str] = []
    left = list(bounds)
    for attempt in range(ATTEMPTS):
        found = measure(left)
        again: list[Bound] = []
        for bound in left:
            seen = found.get(bound.name, math.inf)
            if isinstance(seen, str):
                failed.append(f"{bound.name}: {seen}")
                continue
            good = seen <= bound.most
            print(f"{bound.name:32} {seen:6.2f}, at most {bound.most:5.2f}{'' if good else ': MISSED'}", flush=True)
            if not good:
                missed[bound.name].append(seen)
                again.append(bound)
        left = again
        if not left:
            break
        if attempt + 1 < ATTEMPTS:
            print(f"measuring again: {', '.join(bound.name for bound in left)}", flush=True)
    for bound in left:
        ratios = ", ".join(f"{ratio:.2f}" for ratio in missed[bound.name])
        failed.append(f"{bound.name}: at most {bound.most:.2f} of plain eager's time is allowed, measured {ratios}")
    for line in failed:
        print(f"FAILED {line}")
    return 1 if failed else 0


def in_fresh_process(bounds: Sequence[Bound]) -> dict[str, Found]:
    """Measure in a process of its own, whose options are the library's own and whose compile cache is off.

    Rows that it does not come to, because it dies or the time is over, are not in the result.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FUSED_EAGER_")}
    command = [sys.executable, "-m", "benchmarks.check", *(bound.name for bound in bounds)]
    told = ""
    with subprocess.Popen(
        command, env={**environment, "FUSED_EAGER_CACHE": "off"}, cwd=_ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            told, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            told, _ = process.communicate()
            print(f"not done after {LIMIT_S:.0f} s")
    if process.returncode > 0:
        print(f"the measuring process ended with code {process.returncode}")
    return dict(json.loads(line) for line in told.splitlines() if line.endswith("]"))


def _measure(bound: Bound) -> Found:
    from benchmarks.measure import Effort, measure
    from benchmarks.systems import SYSTEMS
    from benchmarks.workloads import WORKLOADS

    workload = WORKLOADS[bound.workload]
    cut = replace(workload, full={**workload.full, **bound.less})
    timing = measure(cut, [SYSTEMS[bound.system]], Effort(rounds=5, block_s=0.05, settle_s=20.0))[bound.system]
    return timing.failure or timing.ratio


def main(names: Sequence[str]) -> None:
    """Measure the bounds of these names in this process and print a line of JSON for each."""
    for bound in BOUNDS:
        if bound.name in names:
            print(json.dumps([bound.name, _measure(bound)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
