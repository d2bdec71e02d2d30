"""What the checks of indices cost: `python -m benchmarks.index_checks` times indexing programs with and without them.

Blocks alternate in one process, always fused; the table shows medians over them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from fused_eager import fused_eager, sync

Step = Callable[[], torch.Tensor]
ROUNDS, SECONDS = 9, 0.25  # blocks of each, and how long one takes


def _programs() -> dict[str, Step]:
    torch.manual_seed(0)
    table, tokens = torch.randn(50_000, 256), torch.randint(0, 50_000, (8, 256))
    logits, targets = torch.randn(2048, 1000), torch.randint(0, 1000, (2048,))
    values, places = torch.randn(1_000_000), torch.randint(0, 1_000_000, (1_000_000,))
    rows = torch.randint(0, 50_000, (2048,))
    head = torch.nn.Linear(256, 1000)

    def train() -> torch.Tensor:
        loss = F.cross_entropy(head(F.embedding(tokens, table)).flatten(0, 1), targets)
        return torch.autograd.grad(loss, head.weight)[0]

    return {
        "embedding, 2,048 tokens": lambda: F.embedding(tokens, table).sum(),
        "index_select, 2,048 rows": lambda: table.index_select(0, rows).sum(),
        "gather, 1M of 1M numbers": lambda: values.gather(0, places).sum(),
        "index_put, 1M of 1M numbers": lambda: values.index_put((places,), values).sum(),
        "cross_entropy, 2,048 x 1,000": lambda: F.cross_entropy(logits, targets),
        "embedding, linear, cross_entropy, backward": train,
    }


def _block(step: Step, checked: bool) -> float:
    """Seconds of one step, with its result computed."""
    with fused_eager(native="never", compile="wait", check_bounds=checked):
        for _ in range(3):
            kept = step()  # else nobody reads it, and all that is left to do is the check
            sync()
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < SECONDS:
            kept = step()
            sync()
            steps += 1
        seconds = (time.perf_counter() - began) / steps
    assert kept.isfinite().all()
    return seconds


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("| program | without checks, ms | with checks against without |\n|---|---|---|")
    for name, step in _programs().items():
        _block(step, True), _block(step, False)  # what is compiled is compiled here
        pairs = [(_block(step, True), _block(step, False)) for _ in range(ROUNDS)]
        without = statistics.median(w for _, w in pairs)
        print(f"| {name} | {without * 1e3:.2f} | {statistics.median(c / w for c, w in pairs):.2f} |", flush=True)


if __name__ == "__main__":
    main()
