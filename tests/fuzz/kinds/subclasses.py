"""Tensor subclasses: plain ones, with `__torch_function__`, with `__torch_dispatch__`, and wrappers."""

from __future__ import annotations

STATEMENTS = """
kept['plain'] = {f}.detach().clone().as_subclass(Plain)
kept['plain'] = {f}.detach().as_subclass(Plain)
kept['plain'] = Plain([[1.5, {s}], [2, 3]])
kept['plain'] = (kept['plain'] * {f}).clamp(-9, 9)
kept['plain'] = kept['plain'][0]
kept['plain'].add_({s})
kept['plain'][0] = {s}
kept['plain'].copy_({f})
kept['plain'] = copy.deepcopy(kept['plain'])
kept['plain'] = pickle.loads(pickle.dumps(kept['plain']))
{a} = kept['plain'].as_subclass(torch.Tensor)
{a} = (kept['plain'] + {f}).as_subclass(torch.Tensor)
{a} = torch.Tensor.tanh({f}.detach().as_subclass(Plain)).as_subclass(torch.Tensor)
{w}.add_(kept['plain'])
seen.append((type(kept['plain'] + 1).__name__, kept['plain'].tolist()))
seen.append(Plain().tolist())
kept['parameter'] = torch.nn.Parameter({f}.detach().clone().as_subclass(Plain))
kept['named'] = {f}.detach().clone().as_subclass(Named)
kept['named'] = kept['named'].sin() + {f}.detach()
kept['named'].mul_({s})
kept['named'] = torch.cat([kept['named'], kept['named']])[:2]
seen.append((list(Named.names), Named.names.clear()))
{a} = (kept['named'] @ kept['named'].mT).as_subclass(torch.Tensor)
kept['named'] = copy.deepcopy(kept['named'])
seen.append(kept['named'].sum().item())
kept['below'] = {f}.detach().clone().as_subclass(Redispatched)
{a} = kept['below'] * {f}
kept['below'].add_({s})
{a} = torch.stack([kept['below'], kept['below']]).sum({d})
seen.append((list(Redispatched.ops), Redispatched.ops.clear()))
kept['two'] = TwoTensor({f}.detach().clone(), {f}.detach().clone())
kept['two'] = (lambda u: TwoTensor(u * 2, u + 1))({f}.detach())
kept['two'] = (kept['two'] * {f}.detach()).clamp(-9, 9)
kept['two'] = kept['two'].sin()
kept['two'] = torch.cat([kept['two'], kept['two']])[:2]
kept['two'].mul_({s})
kept['two'].a.add_({s})
{a} = kept['two'].a + kept['two'].b
{w}.copy_(kept['two'].a)
kept['two'] = copy.deepcopy(kept['two'])
kept['two'] = kept['two'].detach()
seen.append(type(kept['two'].sum()).__name__)
seen.append(kept['two'].b.sum().item())
""".strip().splitlines() + [
    "q = TwoTensor({f}.detach().clone(), {f}.detach().clone()).requires_grad_()\n(q * q).sum().backward()\n"
    "{a} = q.grad.a * 2\nseen.append(q.grad.b.tolist())\ndel q",
    "q = {f}.detach().clone().as_subclass(Plain).requires_grad_()\n(q * {f}.detach()).tanh().sum().backward()\n"
    "{a} = q.grad.as_subclass(torch.Tensor)\nseen.append(type(q.grad).__name__)",
    "q = torch.nn.Parameter({f}.detach().clone().as_subclass(Named))\no = torch.optim.SGD([q], lr=0.1, momentum=0.5)\n"
    "for j in range(2):\n    o.zero_grad()\n    (q * q).sum().backward()\n    o.step()\n"
    "{a} = q.detach().as_subclass(torch.Tensor)\nNamed.names.clear()",
    "(kept['parameter'] * {f}.detach()).sum().backward()\n"
    "{a} = kept['parameter'].grad.as_subclass(torch.Tensor).clone()",
    "with torch._C.DisableTorchFunctionSubclass():\n    {a} = (kept['plain'] * 2).as_subclass(torch.Tensor)",
]
