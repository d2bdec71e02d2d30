"""Blocks computed again in backward, with dropout, in both of torch's ways, and gradients looked at by hooks."""

import argparse

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Dropout(0.1), nn.Linear(2 * width, width))

    def forward(self, x):
        n = self.norm1(x)
        x = x + self.attention(n, n, n, need_weights=False)[0]
        return x + self.feed(self.norm2(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    torch.manual_seed(11)
    device = torch.device(args.device)
    blocks = nn.Sequential(*[Block(16) for _ in range(4)]).to(device)
    head = nn.Linear(16, 5).to(device)
    optimizer = torch.optim.RAdam([*blocks.parameters(), *head.parameters()], lr=1e-2)
    norms = {}
    for name, p in head.named_parameters():
        p.register_hook(lambda g, name=name: norms.setdefault(name, []).append(g.norm().item()))
    losses = []
    for step in range(args.steps):
        x = torch.randn(4, 6, 16).to(device)
        target = torch.randint(0, 5, (4, 6)).to(device)
        if step % 2:
            x.requires_grad_()
            hidden = checkpoint_sequential(blocks, 2, x, use_reentrant=True)
        else:
            hidden = x
            for block in blocks:
                hidden = checkpoint(block, hidden, use_reentrant=False)
        loss = nn.functional.cross_entropy(head(hidden).flatten(0, 1), target.flatten(), label_smoothing=0.1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        total = nn.utils.clip_grad_norm_(blocks.parameters(), 1.0)
        optimizer.step()
        losses += [loss.item(), total.item()]
        print(f"step {step} loss {loss:.4f} norm {total:.4f}")
    if args.out:
        torch.save({"losses": losses, "norms": norms, "model": blocks.state_dict()}, args.out)


if __name__ == "__main__":
    main()
