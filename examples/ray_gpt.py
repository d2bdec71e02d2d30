"""Train the small GPT of `train_gpt.py` with Ray Train: `TorchTrainer` starts the workers, each with a device.

    python examples/ray_gpt.py --workers 2 --steps 50

On this machine Ray starts a cluster of its own; `--address auto` takes one that is there. The training is that of
`train_gpt_ddp.py`. What Ray has to be told is `DeviceConfig`: each worker imports the library before Ray makes the
process group, which is then the device's.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer

HERE = Path(__file__).resolve().parent


def import_device() -> None:
    """Have the device in this process, and its process group's backend."""
    import fused_eager.tpu  # noqa: F401


@dataclass
class DeviceConfig(TorchConfig):
    """Ray's own configuration of torch, on workers that have the device."""

    backend: str | None = "fused_eager"

    @property
    def backend_cls(self) -> type[Backend]:
        """What Ray calls as the workers have started."""
        of_torch: type[Backend] = super().backend_cls

        class OnDevice(of_torch):
            def on_start(self, worker_group: Any, backend_config: Any) -> None:
                worker_group.execute(import_device)
                super().on_start(worker_group, backend_config)

        return OnDevice


def train(config: dict[str, Any]) -> None:
    """What a worker runs, in a process group that Ray has made."""
    from torch.nn.parallel import DistributedDataParallel
    from train_gpt import parse
    from train_gpt_ddp import train as train_gpt

    losses = train_gpt(parse(["--device", "tpu", *config["arguments"]]), DistributedDataParallel)
    device = torch.ones(1, device="tpu").device
    said = {"backend": dist.get_backend(), "workers": dist.get_world_size(), "device": str(device)}
    with tempfile.TemporaryDirectory() as folder:  # Ray keeps what is reported with a checkpoint
        Path(folder, "losses.json").write_text(json.dumps(losses))
        kept = Checkpoint.from_directory(folder) if dist.get_rank() == 0 else None
        ray.train.report({"loss": losses[-1], "first": losses[0], **said}, checkpoint=kept)


def main() -> None:
    """Start Ray, train on its workers, and print what rank 0 reports."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2, help="how many processes, each with a device")
    parser.add_argument("--address", help="of a Ray that is there (default: one is started)")
    parser.add_argument("--storage", default=str(Path("~/ray_results").expanduser()), help="where Ray keeps results")
    args, of_gpt = parser.parse_known_args()
    paths = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])  # of the examples' modules
    ray.init(address=args.address, runtime_env={"env_vars": {"PYTHONPATH": paths}}, include_dashboard=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={"arguments": of_gpt},
        torch_config=DeviceConfig(),
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=False),
        run_config=RunConfig(storage_path=args.storage),
    )
    result = trainer.fit()
    print(json.dumps(result.metrics), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
