"""Graph attention over a list of edges, as PyTorch Geometric computes it: softmax over neighbours by scattering."""

import argparse

import torch
from torch import nn


def scattered_softmax(scores, target, count):
    top = torch.full((count, scores.size(1)), float("-inf"), device=scores.device, dtype=scores.dtype)
    top = top.scatter_reduce(0, target[:, None].expand_as(scores), scores.detach(), "amax", include_self=False)
    weights = (scores - top[target]).exp()
    total = torch.zeros_like(top).index_add(0, target, weights) + 1e-16
    return weights / total[target]


class Attention(nn.Module):
    def __init__(self, inner, outer, heads, edges):
        super().__init__()
        self.heads, self.outer = heads, outer
        self.project = nn.Linear(inner, heads * outer, bias=False)
        self.edge = nn.Linear(edges, heads * outer, bias=False)
        self.source = nn.Parameter(torch.randn(1, heads, outer) * 0.3)
        self.target = nn.Parameter(torch.randn(1, heads, outer) * 0.3)
        self.bias = nn.Parameter(torch.zeros(heads * outer))

    def forward(self, x, edges, features):
        h = self.project(x).view(-1, self.heads, self.outer)
        e = self.edge(features).view(-1, self.heads, self.outer)
        source, target = edges
        scores = (h * self.source).sum(-1)[source] + (h * self.target).sum(-1)[target] + (e * self.source).sum(-1)
        weights = scattered_softmax(nn.functional.leaky_relu(scores, 0.2), target, x.size(0))
        out = torch.zeros_like(h).index_add_(0, target, (h[source] + e) * weights.unsqueeze(-1))
        return out.flatten(1) + self.bias, weights


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Attention(8, 6, 3, 2), Attention(18, 4, 1, 2)
        self.norm = nn.BatchNorm1d(18)

    def forward(self, x, edges, features, batch, graphs):
        h, _ = self.first(x, edges, features)
        h, weights = self.second(nn.functional.elu(self.norm(h)), edges, features)
        sizes = torch.bincount(batch, minlength=graphs).clamp(min=1)
        pooled = torch.zeros(graphs, 4, device=x.device).index_add(0, batch, h) / sizes[:, None]
        high = torch.full((graphs, 4), -1e9, device=x.device)
        high = high.scatter_reduce(0, batch[:, None].expand_as(h), h, "amax")
        return pooled + high, weights


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = Net().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=12)
    losses, kept = [], []
    for step in range(12):
        nodes = [5 + (step + k) % 3 for k in range(3)]  # graphs of other sizes in each batch
        n = sum(nodes)
        batch = torch.repeat_interleave(torch.arange(3), torch.tensor(nodes))
        x = torch.randn(n, 8, generator=g)
        edges = torch.randint(0, n, (2, 4 * n), generator=g)
        edges = edges[:, batch[edges[0]] == batch[edges[1]]]
        edges = torch.cat([edges, torch.arange(n).repeat(2, 1)], 1)
        features = torch.randn(edges.size(1), 2, generator=g)
        y = torch.randint(0, 4, (3,), generator=g)
        x, edges, features, batch, y = (t.to(args.device) for t in (x, edges, features, batch, y))
        edges = torch.unique(edges, dim=1) if step % 4 == 0 else edges
        features = features[: edges.size(1)]
        out, weights = model(x, edges, features, batch, 3)
        loss = nn.functional.cross_entropy(out, y)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        kept.append(weights.detach().cpu()[:5])
    print("loss", losses[-1])
    if args.out:
        model = {k: v.cpu() for k, v in model.state_dict().items()}
        torch.save({"losses": losses, "weights": kept, "model": model}, args.out)


if __name__ == "__main__":
    main()
