"""The compiled follower on the device: what it takes, what it leaves to Python, and that nobody can tell."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from fused_eager import follower
from fused_eager.follower import build
from fused_eager.frontends.device.doors import DOORS

from .compare import TPU

DEFERS = DOORS[0].stream.config.mode == "fused"
pytestmark = [
    pytest.mark.skipif(bool(build.obstacle()), reason=build.obstacle() or "it can be built"),
    pytest.mark.skipif(not DEFERS, reason="ops are followed where they are fused"),
    pytest.mark.skipif(not follower.is_open(), reason=follower.status()),
]


def program(x: torch.Tensor, scale: float = 0.5) -> torch.Tensor:
    y = torch.tanh(x @ x.t()) * scale
    z = torch.cat([y, y.t()], 1) + 1
    return z.sum(0, keepdim=True) - y.mean()


def followed_in(call: object, *args: object) -> tuple[torch.Tensor, int, int]:
    """What a call returns, and how many of its ops went to Python and were followed."""
    before = follower.ways()
    out = call(*args)  # type: ignore[operator]
    after = follower.ways()
    return out, after[0] - before[0], after[2] - before[2]


def settled(x: torch.Tensor) -> None:
    for _ in range(4):
        program(x).cpu()


X = torch.randn(4, 4)


def test_what_comes_again_does_not_reach_python() -> None:
    x = X.to(TPU)
    settled(x)
    out, python, followed = followed_in(program, x)
    assert (python, followed) == (0, 8)
    torch.testing.assert_close(out.cpu(), program(X))


def test_another_number_is_an_input_and_another_shape_another_program() -> None:
    x, y = X.to(TPU), torch.randn(5, 5)
    settled(x)
    out, python, _ = followed_in(program, x, 2.5)
    assert python == 0
    torch.testing.assert_close(out.cpu(), program(X, 2.5))
    out, python, _ = followed_in(program, y.to(TPU))
    assert python > 0
    torch.testing.assert_close(out.cpu(), program(y))


def test_what_is_written_in_place_is_seen_by_autograd() -> None:
    def step(x: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
        y = x * 2
        y.add_(1)
        torch._foreach_mul_(parts, 0.5)
        return y

    parts = [torch.ones(3, device=TPU), torch.ones(2, 2, device=TPU)]
    for _ in range(4):
        step(X.to(TPU), parts).cpu()
    versions = [p._version for p in parts]
    out, _, followed = followed_in(step, X.to(TPU), parts)
    assert followed >= 2 and out._version == 1 and [p._version for p in parts] == [v + 1 for v in versions]
    assert parts[0].tolist() == [0.5**5] * 3
    torch.testing.assert_close(out.cpu(), X * 2 + 1)
    a = torch.ones(3, device=TPU, requires_grad=True)
    b = a * 1
    c = b * b
    b.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        c.sum().backward()


def test_a_result_lies_where_its_operands_do() -> None:
    for index in range(torch.tpu.device_count()):  # type: ignore[attr-defined]
        x = X.to(torch.device("tpu", index))
        settled(x)
        out, _, followed = followed_in(program, x)
        assert followed == 8, f"on the device {index}"
        assert out.device == x.device and out.is_contiguous() and out.untyped_storage().nbytes() == 32
        assert len({out.data_ptr(), x.data_ptr(), program(x).data_ptr()}) == 3


def test_a_training_step_is_followed_and_learns_what_it_does_without() -> None:
    def losses(device: object) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 1)).to(device)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        found = []
        for _ in range(8):
            loss = model(X.to(device)).pow(2).mean()  # type: ignore[call-overload]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    before = follower.ways()[2]
    there = losses(TPU)
    assert follower.ways()[2] - before > 100
    assert there == pytest.approx(losses("cpu"), rel=1e-4)


def test_casts_and_draws_are_followed_like_other_ops() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).to(TPU)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    x = X.to(TPU)

    def step() -> torch.Tensor:
        with torch.autocast("tpu", dtype=torch.bfloat16):
            loss = model(x).float().pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = [step().item() for _ in range(4)]
    loss, python, followed = followed_in(step)
    assert python == 0 and followed > 20
    assert len({*losses, loss.item()}) == 5, "each draw is another one"


def test_two_threads_on_one_device() -> None:
    x = X.to(TPU)
    settled(x)
    found: list[torch.Tensor] = []

    def work() -> None:
        for _ in range(30):
            found.append(program(x).cpu())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 60
    for out in found:
        torch.testing.assert_close(out, program(X))


def test_a_long_loop_is_cut_where_it_begins() -> None:
    x = torch.ones(3, device=TPU)
    total = torch.zeros(3, device=TPU)
    for _ in range(3000):
        total = total + x * 0.5
    assert total.tolist() == [1500.0] * 3
