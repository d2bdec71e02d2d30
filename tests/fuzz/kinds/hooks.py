"""Hooks that look at gradients, on tensors, leaves, modules and nodes of the graph."""

from __future__ import annotations

_LOOKS = [
    "seen.append(g.sum().item())",
    "seen.append(g.tolist())",
    "seen.append(g.data_ptr() != 0)",
    "seen.append((g.storage_offset(), g.untyped_storage().nbytes() > 0, g.is_contiguous()))",
    "seen.append(g.detach().clone())",
    "seen.append(g.numpy().sum() if not g.requires_grad else 0)",
    "seen.append(len(g.untyped_storage().tolist()) > 0)",
    "seen.append(float(g.norm()) < 5)",
]

_HOOKS = [
    "p = {f}.detach().clone().requires_grad_()\np.register_hook(lambda g: LOOK)\n(p * {f}.detach()).sum().backward()\n"
    "{a} = laid_out(p.grad)",
    "p = {f}.detach().clone().requires_grad_()\ny = p.tanh()\ny.register_hook(lambda g: LOOK)\n"
    "(y * y).mean().backward()\n{a} = laid_out(p.grad)",
    "p = torch.nn.Parameter({f}.detach().clone())\n"
    "p.register_post_accumulate_grad_hook(lambda q: (lambda g: LOOK)(q.grad))\n"
    "for j in range(2):\n    (p * p).sum().backward()\n{a} = laid_out(p.grad)",
    "p = torch.nn.Parameter({f}.detach().clone())\no = torch.optim.SGD([p], lr=0.1)\n"
    "p.register_post_accumulate_grad_hook(lambda q: ((lambda g: LOOK)(q.grad), o.step(), o.zero_grad()) and None)\n"
    "for j in range(3):\n    (p.sin() * {f}.detach()).sum().backward()\n{a} = p.detach()",
    "p = torch.nn.Parameter({f}.detach().clone())\n"
    "p.register_post_accumulate_grad_hook(lambda q: seen.append(q.grad.clamp_(-0.5, 0.5).sum().item()))\n"
    "p.register_hook(lambda g: LOOK)\n(p * p).sum().backward()\n{a} = laid_out(p.grad)",
    "p = {f}.detach().clone().requires_grad_()\ny = p * 2\n"
    "y.grad_fn.register_prehook(lambda gs: [LOOK for g in gs] and None)\ny.sum().backward()\n{a} = laid_out(p.grad)",
    "p = {f}.detach().clone().requires_grad_()\ny = (p * 2).sin()\n"
    "y.grad_fn.register_hook(lambda into, gs: [LOOK for g in gs] and None)\ny.sum().backward()\n{a} = laid_out(p.grad)",
    "m = torch.nn.Linear(2, 2).to(D)\nm.register_full_backward_hook(lambda m, into, gs: [LOOK for g in gs] and None)\n"
    "m(torch.ones((run + 1, 2), dtype=D)).sum().backward()\nseen.append([laid_out(u.grad) for u in m.parameters()])",
    "p = {f}.detach().clone().requires_grad_()\nq = {f}.detach().clone().requires_grad_()\n"
    "torch.autograd.graph.register_multi_grad_hook([p, q], lambda gs: [LOOK for g in gs if g is not None])\n"
    "(p.sum() * q.sum()).backward()\n{a} = laid_out(p.grad)",
    "p = {f}.detach().clone().requires_grad_()\n"
    "with torch.autograd.graph.saved_tensors_hooks(lambda g: (LOOK, g)[1], lambda g: g * 1):\n    y = (p * p).tanh()\n"
    "y.sum().backward()\n{a} = laid_out(p.grad)",
    "p = {f}.detach().clone().requires_grad_()\np.register_hook(lambda g: (LOOK, g * {s})[1])\n"
    "y = p[0] * 2\ny.retain_grad()\ny.sum().backward()\n{a} = laid_out(p.grad)\nseen.append(y.grad)",
    "p = {f}.detach().clone().requires_grad_()\np.register_hook(lambda g: LOOK)\n"
    "(p ** 3).sum().backward(create_graph=True)\n{a} = p.grad.detach().clone()\np.grad = None",
    "p = {f}.detach().clone().requires_grad_()\ny = p * 1\ny.register_hook(lambda g: {w}.data.add_(1))\n"
    "y.sum().backward()\n{a} = laid_out(p.grad)",
]
STATEMENTS = [s.replace("LOOK", look) for s in _HOOKS for look in _LOOKS]
