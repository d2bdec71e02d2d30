"""An MLP mixer written with einops: rearrange, reduce, repeat, einsum, and its layers."""

import argparse

import torch
from einops import einsum, pack, rearrange, reduce, repeat, unpack
from einops.layers.torch import Rearrange, Reduce
from torch import nn


class Block(nn.Module):
    def __init__(self, dim, tokens):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.channels = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + rearrange(self.tokens(rearrange(self.norms[0](x), "b t c -> b c t")), "b c t -> b t c")
        return x + self.channels(self.norms[1](x))


class Mixer(nn.Module):
    def __init__(self, dim=16, heads=4):
        super().__init__()
        self.heads = heads
        self.patch = nn.Sequential(Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=4, q=4), nn.Linear(48, dim))
        self.blocks = nn.Sequential(*(Block(dim, 17) for _ in range(2)))
        self.first = nn.Parameter(torch.zeros(dim))
        self.qkv = nn.Linear(dim, 3 * dim)
        self.head = nn.Sequential(Reduce("b t c -> b c", "mean"), nn.Linear(dim, 5))

    def forward(self, x):
        x = self.patch(x)
        x, shapes = pack([repeat(self.first, "c -> b c", b=len(x)), x], "b * c")
        x = self.blocks(x)
        q, k, v = rearrange(self.qkv(x), "b t (n h c) -> n b h t c", n=3, h=self.heads)
        weights = (einsum(q, k, "b h i c, b h j c -> b h i j") * q.shape[-1] ** -0.5).softmax(-1)
        x = x + rearrange(einsum(weights, v, "b h i j, b h j c -> b h i c"), "b h t c -> b t (h c)")
        first, rest = unpack(x, shapes, "b * c")
        return self.head(rest) + reduce(first, "b (g c) -> b g", "max", g=1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Mixer().to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(12):
        x, y = torch.randn(8, 3, 16, 16), torch.randint(0, 5, (8,))
        loss = nn.functional.cross_entropy(model(x.to(args.device)), y.to(args.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if args.out:
        torch.save({"losses": losses, "model": model.state_dict()}, args.out)


if __name__ == "__main__":
    main()
