"""TorchScript: functions scripted before the context and inside, traced ones, modules.

What a module returns is multiplied by 1: its linear layers add their bias in place, but not under any dispatch mode,
and version counters are compared.
"""

from __future__ import annotations

STATEMENTS = """
{a} = OUTSIDE[0]({f}, float({s}))
{a} = OUTSIDE[1]({f}, float({s}))
{a} = OUTSIDE[2]({f}, float({s}))
{a} = OUTSIDE[3]({f}, float({s}))
{a} = OUTSIDE[i % 4]({f}, 0.5)
{w}.add_(OUTSIDE[0]({f}, float({s})))
{a} = scripted('x * torch.tensor(2.0) + s')({f}, float({s}))
jit1 = scripted('y = torch.tensor([1.0, s])', 'x.sum() * y')
jit1 = scripted('x.mul_(s)')
jit1 = scripted('y = x[0]', 'y.add_(s)', 'x.sum(0)')
jit1 = scripted('y = torch.ones(3, dtype=x.dtype)', 'if s > 0.5:', '    y = y * s', 'y + x.sum()')
jit1 = scripted('y = [x, x * 2]', 'torch.stack(y)')
jit1 = scripted('torch.full([2], s, dtype=x.dtype) + x.mean()')
jit1 = scripted('x.view([x.numel()]).as_strided([1], [1]) * s')
jit1 = scripted('n = x.sum().item()', 'x + float(n) * s')
{a} = jit1({f}, float({s}))
{a} = jit1({f}.detach().clone(), float({s}))
{a} = jit1({w}, 0.5).clone()
{a} = torch.jit.trace(curve, ({f}.detach(),))({f})
jit2 = torch.jit.script(torch.nn.Linear(2, 3).to(D))
jit2 = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh()).to(D).eval())
jit2 = torch.jit.freeze(torch.jit.script(torch.nn.Linear(2, 3).to(D).eval()))
{a} = jit2({f}.detach().to(D).flatten()[:2]) * 1
{a} = jit2(torch.ones((run + 1, 2), dtype=D)) * 1
""".strip().splitlines() + [
    "p = {f}.detach().clone().requires_grad_()\nOUTSIDE[1](p, 0.5).sum().backward()\n{a} = laid_out(p.grad)",
    "p = {f}.detach().clone().requires_grad_()\nfor j in range(3):\n"
    "    {a}, = torch.autograd.grad(jit1(p.clone(), 0.5).sum(), p)",
    "jit2(torch.ones((2, 2), dtype=D)).sum().backward()\nseen.append([laid_out(u.grad) for u in jit2.parameters()])",
    "m = torch.jit.trace(torch.nn.Linear(2, 2).to(D), torch.ones((1, 2), dtype=D))\n"
    "{a} = m({f}.detach().to(D).flatten()[:2]) * 1",
]
