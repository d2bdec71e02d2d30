"""An encoder and a decoder in newer forms: rotary places, RMS norm, gated layers, grouped heads, memories."""

import argparse

import torch
import torch.nn.functional as F
from einops import pack, rearrange, reduce, repeat, unpack
from torch import nn


def rotate(x, places):
    inverse = 1.0 / 100 ** (torch.arange(0, x.size(-1), 2, device=x.device).float() / x.size(-1))
    angles = repeat(places.float()[:, None] * inverse, "n d -> n (d r)", r=2)
    turned = rearrange(torch.stack((-x[..., 1::2], x[..., ::2]), -1), "... d r -> ... (d r)")
    return x * angles.cos() + turned * angles.sin()


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.normalize(x, dim=-1) * x.size(-1) ** 0.5 * self.gain


class Layer(nn.Module):
    def __init__(self, width=32, heads=4, groups=2, causal=False):
        super().__init__()
        self.heads, self.groups, self.causal = heads, groups, causal
        self.norm, self.after = Norm(width), Norm(width)
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width * groups // heads, bias=False)
        self.memory = nn.Parameter(torch.randn(2, groups, 3, width // heads) * 0.1)
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.full((heads, 1, 1), 4.0))

    def forward(self, x, context=None, mask=None):
        h = self.norm(x)
        source = h if context is None else context
        q = rearrange(self.q(h), "b n (h d) -> b h n d", h=self.heads)
        k, v = rearrange(self.kv(source), "b n (r g d) -> r b g n d", r=2, g=self.groups)
        if context is None:
            places = torch.arange(x.size(1), device=x.device)
            q, k = rotate(q, places), rotate(k, places)
        more = repeat(self.memory, "r g m d -> r b g m d", b=x.size(0))
        k, v = torch.cat([more[0], k], 2), torch.cat([more[1], v], 2)
        k, v = (repeat(t, "b g n d -> b (g r) n d", r=self.heads // self.groups) for t in (k, v))
        scores = torch.einsum("bhid,bhjd->bhij", F.normalize(q, dim=-1), F.normalize(k, dim=-1)) * self.scale
        if mask is not None:
            scores = scores.masked_fill(~F.pad(mask, (3, 0), value=True)[:, None, None], -torch.finfo(scores.dtype).max)
        if self.causal:
            i, j = scores.shape[-2:]
            scores = scores.masked_fill(torch.ones(i, j, dtype=torch.bool, device=x.device).triu(j - i + 1), -1e9)
        x = x + self.out(rearrange(scores.softmax(-1) @ v, "b h n d -> b n (h d)"))
        gate, value = self.up(self.after(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.registers = nn.Embedding(20, 32), nn.Parameter(torch.randn(2, 32))
        self.encoder = nn.ModuleList(Layer() for _ in range(2))
        self.decoder = nn.ModuleList(nn.ModuleList([Layer(causal=True), Layer()]) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(20))

    def encode(self, x, mask):
        x, shape = pack([repeat(self.registers, "r d -> b r d", b=x.size(0)), self.words(x)], "b * d")
        whole = F.pad(mask, (2, 0), value=True)
        for layer in self.encoder:
            x = layer(x, mask=whole)
        return unpack(x, shape, "b * d")[1]

    def decode(self, y, context, mask):
        y = self.words(y)
        for own, cross in self.decoder:
            y = cross(own(y), context, mask)
        return y @ self.words.weight.T + self.bias

    def forward(self, x, y, mask):
        return self.decode(y, self.encode(x, mask), mask)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = Model().to(args.device)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=3e-3)
    losses = []
    for step in range(6):
        x = torch.randint(1, 20, (4, 7), generator=g)
        lengths = torch.randint(3, 8, (4,), generator=g)
        mask = torch.arange(7) < lengths[:, None]
        y = x.flip(1)
        x, mask, y = x.to(args.device), mask.to(args.device), y.to(args.device)
        out = model(x, y[:, :-1], mask)
        loss = F.cross_entropy(rearrange(out, "b n c -> b c n"), y[:, 1:], ignore_index=3, label_smoothing=0.1)
        loss = loss + 1e-4 * reduce(out.logsumexp(-1) ** 2, "b n -> ", "mean")
        (loss / 2).backward()
        if step % 2:
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        context = model.encode(x, mask)
        written = y[:, :1]
        for _ in range(5):
            logits = model.decode(written, context, mask)[:, -1]
            low = logits.topk(5).values[:, -1:]
            logits = logits.masked_fill(logits < low, float("-inf"))
            written = torch.cat([written, logits.argmax(-1, keepdim=True)], 1)
    print("loss", losses[-1], written[0].tolist())
    if args.out:
        weights = {k: v.cpu() for k, v in model.state_dict().items()}
        torch.save({"losses": losses, "written": written.cpu(), "model": weights}, args.out)


if __name__ == "__main__":
    main()
