"""Systems of others beside ours: absent they are a reason, present they compute the same and disturb nobody."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from importlib.util import find_spec

import pytest

from benchmarks import __main__ as command
from benchmarks import peers
from benchmarks.workloads import WORKLOADS


def run(*argv: str) -> int:
    return command.run(command.parse([*argv, "--tiny", "--quick", "--rounds=1"]))


def test_a_peer_is_waited_for() -> None:
    import jax.numpy as jnp

    ones = jnp.ones((512, 512))
    product_of_many = ones @ ones @ ones @ ones
    peers.wait()
    assert product_of_many.is_ready()


def test_peers_are_imported_only_for_their_columns() -> None:
    assert run("tiny", "--modes=eager") == 0
    assert "torchax" not in sys.modules


def test_an_absent_peer_is_a_reason_and_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torchax", None)
    monkeypatch.setattr(peers, "_torchax", cache(peers._torchax.__wrapped__))
    assert run("tiny", "--modes=torchax,torchax_jit") == 0
    out = capsys.readouterr().out
    for name in ("torchax", "torchax_jit"):
        assert f"tiny, {name}: ModuleNotFoundError: torchax is not installed (the extra `peers` brings it)" in out


IN_TORCHAX = """
import json, torch
from benchmarks import measure
from benchmarks.systems import REFERENCE, SYSTEMS
from benchmarks.workloads import WORKLOADS

def difference(name, system):
    workload = WORKLOADS[name]
    _, plain = measure.first_results(workload, REFERENCE, "tiny")
    try:
        _, ours = measure.first_results(workload, SYSTEMS[system], "tiny")
    except Exception as error:
        return str(error)
    return measure.compare(workload, SYSTEMS[system], ours, plain)[1]

fast_attention = torch.backends.mha.get_fastpath_enabled()
for name in {names}:
    for system in ("torchax", "torchax_jit", "fused"):
        print(json.dumps([name + "/" + system, difference(name, system)]))
print(json.dumps(["restored", torch.backends.mha.get_fastpath_enabled() == fast_attention]))
"""
WITH_TORCHAX = pytest.mark.skipif(find_spec("torchax") is None, reason="torchax is not installed (the extra `peers`)")
# Rows that differ at full size only are the same work when tiny.
DISTINCT = {(row.setup, *row.tiny.items()): name for name, row in WORKLOADS.items() if not row.trains}
INFERENCE = sorted(DISTINCT.values())


@pytest.fixture(scope="module")
def in_torchax() -> dict[str, bool | str]:
    """What comes out where torchax and fused_eager take turns: in another process, for torchax changes torch in it."""
    script = IN_TORCHAX.format(names=[*INFERENCE, "mlp_adam_loop"])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


@WITH_TORCHAX
@pytest.mark.parametrize("name", INFERENCE)
def test_torchax_computes_what_eager_computes_and_so_do_we_beside_it(
    name: str, in_torchax: dict[str, bool | str]
) -> None:
    found = {system: in_torchax[f"{name}/{system}"] for system in ("torchax", "torchax_jit", "fused")}
    assert found == dict.fromkeys(found, True)


@WITH_TORCHAX
def test_torchax_says_why_it_does_not_train(in_torchax: dict[str, bool | str]) -> None:
    for name in ("torchax", "torchax_jit"):
        assert "it trains with jax.grad and optax" in str(in_torchax[f"mlp_adam_loop/{name}"])
    assert in_torchax["mlp_adam_loop/fused"] is True


@WITH_TORCHAX
def test_torchax_leaves_plain_eager_as_it_was(in_torchax: dict[str, bool | str]) -> None:
    assert in_torchax["restored"] is True
