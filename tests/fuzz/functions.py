"""Random functions called again and again with arguments that share memory in other ways each time.

This is what following a remembered stream must not be taken in by: the same line, the same shapes, other aliasing.
`python -m tests.fuzz.functions --functions 500 --seed 3`.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import fused_eager as fe
from fused_eager.policy import hotness

Tensor = torch.Tensor
STATEMENTS = (
    "a.add_(1)", "b.mul_(2)", "c = a + b", "a[:1].add_(b[:1])", "c = a * b; a.copy_(c)", "d = a.t(); d.add_(b.t())",
    "c = torch.relu(a - b)", "a.view(-1)[1:].mul_(3)", "c = a.clone(); c.add_(b)", "b.add_(a.sum())", "a, b = b, a",
    "c = torch.cat([a, b])", "out.append((a * 2 + b).clone())", "torch.add(a, b, out=e)", "e.add_(a)", "a = a + 0 * b",
    "b.zero_()", "a.sub_(e)", "c = a.data; c.add_(1)", "out.append(float(b.sum()))", "a.lerp_(b, s)", "e.copy_(a)",
    "b = b.detach()", "a.addcmul_(b, e, value=s)", "torch._foreach_add_([a, b], s)",
    "torch._foreach_mul_([a, e], [b, b])", "del c; c = None", "a[0] = b[1]", "a[1] = s", "b.masked_fill_(a > 0, s)",
)  # fmt: skip
# Three n by n tensors over parts of one 5 by 8 tensor.
SHARING: tuple[Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]], ...] = (
    lambda x, n: (x[:n, :n], x[:n, :n], x[:n, :n]),
    lambda x, n: (x[:n, :n], x[1 : n + 1, :n], x[:n, :n].clone()),
    lambda x, n: (x[:n, :n].clone(), x[:n, :n].clone(), x[:n, :n].clone()),
    lambda x, n: (x[:n, :n], x[:n, :n].t(), x[:n, 1 : n + 1]),
    lambda x, n: (x[:n, :n].contiguous(), x[2 : 2 + n, 3 : 3 + n], x[2 : 2 + n, 3 : 3 + n]),
    lambda x, n: (x[:n, :n].clone(), x[:n, n : 2 * n], x[:n, :n].clone().t()),
    lambda x, n: (x[:n, :n].clone().t(), x[:n, :n].clone().t(), x[:n, :n]),
)


@dataclass(frozen=True)
class Trial:
    """A function as source, and the calls: (way of sharing, size, native memory?, number)."""

    source: str
    calls: tuple[tuple[int, int, bool, float], ...]

    def run(self) -> list[list[Any]]:
        """What each call leaves in its arguments and hands out; the type of the error where eager raises one."""
        env: dict[str, Any] = {"torch": torch}
        exec(_code(self.source), env)
        results = []
        for way, n, native, number in self.calls:
            base = torch.arange(1.0, 41.0).reshape(5, 8) / 7
            out: list[Any] = []
            try:
                left = env["f"](*SHARING[way](base if native else base * 1.0, n), number, out)
            except RuntimeError as error:
                left = [type(error).__name__]
            results.append([*left, *out])
        return results


_CODES: dict[str, Any] = {}


def _code(source: str) -> Any:
    # One code object for eager and fused, as in a program that runs twice.
    return _CODES.setdefault(source, compile(source, "<function>", "exec"))


def make(seed: int) -> Trial:
    """The trial of a seed. Its calls come twice, so that the second time they can be followed."""
    r = random.Random(seed)
    body = "\n    ".join(r.choice(STATEMENTS) for _ in range(r.randint(3, 9)))
    ways = range(len(SHARING))
    calls = tuple((r.choice(ways), r.choice([2, 2, 2, 3]), r.random() < 0.5, r.choice([0.5, 2.0, 1])) for _ in range(6))
    return Trial(f"def f(a, b, e, s, out):\n    c = a\n    {body}\n    return [a, b, c, e]\n", calls * 2)


def check(trial: Trial) -> str:
    """How the calls differ between eager and fused; "" if they do not."""
    want = trial.run()
    hotness.SKELETONS.variants.clear()
    try:
        with fe.fused_eager(mode="fused", cache="off", progress=False, validate=True):
            got = trial.run()
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        if len(a) != len(b) or not all(map(_same, a, b)):
            return f"call {i} {trial.calls[i]}: {b} instead of {a}"
    return ""


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return abs(a - b) <= 1e-3 * (1 + abs(a)) or not abs(a) < 1e6
    if not isinstance(a, Tensor):
        return bool(a == b)
    if a.stride() != b.stride() or a.shape != b.shape:
        return False
    # Where numbers have grown beyond all bounds, rounding has too.
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4) or not bool((a.abs() < 1e6).all())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.functions", description=__doc__)
    parser.add_argument("--functions", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    bad = 0
    for seed in range(args.seed, args.seed + args.functions):
        trial = make(seed)
        found = check(trial)
        if found:
            bad += 1
            print(f"MISMATCH seed {seed}: {found[:500]}\n{trial.source}{trial.calls}", flush=True)
    print(f"{args.functions} functions of {len(make(0).calls)} calls, {bad} mismatches")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
