"""Train the small GPT of `train_gpt.py` on several processes that share its weights out (FSDP2, `fully_shard`).

    torchrun --nproc-per-node 2 examples/train_gpt_fsdp.py --steps 50

Each process keeps a part of every weight, gathers a block's weights before it is computed, and lets go of them after.
"""

from __future__ import annotations

import sys

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from train_gpt import GPT
from train_gpt_ddp import main


def sharded(model: GPT) -> nn.Module:
    """The model itself, its blocks and what is around them sharded over all ranks."""
    mesh = init_device_mesh(model.tokens.weight.device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


if __name__ == "__main__":
    main(sharded, sys.argv[1:])
