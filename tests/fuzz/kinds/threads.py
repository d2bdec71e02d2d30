"""Threads that are started in the context and compute on the program's tensors. None writes what another reads."""

from __future__ import annotations

STATEMENTS = [
    "{a} = Thread(lambda: {f} * {f} + {s}).join()",
    "{a} = Thread(lambda: {f}.sin().sum({d})).join()",
    "{a} = Thread(lambda: ({f}.detach() @ {f}.detach().mT).tanh()).join()",
    "{a} = Thread(lambda: {x}[0]).join()",
    "Thread(lambda: {w}.add_({f})).join()",
    "Thread(lambda: {w}.mul_({s}).data.add_(1)).join()",
    "Thread(lambda: seen.append({x}.sum().item())).join()",
    "u = {f}.detach() * 2\nv = Thread(lambda: u + 1)\n{a} = u - 1\nseen.append(v.join().tolist())",
    "u = {f}.detach() * 2\nv = Thread(lambda: (u.sin() + 1) * u)\n{a} = u.cos() * 3\n{w}.add_(v.join().detach())",
    "v = [Thread(lambda j=j: {f}.detach() * j + j) for j in range(3)]\nseen.append([u.join() for u in v])",
    "v = Thread(lambda: [torch.full((2,), float(j), dtype=D) for j in range(3)])\n{a} = {f} + 1\n"
    "{a} = torch.stack(v.join()) * 2",
    "u = {f}.detach().clone()\nv = Thread(lambda: u.add_(1).mul_(2))\n{a} = {f}.detach().exp().clamp(max=5)\nv.join()",
    "p = {f}.detach().clone().requires_grad_()\ny = (p * {f}.detach()).tanh().sum()\n"
    "Thread(lambda: y.backward()).join()\n"
    "{a} = laid_out(p.grad)",
    "p = {f}.detach().clone().requires_grad_()\n"
    "{a} = laid_out(Thread(lambda: torch.autograd.grad((p * p).sum(), p)[0]).join())",
    "with torch.no_grad():\n    {a} = Thread(lambda: ({f}.detach() * 2).sum()).join()",
    "u = Thread(lambda: {f}.detach() + 1).join()\nu.mul_(2)\nThread(lambda: u.sub_(1)).join()\n{a} = u * 2",
    "u = torch.zeros((2, 3), dtype=D) + 1\nv = [Thread(lambda j=j: u[j].add_(j + 1)) for j in range(2)]\n"
    "for w in v: w.join()\n{a} = u * {s}",
    "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(2) as pool:\n"
    "    {a} = torch.stack(list(pool.map(lambda j: {f}.detach() * j, range(3))))",
    "m = torch.nn.Linear(2, 2).to(D)\n"
    "v = [Thread(lambda j=j: m(torch.full((2,), j + 1.0, dtype=D)).sum()) for j in (0, 1)]\n"
    "{a} = (v[0].join() + v[1].join()) * 1\n{a}.backward()\nseen.append([laid_out(u.grad) for u in m.parameters()])",
    "class Failing(Exception): pass\ndef fail(): raise Failing\nv = Thread(lambda: ({f}.detach() * 2, fail()))\n"
    "try: v.join()\nexcept Failing: {a} = {f} + 2",
]
