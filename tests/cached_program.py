"""Programs for tests of the compile cache: `python -m tests.cached_program NAME,... [SECONDS]` runs them, prints JSON.

Options come from the environment. With SECONDS, each compilation takes that much longer, and says so before it starts.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import time
import types
from collections import Counter
from typing import Any

import jax
import torch
from fused_eager.cache import Cache, Follow, Key, Lead

from fused_eager import follower, fused_eager, xla
from fused_eager.compiling.caching import keeper
from fused_eager.compiling.xla_cpu.subprocess_compiler import COMPILER
from fused_eager.config import resolve
from fused_eager.frontends.context import bypass, readers
from fused_eager.frontends.context.threads import current_door
from fused_eager.log.events import LOG
from fused_eager.policy import alone, autotuner, policy, segment

JAX_EVENTS: Counter[str] = Counter()
OPTIONS = len(xla._LIBRARIES)


def _count(event: str, seconds: float, **kwargs: Any) -> None:
    JAX_EVENTS[event.rsplit("/", 1)[-1]] += 1


def small() -> Any:
    """Three different regions, cut by reading a value; one of them checks an index."""
    x = torch.linspace(-1, 1, 60).reshape(12, 5)
    total = ((x * 2).relu() + 1).sum(1)
    first = total.max().item()
    picked = x[torch.tensor([1, 7, 11])] * first
    second = (picked @ picked.t()).tolist()
    return first, second, torch.linspace(0, 3, 7).softmax(0).cumsum(0).tolist()


def lapack() -> Any:
    """A region that calls LAPACK."""
    a = torch.eye(5) * 3 + torch.arange(25.0).reshape(5, 5) / 50
    return (torch.linalg.inv(a) @ a).tolist(), torch.linalg.det(a).item()


def bad_index() -> Any:
    """What a check reveals, in words."""
    try:
        return torch.zeros(3)[torch.tensor([1, 77])].tolist()
    except IndexError as error:
        return str(error).partition(" (")[0]


def large() -> Any:
    """A training step that remembers more for its way back than one block of the heap."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[module for _ in range(6) for module in (torch.nn.Linear(512, 512), torch.nn.Tanh())])
    loss = model(torch.randn(4096, 512)).square().mean()
    loss.backward()
    return loss.item(), [p.grad.sum().item() for p in model.parameters() if p.grad is not None]


def gpt(steps: int = 2) -> Any:
    """Steps of the example's training, and how long each took."""
    example = importlib.import_module("examples.train_gpt")
    torch.manual_seed(0)
    text = example.Text.load()
    model = example.GPT(len(text.alphabet), 4, 128, 64)
    optimizer = example.make_optimizer(model, 1e-3)
    schedule = example.make_schedule(optimizer, 100)
    losses, seconds = [], []
    for _ in range(steps):
        started = time.perf_counter()
        losses.append(example.train_step(model, optimizer, schedule, example.draw_batch(text.train, 8, 64)).item())
        seconds.append(time.perf_counter() - started)
    TIMES.extend(seconds)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return losses, hashlib.sha256(weights).hexdigest()


def autotuned(rounds: int = 16, fused: float = 2.0, native: float = 1.0) -> Any:
    """A loop with one read, on a clock that only passes as it is told to: whether each round ran natively."""
    clock, real = types.SimpleNamespace(now=0.0), time
    clocks: tuple[Any, ...] = (alone, autotuner, policy, segment, bypass)
    for module in clocks:
        module.time = types.SimpleNamespace(perf_counter=lambda: clock.now)
    # Reads look at the machine's clock, which in the first minutes after its start may be behind this one.
    overlook, follower.overlook = follower.overlook, lambda until: 0.0
    readers_clock, readers.perf_counter = readers.perf_counter, lambda: clock.now
    door = current_door()
    assert door is not None
    kept, x, ways = keeper(door.stream.config), torch.linspace(-1, 1, 24), []
    x.numpy()  # from its memory in the first round too
    try:
        for _ in range(rounds):
            y = (x * 2).relu() + 1
            ways.append(door.stream.policy.autotuner.native)
            clock.now += native if ways[-1] else fused
            assert y.sum().item() > 0
            if kept is not None:
                kept.flush()  # no round may be over before the cache has answered
    finally:
        for module in clocks:
            module.time = real
        follower.overlook, readers.perf_counter = overlook, readers_clock
    return ways


TIMES: list[float] = []
APART: list[int] = []  # bytes of what XLA has compiled in a process of its own


def main(name: str, slower: float) -> None:
    jax.monitoring.register_event_duration_secs_listener(_count)
    torch.set_num_threads(1)
    compile = COMPILER.compile

    def compiled_in_subprocess(*args: Any) -> bytes:
        made = compile(*args)
        APART.append(len(made))
        return made

    COMPILER.compile = compiled_in_subprocess  # type: ignore[method-assign]
    if slower:
        compiling = importlib.import_module("fused_eager.compiling.compile")
        build = compiling.build

        def slow(*args: Any) -> Any:
            print("compiling", flush=True)
            time.sleep(slower)
            return build(*args)

        compiling.build = slow
        flight = Cache.flight

        def told(self: Cache, key: Key) -> Lead | Follow:
            found = flight(self, key)
            if isinstance(found, Follow):
                print("following", flush=True)
            return found

        Cache.flight = told  # type: ignore[method-assign]
        print("ready", flush=True)
        sys.stdin.readline()
    with fused_eager():
        values = [globals()[n]() for n in name.split(",")]
    kept = keeper(resolve())
    flushed = kept.flush(60) if kept is not None else True
    out = {
        "value": values[0] if len(values) == 1 else values,
        "flushed": flushed,
        "counts": {k: v for k, v in LOG.counts.items() if k.startswith(("c", "island"))},
        "keys": [e.data["key"] for e in LOG.of("cache-publish")],
        "traces": JAX_EVENTS["jaxpr_trace_duration"],
        "lowerings": JAX_EVENTS["jaxpr_to_mlir_module_duration"],
        # but for the tries of options that this jaxlib turned out not to know
        "compilations": JAX_EVENTS["backend_compile_duration"] - OPTIONS + len(xla._LIBRARIES) + len(APART),
        "seconds": TIMES,
    }
    print(json.dumps(out), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
