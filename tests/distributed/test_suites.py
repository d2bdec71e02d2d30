"""Programs of several ranks come to at each door what they come to in plain torch: cold, and with what that has left in
the cache; in each mode, and where every rank has another one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# With how many programs.
SUITES = {"each": 34, "training": 7, "parallel": 22, "differing": 7, "wider": 12, "exchanged": 18, "further": 17}
OTHERS = {"regions": 5, "inside": 8}  # which count what only some options have
WAIT = {"compile": "wait", "native": "never"}
Options = dict[str, Any] | None  # of a rank; None: it is plain


def ranks(suite: str, door: str, folder: Path, options: list[Options], world: int = 2) -> list[dict[str, str]]:
    """What each rank says of each program. `options`: those of the ranks in turn."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FUSED_EAGER_") or k == "FUSED_EAGER_FOLLOWER"}
    own = {"FUSED_EAGER_CACHE_DIR": str(folder / "cache"), "FUSED_EAGER_PROGRESS": "0", "FUSED_EAGER_DEVICES": "1"}
    (folder / "cache").mkdir(mode=0o700, exist_ok=True)
    processes = []
    with socket.create_server(("", 0)) as found:  # where JAX's runtimes meet, if they are to
        own["JAX_COORDINATOR_ADDRESS"] = f"localhost:{found.getsockname()[1]}"
    for rank in range(world):
        given = options[rank % len(options)]
        env = {**kept, **own, "OMP_NUM_THREADS": "1", "RANK": f"{rank}", "WORLD_SIZE": f"{world}"}
        if door == "device":
            env |= {f"FUSED_EAGER_{name.upper()}": value for name, value in (given or {}).items()}
        command = [sys.executable, "-m", "tests.distributed.suites.run", str(folder / "store"), suite, door]
        with open(folder / f"{rank}.out", "wb") as out, open(folder / f"{rank}.err", "wb") as err:
            processes.append(
                subprocess.Popen([*command, json.dumps(given)], cwd=ROOT, env=env, stdout=out, stderr=err)
            )
    said = []
    try:
        for rank, process in enumerate(processes):
            process.wait(400)
            wrote = [(folder / f"{rank}.{end}").read_text(errors="replace") for end in ("out", "err")]
            assert process.returncode == 0, f"rank {rank} ended with {process.returncode}:\n{wrote[1][-5000:]}"
            said.append(json.loads(wrote[0].splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    (folder / "store").unlink(missing_ok=True)
    return said


def check(suite: str, door: str, folder: Path, options: list[Options], world: int = 2, times: int = 2) -> None:
    for _ in range(times):
        said = ranks(suite, door, folder, options, world)
        wrong = [f"rank {r}, {name}: {text}" for r, of in enumerate(said) for name, text in of.items() if text]
        assert not wrong, "\n".join(wrong)
        assert all(len(of) == (SUITES | OTHERS)[suite] for of in said)


def of_suites(*short: str) -> pytest.MarkDecorator:
    """All suites, of which some are fast enough for every run of the tests."""
    slow = pytest.mark.slow
    return pytest.mark.parametrize("suite", [s if s in short else pytest.param(s, marks=slow) for s in SUITES])


@of_suites()
def test_in_contexts(suite: str, tmp_path: Path) -> None:
    check(suite, "context", tmp_path, [WAIT], times=1)


@of_suites("each")
def test_on_the_device(suite: str, tmp_path: Path) -> None:
    check(suite, "device", tmp_path, [{}], times=1 + (suite == "training"))


def test_collectives_inside_xla(tmp_path: Path) -> None:
    check("each", "device", tmp_path, [{"collectives": "xla"}], times=1)


IN_REGIONS: Options = {"collectives": "regions"}


def test_collectives_inside_regions(tmp_path: Path) -> None:
    check("inside", "device", tmp_path, [IN_REGIONS])


@pytest.mark.slow
@pytest.mark.parametrize("suite", [*SUITES, "inside"])
@pytest.mark.parametrize(
    "options",
    [[IN_REGIONS], [{**IN_REGIONS, "mode": "strict"}], [{**IN_REGIONS, "mode": "debug"}],
     [{**IN_REGIONS, "mode": "strict"}, {**IN_REGIONS, "mode": "fused"}]],
    ids=str,
)  # fmt: skip
def test_collectives_inside_regions_in_every_mode(suite: str, options: list[Options], tmp_path: Path) -> None:
    check(suite, "device", tmp_path, options, times=1)


@pytest.mark.slow
@pytest.mark.parametrize("suite", [*SUITES, "inside"])
def test_collectives_inside_regions_on_four_ranks(suite: str, tmp_path: Path) -> None:
    check(suite, "device", tmp_path, [IN_REGIONS], world=4, times=1)


@pytest.mark.slow
@pytest.mark.parametrize("door", ["context", "device"])
def test_regions_of_a_step(door: str, tmp_path: Path) -> None:
    check("regions", door, tmp_path, [WAIT if door == "context" else {}], times=1)


MIXED: dict[str, list[list[Options]]] = {
    "context": [[WAIT, None], [{"mode": "strict"}, {}], [{"mode": "debug"}, WAIT]],
    "device": [[{"mode": "strict"}, {"mode": "fused"}], [{"mode": "fused"}, {"mode": "debug"}]],
}


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("door", MIXED)
def test_ranks_in_different_modes(door: str, suite: str, tmp_path: Path) -> None:
    for options in MIXED[door]:
        check(suite, door, tmp_path, options, times=1)


OPTIONS: list[tuple[str, Options]] = [
    *(("context", options) for options in (WAIT, {}, {"native": "never"}, {"mode": "strict"}, {"mode": "debug"})),
    *(("device", {"mode": mode}) for mode in ("fused", "strict", "debug", "off")),
    *(("device", {"collectives": "xla", "mode": mode}) for mode in ("fused", "strict", "debug")),
]


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize(("door", "options"), OPTIONS, ids=str)
def test_in_every_mode_cold_and_warm(door: str, options: Options, suite: str, tmp_path: Path) -> None:
    check(suite, door, tmp_path, [options])


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize(
    ("door", "options"),
    [("context", WAIT), ("context", {}), ("device", {}), ("device", {"collectives": "xla"})],
    ids=str,
)
def test_on_four_ranks(door: str, options: Options, suite: str, tmp_path: Path) -> None:
    check(suite, door, tmp_path, [options], world=4)
