"""Training steps as XLA's compiler for a TPU expects them, and three of them beside the same written by hand in JAX:
`python -m benchmarks.forecasts` prints the table that is in docs/targets.md. Nothing runs on a TPU, and none is needed.

    python -m benchmarks.forecasts --target v5e:2x2 [workload ...]
    python -m benchmarks.forecasts --transformers [model ...]     # ten models of transformers, if that is installed
    python -m fused_eager forecast --target v5e:2x2 -m benchmarks.forecasts --step gpt_adamw     # the whole of one
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from benchmarks import transformers_steps
from benchmarks.table import geometric_mean
from benchmarks.transformers_steps import MODELS

if TYPE_CHECKING:
    from fused_eager.compiling.cross import Cost

STEPS = ("mlp_adam_foreach", "mlp_adam_loop", "gpt_adamw", "resnet18_train_64", "resnet18_train_128")


def run(name: str, steps: int = 4) -> None:
    """The program that is forecast: a few steps of a workload, its tensors on the device."""
    import torch

    from benchmarks.workloads import WORKLOADS

    torch.set_default_device("tpu")
    step = transformers_steps.build(name) if name in MODELS else WORKLOADS[name].build(lambda function: function)
    for _ in range(steps):
        step()


def by_hand(name: str, target: str) -> Cost:
    """What XLA's compiler expects of a workload's step in JAX, jitted whole, its gradients among the results as torch
    has them, and its products as exact as torch's. Raises KeyError: there is none."""
    import jax

    from benchmarks import jax_steps
    from benchmarks.workloads import WORKLOADS
    from fused_eager.compiling.cross import cost_of
    from fused_eager.targets.target import Target
    from fused_eager.targets.topology import devices

    made: Mapping[str, Callable[..., jax_steps.JaxStep]] = {
        "mlp": jax_steps.mlp, "gpt": jax_steps.gpt, "resnet18": jax_steps.resnet18,
    }  # fmt: skip
    sizes = {k: v for k, v in WORKLOADS[name].full.items() if k != "foreach"}
    one = made[name.partition("_")[0]](**sizes)
    at = jax.sharding.SingleDeviceSharding(devices(Target.parse(target))[0])
    placed = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), (one.state, *one.batch))
    with jax.default_matmul_precision("highest"):  # torch's own default
        return cost_of(jax.jit(one.step, donate_argnums=0).lower(*placed).compile())


def forecast(name: str, target: str, jobs: int) -> dict[str, Any]:
    """What the command says of a workload's step."""
    command = [sys.executable, "-m", "fused_eager", "forecast", "--target", target, "--json", "--valueless"]
    command += [*["--no-whole"] * (name in MODELS), "--jobs", str(jobs)]
    command += ["-m", "benchmarks.forecasts", "--step", name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _row(name: str, mode: str, seconds: float, cycles: float, without: int, launches: int) -> str:
    return f"| `{name}` | {mode} | {1e6 * seconds:.0f} us | {cycles / 1e6:.3g} M | {without} | {launches} |"


def _ratio(one: Mapping[str, Any], two: Mapping[str, Any]) -> str:
    return f"{one['seconds'] / two['seconds']:.2f} | {one['cycles'] / two['cycles']:.2f}"


def show(name: str, target: str, jobs: int) -> tuple[float, float]:
    """Print the rows of a step, and return how many times as fast it is fused as it is strict: by the compiler's
    analysis, and by its cycles."""
    told = forecast(name, target, jobs)
    rows = {mode["name"]: mode for mode in told["modes"]}
    for mode in rows.values():
        print(_row(name, mode["name"], mode["seconds"], mode["cycles"], mode["uncounted_kernels"], mode["launches"]))
    strict, fused = rows["strict"], rows["fused"]
    islands = ", ".join(cure["fault"].split()[0] for cure in told["advice"] if cure["kind"] == "island")
    told_of = f"islands: {islands}" if islands else ""
    print(f"| `{name}` | strict / fused | {_ratio(strict, fused)} | | {told_of} |", flush=True)
    with suppress(KeyError):
        hand = by_hand(name, target)
        print(_row(name, "by hand in JAX", hand.seconds, hand.cycles, hand.uncounted_kernels, 1))
        print(f"| `{name}` | fused / by hand | {_ratio(fused, asdict(hand))} | | |", flush=True)
    for region, why in told["failed"].items():
        print(f"{name}: {region}: {why}", file=sys.stderr)
    return strict["seconds"] / fused["seconds"], strict["cycles"] / fused["cycles"]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, a row as it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="v5e:2x2")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--step", help="run a few steps of one workload on the device: what is forecast")
    parser.add_argument("--transformers", action="store_true", help="models of transformers instead of the workloads")
    parser.add_argument("workloads", nargs="*")
    given = parser.parse_args(argv)
    if given.transformers and importlib.util.find_spec("transformers") is None:
        parser.error("--transformers needs them: pip install transformers")
    if given.step:
        run(given.step)
        return
    from fused_eager.xla import use_the_cpu_alone

    use_the_cpu_alone()
    print("| step | mode | time | cycles | without | launches |")
    print("|" + "---|" * 6)
    names = given.workloads or (MODELS if given.transformers else STEPS)
    gains = [show(name, given.target, given.jobs) for name in names]
    by_analysis, by_cycles = (geometric_mean(each) for each in zip(*gains, strict=True))
    print(f"\nGeometric means of strict / fused: {by_analysis:.2f}, by cycles {by_cycles:.2f}")


if __name__ == "__main__":
    main()
