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
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import transformers_steps
from benchmarks.transformers_steps import MODELS

STEPS = ("mlp_adam_foreach", "mlp_adam_loop", "gpt_adamw", "resnet18_train_64", "resnet18_train_128")


def run(name: str, steps: int = 4) -> None:
    """The program that is forecast: a few steps of a workload, its tensors on the device."""
    import torch

    from benchmarks.workloads import WORKLOADS

    torch.set_default_device("tpu")
    step = transformers_steps.build(name) if name in MODELS else WORKLOADS[name].build(lambda function: function)
    for _ in range(steps):
        step()


def by_hand(name: str, target: str) -> tuple[float, float]:
    """What XLA's compiler expects of a workload's step in JAX, jitted whole, and of the same with its gradients among
    the results, as torch has them. Raises KeyError: there is none."""
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

    def seconds(step: Callable[..., Any]) -> float:
        return cost_of(jax.jit(step, donate_argnums=0).lower(*placed).compile()).seconds

    return seconds(lambda *given: one.step(*given)[:2]), seconds(one.step)


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


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} us"


def _models(names: Sequence[str], target: str, jobs: int) -> None:
    print("| model | strict | fused | strict / fused | launches | islands | memory |")
    print("|" + "---|" * 7)
    gains = []
    for name in names:
        told = forecast(name, target, jobs)
        strict, fused = told["modes"][:2]
        gains.append(strict["seconds"] / fused["seconds"])
        islands = ", ".join(cure["fault"].split()[0] for cure in told["advice"] if cure["kind"] == "island")
        print(
            f"| `{name}` | {_us(strict['seconds'])} | {_us(fused['seconds'])} | {gains[-1]:.2f} "
            f"| {strict['launches']} to {fused['launches']} | {islands or 'none'} "
            f"| {fused['memory'] / 2**20:.0f} MB |",
            flush=True,
        )
        for region, why in told["failed"].items():
            print(f"{name}: {region}: {why}", file=sys.stderr)
    print(f"\nGeometric mean of strict / fused: {math.exp(sum(map(math.log, gains)) / len(gains)):.2f}")


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
    if given.transformers:
        _models(given.workloads or list(MODELS), given.target, given.jobs)
        return
    print("| step | strict | fused | whole | strict / fused | launches | by hand in JAX | fused / by hand | by hand, "
          "gradients returned | fused / that |")  # fmt: skip
    print("|" + "---|" * 10)
    for name in given.workloads or STEPS:
        told = forecast(name, given.target, given.jobs)
        modes = {mode["name"]: mode["seconds"] for mode in told["modes"]}
        strict, fused, whole = (modes[mode] for mode in ("strict", "fused", "whole"))
        try:
            hand, returned = by_hand(name, given.target)
            beside = f"{_us(hand)} | {fused / hand:.2f} | {_us(returned)} | {fused / returned:.2f}"
        except KeyError:
            beside = " | | | "
        launches = " to ".join(str(mode["launches"]) for mode in told["modes"] if mode["name"] != "whole")
        print(
            f"| `{name}` | {_us(strict)} | {_us(fused)} | {_us(whole)} | {strict / fused:.2f} | {launches} "
            f"| {beside} |",
            flush=True,
        )
        for region, why in told["failed"].items():
            print(f"{name}: {region}: {why}", file=sys.stderr)


if __name__ == "__main__":
    main()
