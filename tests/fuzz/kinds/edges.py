"""Empty tensors and those of one element, zero tensors, and what reductions and views make of them."""

from __future__ import annotations

_VALUES = """
{x}[:0]
{x}[..., :0]
{x}.new_zeros((0,))
{f}.new_ones((1,))
{f}.new_ones((1, 1)) * {s}
torch.empty((0, 3), dtype=D)
torch.empty((2, 0), dtype=D).sum({d})
{f}[:0].sum()
{f}[:0] + {s}
{f}[:0] * {f}[:0]
{f}[:0].sum(0)
{f}[:0].prod()
{f}.flatten()[:0] @ {f}.flatten()[:0]
{f}[:0].T @ {f}[:0] if {f}.dim() == 2 else {f}
torch.cat([{x}[:0], {x}])
torch.cat([torch.zeros(0, dtype=D), {f}.flatten()])
torch.stack([{x}[:0], {x}[:0]])
{x}[:0].reshape(0, -1, 1) if {x}[:0].numel() else {x}[:0].reshape(0)
{x}[torch.zeros(0, dtype=torch.int64)]
{x}[torch.zeros({x}.shape[:1], dtype=torch.bool)]
{x}.flatten()[:1].squeeze()
{x}.flatten()[:1].expand(3)
{x}.flatten()[:1].repeat(0)
{x}.flatten()[:1].sum({d})
{f}.flatten()[:1].var(correction=0)
{f}.flatten()[:1].softmax(0)
{f}.flatten()[:1].cumsum(0)
{f}.flatten()[:1].norm()
{f}.flatten()[:1] + {f}
{f}.flatten()[:1].sort()[0]
{f}[:0].sort({d})[0]
{f}[:0].cumsum({d})
{f}[:0].softmax(-1)
F.pad({f}[:0], (1, 1))
F.linear({f}[:0], {f})
F.layer_norm({f}[:0], {f}.shape[-1:], eps=0.1)
F.embedding({n}[:0] % 1, torch.ones((2, 2), dtype=D))
F.mse_loss({f}[:0], {f}[:0], reduction='sum')
{f}[:0].index_add(0, torch.zeros(0, dtype=torch.int64), {f}[:0])
torch.where({b}[:0], {f}.flatten()[:1], {s})
{x}[:0].unbind({d})[0]
{f}.new_empty((0,)).new_full((2,), {s})
torch._efficientzerotensor((2,), dtype=D) + {f}
{f} + (kept['zero'] * {f}.detach())
{f} * kept['zero'].sum()
torch._efficientzerotensor({f}.shape, dtype=D).add({f}.detach())
torch._efficientzerotensor((2, 2), dtype=D) @ torch.ones((2, 2), dtype=D)
torch._efficientzerotensor((2,), dtype=D).clone() + {s}
torch._efficientzerotensor((2, 2), dtype=D).t().sum()
""".strip().splitlines()

STATEMENTS = [f"{{a}} = {value}" for value in _VALUES] + """
kept['zero'] = torch._efficientzerotensor((2,), dtype=D)
kept['zero'] = torch._efficientzerotensor((2, 1), dtype=D) * {s}
kept['zero'] = torch._efficientzerotensor({f}.shape, dtype=D) * {f}.detach()
kept['zero'] = kept['zero'].t()
kept['zero'] = kept['zero'] / 2
kept['zero'] = kept['zero'].clone()
{w}.add_(kept['zero'])
{w}[:0].add_({s})
{w}[:0] = {s}
{w}.flatten()[:1].mul_({f}.flatten()[:1].detach())
{w}.resize_(0).resize_(2).zero_()
{w}.add_(torch._efficientzerotensor({w}.shape, dtype=D))
{w}.copy_(torch._efficientzerotensor({w}.shape, dtype=D))
seen.append(torch._efficientzerotensor((2,), dtype=D)._is_zerotensor())
seen.append((torch._efficientzerotensor({f}.shape, dtype=D) * {f}.detach())._is_zerotensor())
seen.append(({x}[:0].tolist(), {x}[:0].numel(), {x}[:0].stride()))
seen.append(refused(lambda: {x}[:0].amax()))
seen.append(refused(lambda: {x}[:0].argmax({d})))
seen.append(refused(lambda: {x}[:0].item()))
seen.append(refused(lambda: {x}[:0].max()))
seen.append(refused(lambda: torch._efficientzerotensor((2,), dtype=D).add_(1)))
seen.append(refused(lambda: {x}[:0].view(-1, 0)))
seen.append(refused(lambda: {f}.flatten()[:1].expand(0, 3)))
""".strip().splitlines() + [
    "p = {f}.detach()[:0].clone().requires_grad_()\n(p * 2).sum().backward()\n{a} = laid_out(p.grad)",
    "p = {f}.detach().clone().requires_grad_()\n(p[:0] * 2).sum().backward()\n{a} = laid_out(p.grad)",
]
