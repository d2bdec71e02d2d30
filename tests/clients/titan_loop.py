"""torchtitan's debug model in a loop of its own, on the CPU: from the weights of a checkpoint, with the batches of all
ranks of a data-parallel run. Prints the loss of each step.

    python titan_loop.py CONFIG CHECKPOINT RANKS [torchtitan's own options]
"""

from __future__ import annotations

import sys

import torch
from torch.distributed import checkpoint
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.config import ConfigManager
from torchtitan.protocols.train_spec import get_train_spec

IGNORED = -100  # labels that count for nothing


def main() -> None:
    file, folder, ranks, *options = sys.argv[1:]
    config = ConfigManager().parse_args(["--job.config_file", file, *options])
    spec = get_train_spec(config.model.name)
    tokenizer = spec.build_tokenizer_fn(config)
    loaders = [
        iter(spec.build_dataloader_fn(dp_world_size=int(ranks), dp_rank=rank, tokenizer=tokenizer, job_config=config))
        for rank in range(int(ranks))
    ]
    arguments = spec.model_args[config.model.flavor]
    arguments.update_from_config(config)
    model = spec.model_cls(arguments)
    with torch.no_grad():
        model.init_weights(buffer_device="cpu")
    weights = dict(model.state_dict())
    checkpoint.load(weights, checkpoint_id=folder)
    model.load_state_dict(weights)
    given = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), given.lr, (given.beta1, given.beta2), given.eps, given.weight_decay
    )
    schedule = build_lr_schedulers([optimizer], config.lr_scheduler, config.training.steps)
    for _ in range(config.training.steps):
        optimizer.zero_grad()
        batches = [next(loader) for loader in loaders]
        tokens = torch.cat([batch["input"] for batch, _ in batches])
        labels = torch.cat([labels for _, labels in batches]).flatten()
        scores = model(tokens).flatten(0, 1).float()
        loss = torch.nn.functional.cross_entropy(scores, labels, reduction="sum", ignore_index=IGNORED)
        (loss / (labels != IGNORED).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
        optimizer.step()
        schedule.step()
        print(f"loss: {loss.item() / (labels != IGNORED).sum().item():.6f}", flush=True)


if __name__ == "__main__":
    main()
