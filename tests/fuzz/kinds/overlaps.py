"""Writes whose operands share memory with what is written: where eager refuses them, with its words."""

from __future__ import annotations

import re

# `w` and `n` are one tensor each, wherever they stand.
_WRITES = """
w.index_add_(0, torch.arange(w.shape[0])[:1], w[:1])
w.index_add_(0, torch.arange(w.shape[0]), w)
w.index_copy_(0, torch.arange(w.shape[0]), w)
w.index_put_((torch.arange(w.shape[0])[:1],), w[0])
w.put_(torch.arange(w.numel())[:1], w.flatten()[:1])
w.scatter_(0, torch.zeros_like(w, dtype=torch.int64), w)
w.scatter_add_(0, torch.zeros_like(w, dtype=torch.int64), w)
w.masked_scatter_(torch.zeros_like(w, dtype=torch.bool), w)
w.masked_fill_(w > 9, w.flatten()[0])
n.index_fill_(0, n, 0)
n.index_copy_(0, n, n.clone())
n.index_put_((n % 1,), n)
n.scatter_add_(0, n % 1, n)
n.scatter_(0, n * 0, n)
w.expand(2, *w.shape).add_({f})
w.expand(2, *w.shape).zero_()
w.unsqueeze(0).expand(3, *w.shape).copy_({f})
w.flatten().as_strided((2, 2), (1, 1)).mul_({s})
w.flatten().as_strided((2, 2), (1, 1)).sin_()
w.data.flatten()[1:].add_(w.data.flatten()[:-1])
w.data.flatten()[:-1].mul_(w.data.flatten()[1:])
w.data.flatten()[1:].addcmul_(w.data.flatten()[:-1], w.data.flatten()[1:])
w.data.view(-1)[1:].lerp_(w.data.view(-1)[:-1], 0.5)
torch.sin(w.data.view(-1)[1:], out=w.data.view(-1)[:-1])
torch.add(w.data.view(-1)[1:], w.data.view(-1)[:-1], out=w.data.view(-1)[1:])
torch.cat([w.data, w.data], out=w.data)
torch.gather(w.data, 0, torch.zeros_like(w, dtype=torch.int64), out=w.data)
torch.index_select(w.data, 0, torch.arange(w.shape[0])[:1], out=w.data[:1])
torch.clamp(w.data.mT, min=0, out=w.data)
torch._foreach_add_([w.data.view(-1)[1:]], [w.data.view(-1)[:-1]])
w.t().add_(w)
w.mul_(w)
w.add_(w.detach().view(w.shape))
""".strip().splitlines()

STATEMENTS = [
    f"seen.append(refused(lambda {name}={{{name}}}: {write}))"
    for write in _WRITES
    for name in ("w" if re.search(r"\bw\b", write) else "n",)
]
