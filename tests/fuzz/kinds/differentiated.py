"""Forward-mode differentiation: dual levels, `jvp`, `jacfwd`, and both modes at once."""

from __future__ import annotations

_FUNCTIONS = """
q * {f}.detach()
q.sin() + q
(q * {f}.detach()).sum({d})
q.tanh() * q.sum()
torch.cat([q, q * 2])
q[0] * {s}
q.softmax(-1)
(q * 2).clamp(-1, 1)
q @ q.mT
F.gelu(q)
torch.where({b}, q, q * 2)
q.reshape(-1).cumsum(0)
q.clone().mul_({s}).add_(q)
F.layer_norm(q, q.shape[-1:], eps=0.1)
torch.zeros_like(q).copy_(q)
q.new_zeros(q.shape) + q
q.detach() * q
(q * {f}.detach()).logsumexp({d})
""".strip().splitlines()

STATEMENTS = [
    "u = {f}.detach().clone()\nwith fwAD.dual_level():\n    q = fwAD.make_dual(u, u * {s} + 1)\n"
    f"    y = fwAD.unpack_dual({f})\nseen.append(y.primal.clone())\n{{a}} = y.tangent.clone()"
    for f in _FUNCTIONS
] + [
    f"{{a}} = torch.func.jvp(lambda q: {f}, ({{f}}.detach(),), (({{f}} * 2).detach(),))[1]" for f in _FUNCTIONS
] + [
    "u = {f}.detach().clone()\n{a} = torch.func.jvp(lambda q: (q * q).sin(), (u,), (torch.ones_like(u) + u,))[1]",
    "{a} = torch.func.jacfwd(lambda u: (u * u).sum(0))({f}.detach().flatten()[:3])",
    "{a} = torch.func.hessian(lambda u: (u ** 3).sum())({f}.detach().flatten()[:3])",
    "{a} = torch.func.jacrev(lambda u: u.tanh() * {s})({f}.detach().flatten()[:3])",
    "u = {f}.detach().clone()\nwith fwAD.dual_level():\n    q = fwAD.make_dual(u, u + 1)\n"
    "    seen.append(fwAD.unpack_dual(q.detach()).tangent is None)\n    q.mul_({s})\n"
    "    {a} = fwAD.unpack_dual(q).tangent.clone()",
    "u = {f}.detach().clone()\nwith fwAD.dual_level():\n    q = fwAD.make_dual(u, u + 1)\n    v = torch.zeros_like(u)\n"
    "    v.add_(q)\n    {a} = fwAD.unpack_dual(v * 2).tangent.clone()",
    "p = {f}.detach().clone().requires_grad_()\nwith fwAD.dual_level():\n"
    "    q = fwAD.make_dual(p, torch.ones_like(p))\n"
    "    y = fwAD.unpack_dual((q ** 3)).tangent\n    {a}, = torch.autograd.grad(y.sum(), p)",
    "u = {f}.detach().clone()\nwith fwAD.dual_level():\n"
    "    q = fwAD.make_dual(u, torch._efficientzerotensor(u.shape, dtype=u.dtype))\n"
    "    y = fwAD.unpack_dual(q * 2 + {f}.detach())\n    seen.append((y.tangent._is_zerotensor(), y.primal.tolist()))\n"
    "    {a} = y.primal * 1",
    "{a} = torch.autograd.functional.jvp(lambda u: u.sin() * u, {f}.detach(), torch.ones_like({f}))[1].clone()",
]
