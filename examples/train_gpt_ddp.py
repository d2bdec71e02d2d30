"""Train the small GPT of `train_gpt.py` on several processes, each with a copy of the model (DistributedDataParallel).

    torchrun --nproc-per-node 2 examples/train_gpt_ddp.py --steps 50

Plain PyTorch. Every rank draws windows of its own; the loss that is printed is the mean of all ranks. Rank 0 writes a
sample alone: other ranks need not take part.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from train_gpt import GPT, Text, draw_batch, make_optimizer, make_schedule, parse, sample, train_step

Shard = Callable[[GPT], nn.Module]


def mean_of_ranks(loss: Tensor) -> float:
    """A number of each rank's, as their mean."""
    total = loss.clone()
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    return total.item()


def train(args: argparse.Namespace, shard: Shard) -> list[float]:
    """Train as the arguments say, in a process group that is there. Returns the mean loss of all ranks, by step."""
    torch.manual_seed(args.seed)  # the same weights everywhere
    text = Text.load()
    model = GPT(len(text.alphabet), args.layers, args.dim, args.seq, args.heads).to(args.device)
    wrapped = shard(model)
    optimizer = make_optimizer(wrapped, args.lr)
    schedule = make_schedule(optimizer, args.steps)
    torch.manual_seed(args.seed + 1 + dist.get_rank())  # other data on each rank
    losses = []
    for step in range(1, args.steps + 1):
        inputs, targets = (ids.to(args.device) for ids in draw_batch(text.train, args.batch, args.seq))
        losses.append(mean_of_ranks(train_step(wrapped, optimizer, schedule, (inputs, targets))))
        if dist.get_rank() == 0 and not args.quiet and (step % args.log_every == 0 or step == args.steps):
            print(f"step {step:4d}  loss {losses[-1]:.4f}  {dist.get_world_size()} ranks", flush=True)
    if wrapped is not model and dist.get_rank() == 0 and args.sample:
        print(f"--- sample ---\n{sample(model, text, args.sample)}\n--------------")
    return losses


def main(shard: Shard, argv: Sequence[str] | None = None) -> None:
    """Join the process group that torchrun has arranged, train, and leave it."""
    args = parse(argv)
    dist.init_process_group()
    try:
        losses = train(args, shard)
        if args.losses and dist.get_rank() == 0:
            args.losses.write_text(json.dumps(losses))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(DistributedDataParallel, sys.argv[1:])
