"""A loop without a turn: the door steps aside between two ops, and comes back."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import signal, sys, threading, time
import torch
from fused_eager import fused_eager
from fused_eager.frontends.context import moments
from fused_eager.frontends.context.threads import current_door
from fused_eager.quiet import stack

x = torch.rand(8)
rounds = 0


def turn(y):
    global rounds
    rounds += 1
    return torch.relu(1 - y * 0.999)


def goes_on_until(what, y):
    limit = time.monotonic() + 60
    while not what():
        y = turn(y)
        assert time.monotonic() < limit, "it never came"
    return y


class Doubles(torch.autograd.Function):
    seen = []

    @staticmethod
    def forward(ctx, t):
        for _ in range(50):
            Doubles.seen.append(current_door() in stack() or current_door().bypassed)
        return t * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


told = []
signal.signal(signal.SIGALRM, lambda *_: told.append(current_door()))
with fused_eager():
    door = current_door()
    y = goes_on_until(lambda: door.bypassed, x)
    assert door.between and door not in stack()
    door.stream.policy.backoff.end()
    y = goes_on_until(lambda: not door.bypassed, y)
    assert door in stack()
    y = goes_on_until(lambda: door.bypassed, y)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    y = goes_on_until(lambda: told, y)
    with torch.no_grad():
        z = Doubles.apply(y)
    total = z.sum()
assert current_door() is None and not stack()
assert all(Doubles.seen)
expected = x
for _ in range(rounds):
    expected = torch.relu(1 - expected * 0.999)
torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-4)
torch.testing.assert_close(total, (y * 2).sum())

# Nobody looks where no context is open.
limit = time.monotonic() + 30
while moments._attendant is not None and time.monotonic() < limit:
    time.sleep(0.1)
assert moments._attendant is None

# Another thread's context has no such moments, and does without.
def alone():
    with fused_eager():
        y, limit = x, time.monotonic() + 0.5
        while time.monotonic() < limit:
            y = turn(y)
        assert not current_door().bypassed
        return y


worker = threading.Thread(target=alone)
worker.start()
worker.join()
print("right")
"""


def test_a_loop_without_turns_is_left_to_torch_and_taken_up_again() -> None:
    as_a_user = {name: value for name, value in os.environ.items() if not name.startswith("FUSED_EAGER_")}
    as_a_user["FUSED_EAGER_CACHE"] = "off"
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, env=as_a_user)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "right\n"
