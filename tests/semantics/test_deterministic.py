"""Deterministic: the same program computes the same bits, cold and warm, in a second process, and twice in one."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fused_eager import fused_eager
from fused_eager.frontends.context.threads import current_door


def learn(seed: int = 0) -> str:
    """A seeded policy gradient on a small world, whose episodes differ in length: a digest of all that it computed."""
    torch.manual_seed(seed)
    policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
    seen = hashlib.sha256()
    for _ in range(8):
        state, steps = torch.zeros(4), []
        for t in range(12):
            chosen = torch.distributions.Categorical(logits=policy(state))
            action = chosen.sample()
            state = (state * 0.9 + torch.randn(4) * 0.3 + (action.float() - 0.5)).tanh()
            steps.append((chosen.log_prob(action), -state.abs().sum()))
            if t > 3 and state[0].item() > 0.3:
                break
        rewards = torch.stack([r for _, r in steps]).flip(0).cumsum(0).flip(0).detach()
        loss = -(torch.stack([p for p, _ in steps]) * (rewards - rewards.mean())).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.update(repr((len(steps), loss.item(), [p.tolist() for p in policy.parameters()])).encode())
    return seen.hexdigest()


def _process(cache: Path) -> str:
    program = (
        "from tests.semantics.test_deterministic import learn\nfrom fused_eager import fused_eager\n"
        "with fused_eager(): print(learn(), learn())"
    )
    options = {"FUSED_EAGER_DETERMINISTIC": "1", "FUSED_EAGER_CACHE_DIR": str(cache), "FUSED_EAGER_CACHE": ""}
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FUSED_EAGER_")}
    root = Path(__file__).parents[2]
    made = subprocess.run(
        [sys.executable, "-c", program], env=kept | options, cwd=root, capture_output=True, text=True, timeout=600
    )
    assert made.returncode == 0, made.stderr
    return made.stdout


@pytest.mark.slow
def test_a_seeded_program_computes_the_same_bits_cold_warm_and_again(tmp_path: Path) -> None:
    cold, warm, elsewhere = _process(tmp_path / "a"), _process(tmp_path / "a"), _process(tmp_path / "b")
    assert cold == warm == elsewhere
    assert len(set(cold.split())) == 1, "nor does it depend on what came before in one process"


def test_torch_switches_it_on() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with fused_eager(native="measured", compile="auto"):
            config = current_door().stream.config  # type: ignore[union-attr]
            assert config.is_reproducible and config.waits and not config.measures
        with fused_eager(native="measured", compile="auto", deterministic=False):
            assert not current_door().stream.config.is_reproducible  # type: ignore[union-attr]
    finally:
        torch.use_deterministic_algorithms(False)
    with fused_eager(native="measured", compile="auto"):
        assert not current_door().stream.config.is_reproducible  # type: ignore[union-attr]


def test_a_stream_is_run_as_it_was_the_first_time() -> None:
    """Of changing shapes the first few are compiled, and what was not is not, however often it comes."""
    x = torch.linspace(0.1, 3, 997)

    def program() -> list[float]:
        return [((x[:n] * 1.7 - 0.3).sin() * x[:n]).sum().item() for n in range(500, 508) for _ in range(5)]

    with fused_eager(deterministic=True, native="measured", cache="off"):
        first = program()
        assert program() == first
    assert all(len(set(first[i : i + 5])) == 1 for i in range(0, len(first), 5))
