"""The models that the workloads run, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Sequential):
    """`layers` square linear layers with GELU between them. [batch, dim] -> [batch, dim]."""

    def __init__(self, layers: int, dim: int) -> None:
        parts: list[nn.Module] = []
        for layer in range(layers):
            parts += [nn.GELU()] * bool(layer) + [nn.Linear(dim, dim)]
        super().__init__(*parts)


class BasicBlock(nn.Module):
    """The two-convolution block of ResNet-18 and -34. [n, c, h, w] -> [n, out, h / stride, w / stride]."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


class ResNet18(nn.Module):
    """He et al. 2015: 7x7 stem, max-pool, four stages of two blocks. Images [n, 3, h, w] -> logits [n, classes]."""

    def __init__(self, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(True),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks: list[nn.Module] = []
        channels = width
        for stage in range(4):
            out = width << stage
            blocks += [BasicBlock(channels, out, 2 if stage else 1), BasicBlock(out, out, 1)]
            channels = out
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.blocks(self.stem(images)), 1).flatten(1))


KeysAndValues = tuple[Tensor, Tensor]


class DecoderBlock(nn.Module):
    """One new token attends to all so far. [batch, 1, dim] and the cache -> the same, the cache longer."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.project = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, cache: KeysAndValues | None) -> tuple[Tensor, KeysAndValues]:
        batch, seq, dim = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, dim // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, seq, dim))
        return x + self.mlp(self.norm2(x)), (k, v)


class Decoder(nn.Module):
    """A transformer that decodes token by token with a key-value cache that grows by concatenation."""

    def __init__(self, vocab: int, layers: int, dim: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(DecoderBlock(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(
        self, token: Tensor, place: Tensor, caches: list[KeysAndValues | None]
    ) -> tuple[Tensor, list[KeysAndValues | None]]:
        """Token and place [batch, 1] and one cache per block -> logits [batch, vocab] and the longer caches."""
        x = self.tokens(token) + self.positions(place)
        longer: list[KeysAndValues | None] = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, grown = block(x, cache)
            longer.append(grown)
        return self.head(self.norm(x))[:, -1], longer
