"""What random programs are made of: templates of statements, by family.

Placeholders are filled with variables and numbers of the program under construction:
    {f} float tensor      {n} integer tensor     {b} bool tensor       {x} any tensor      {e} exact tensor
    {w} float tensor that may be written         {a} a new variable
    {s} a number (in a loop, perhaps one that changes)     {k} a small whole number     {d} a dimension of the first
    operand     {r} a shape with as many elements as it     {t} a dtype     {h} a small shape

A template either makes a value (assigned to a variable) or is a statement of its own. Functions that jump (compare,
round, convert to integers, sort) take only exact operands: values that rounding cannot have changed.
"""

from __future__ import annotations

# Makes a value that is exact if its operands are: it moves, selects or negates.
EXACT = """
torch.zeros({h}, dtype={t})
torch.ones({h}, dtype={t})
torch.full({h}, {s}, dtype=D)
torch.arange({k}, dtype={t})
torch.eye({k}, dtype=D)
torch.randint(-4, 5, {h})
torch.randint(-4, 5, {h}).to(D)
torch.randn({h}, dtype=D)
torch.randn({h}, dtype=D)
torch.rand({h}, dtype=D)
torch.tensor([[1.5, -0.0], [2.0, -3.25]], dtype=D)
torch.tensor({s})
torch.zeros_like({x})
torch.full_like({f}, {s})
torch.empty({h}, dtype=D).fill_({s})
torch.empty({h}, dtype=D).normal_()
{x}.clone()
{x}.contiguous()
-{f}
{f}.abs()
{f}.clamp(min={s})
torch.maximum({f}, {f})
torch.minimum({f}, {f})
{f}.relu()
torch.where({b}, {f}, {f})
torch.where({b}, {f}, {s})
{f}.masked_fill({b}, {s})
torch.cat([{x}, {x}], {d})
torch.stack([{x}, {x}])
{x}.flip({d})
{x}.roll(1, {d})
{x}.repeat(2, *([1] * ({x}.dim() - 1)))
F.pad({f}, (1, 0), value={s})
{x}.index_select({d}, torch.tensor([0, 0]))
{x}.tril()
{x}.amax({d})
{x}.amin({d})
{e}.sort({d})[0]
{n} + {n}
{n} - {k}
{n} * {n}
{n} % 5
{n} // 3
{n}.sum({d})
{n}.cumsum({d})
{n}.bitwise_and(3)
{n} << 1
{b} & {b}
{b} | {b}
~{b}
{b}.any({d})
{b}.all({d})
{b}.sum()
{n} > {k}
{n} == {n}
{n}.argmax({d})
{n}.to(D)
{b}.to(torch.int64)
{b}.float()
{e} > {e}
{e} <= {s}
{e}.argmax({d})
{e}.argsort({d}, stable=True)
{e}.round()
{e}.floor()
{e}.to(torch.int64)
{e}.to(torch.int32)
{e}.bool()
{e}.sign()
{e}.isfinite()
torch.isclose({e}, {e})
{e}.topk(1, {d})[0]
{e}[{e} > 0.5]
{x}[{b}]
{n}.nonzero()
{n}.unique()
{n}.view(torch.int32)
{x}.gather({d}, torch.zeros_like({x}, dtype=torch.int64))
torch.ops.aten.index.Tensor({x}, [torch.tensor([0, -1])])
{x}[torch.tensor([0, -1])]
{x}[..., torch.tensor([0])]
{x}[{n} % 1]
""".strip().splitlines()

# Makes a value that rounding touches.
SMOOTH = """
{f} + {f}
{f} + {f}
{f} - {f}
{f} * {f}
{f} * {f}
{f} * {s}
{f} + {s}
{s} - {f}
{f} + {n}
{f} * {b}
{f} / ({f}.abs() + 0.5)
{f} / 3
{n} / 4
{f} ** 2
{f}.tanh()
{f}.sin()
{f}.cos()
{f}.sigmoid()
{f}.clamp(-3, 3).exp()
({f}.abs() + 0.5).log()
({f}.abs() + 0.25).sqrt()
({f}.abs() + 0.25).rsqrt()
({f}.abs() + 0.5).reciprocal()
F.gelu({f})
F.silu({f})
F.softplus({f})
F.leaky_relu({f}, 0.1)
torch.lerp({f}, {f}, 0.25)
torch.addcmul({f}, {f}, {f}, value={s})
torch.add({f}, {f}, alpha={s})
torch.hypot({f}, {f})
torch.atan2({f}, {f}.abs() + 1)
{f}.sum()
{f}.sum({d})
{f}.sum({d}, keepdim=True)
{f}.mean()
{f}.mean({d})
{f}.var({d}, correction=0)
{f}.norm()
{f}.logsumexp({d})
{f}.softmax({d})
{f}.log_softmax({d})
{f}.cumsum({d})
{f}.clamp(-2, 2).prod({d})
F.layer_norm({f}, {f}.shape[-1:], eps=0.1)
{f} @ {f}
{f} @ {f}.mT
torch.matmul({f}, {f})
torch.outer({f}.flatten()[:6], {f}.flatten()[:6])
F.linear({f}, {f})
torch.einsum('...i,...i->...', {f}, {f})
F.mse_loss({f}, {f})
F.dropout({f}, 0.25)
F.embedding({n} % {f}.shape[0], {f})
{f}.index_add({d}, torch.tensor([0]), {f})
{f}.scatter_add({d}, torch.zeros_like({f}, dtype=torch.int64), {f})
{f}.to({t}) if {t}.is_floating_point else {f}
{f}.to(torch.float32)
{f}.to(torch.bfloat16)
{f}.double()
torch.cdist({f}, {f})
torch._foreach_mul([{f}, {f}], {s})[1]
torch.func.grad(lambda u: (u * u).sin().sum())({f})
torch.vmap(lambda u: (u * 2).sum())({f})
torch.utils.checkpoint.checkpoint(lambda u: u.sin() * u, {f}, use_reentrant=False)
torch.autograd.grad(({f} * {f}).sum(), {f}, allow_unused=True)[0]
F.batch_norm({f}.reshape(-1, 1), torch.zeros(1, dtype=D), torch.ones(1, dtype=D), training=True, eps=0.1)
""".strip().splitlines()

# Makes a view, or what may be one.
VIEWS = """
{x}[0]
{x}[-1]
{x}[1:]
{x}[:-1]
{x}[::2]
{x}[..., 0]
{x}[..., 1:]
{x}[..., ::2]
{x}[None]
{x}[:, 0]
{x}.T if {x}.dim() == 2 else {x}
{x}.mT
{x}.transpose(0, -1)
{x}.flatten()
{x}.reshape({r})
{x}.view({r})
{x}.unsqueeze({d})
{x}.squeeze()
{x}.expand(2, *{x}.shape)
{x}.narrow({d}, 0, 1)
{x}.select({d}, 0)
{x}.diagonal()
{x}.unfold({d}, 2, 1)
{x}.chunk(2)[0]
{x}.split(1)[0]
{x}.unbind()[-1]
{x}.permute(*reversed(range({x}.dim())))
{x}.detach()
{x}.data
{x}.clone().as_strided((2, 2), (1, 1))
{x}.clone().as_strided((2,), (2,), 1)
{x}.movedim(0, -1)
{x}.swapaxes(0, -1)
{x}.view_as({x})
{e}.view(torch.int64) if {e}.dtype == torch.float64 else {e}
torch.view_as_real(torch.complex({f}, {f}))
torch.complex({f}, {f}).conj().imag
[{x}, {x}][i % 2]
[{x}, {x}, {x}][i % 3]
[{f}, {f}.detach().clone()][i % 2]
[{f}, {f}][run % 2]
{x}[i % 2] if {x}.dim() else {x}
{x}[i % 2:] if {x}.dim() else {x}
""".strip().splitlines()

# Writes. The operands of a float write may be inexact, so what it writes is inexact afterwards.
WRITES = """
{w}.add_({s})
{w}.add_({f})
{w}.sub_({f}, alpha={s})
{w}.mul_({s})
{w}.mul_({f})
{w}.div_(3)
{w}.copy_({x})
{w}.copy_({w})
{w}.zero_()
{w}.fill_({s})
{w}.neg_()
{w}.relu_()
{w}.tanh_()
{w}.clamp_(-2, 2)
{w}.lerp_({f}, 0.5)
{w}.addcmul_({f}, {f}, value=0.5)
{w}.masked_fill_({b}, {s})
{w}[0] = {s}
{w}[0] = {f}
{w}[..., 0] = {f}
{w}[1:] = {w}[:-1]
{w}[:-1].copy_({w}[1:])
{w}[..., ::2] += {s}
{w}[0] += {w}[-1]
{w} += {f}
{w} *= {s}
{w} -= {w}
{w}.T.add_({f})
{w}.t().mul_({s})
{w}.flatten()[0] = {s}
{w}.view(-1)[1:].add_({s})
{w}.diagonal().add_({s})
{w}[torch.tensor([0, -1])] = {f}
{w}[torch.tensor([0])] += {f}
{w}[{b}] = {s}
{w}.index_put_((torch.tensor([0, 0]),), {f}, accumulate=True)
{w}.index_add_({d}, torch.tensor([0]), {f})
{w}.index_copy_({d}, torch.tensor([0]), {f})
{w}.index_fill_({d}, torch.tensor([0]), {s})
{w}.scatter_({d}, torch.zeros_like({w}, dtype=torch.int64), {s})
{w}.scatter_add_({d}, torch.zeros_like({w}, dtype=torch.int64), {f})
{w}.cumsum_({d})
{w}.normal_()
{w}.uniform_()
{w}.bernoulli_(0.5)
{w}.data.add_({s})
{w}.detach().mul_({s})
{w}.data = {w}.clone()
torch.add({f}, {f}, out={w})
torch.mul({f}, {s}, out={w})
torch.sum({f}, 0, out={w})
torch.matmul({f}, {f}, out={w})
torch.cat([{f}, {f}], out={w})
torch._foreach_add_([{w}, {w}], {s})
torch._foreach_mul_([{w}, {w}], [{s}, {s}])
torch._foreach_copy_([{w}], [{f}])
{w}.expand(2, *{w}.shape).add_({s})
(lambda t: t.as_strided((min(t.numel(), 2),), (1,)))({w}).add_({s})
{w}.set_({w})
{w}.resize_(0)
{w}.squeeze_()
{w}.transpose_(0, -1)
{n}.add_({k})
{n}.mul_(2)
{n}[0] = {k}
{n}.bitwise_xor_(5)
{n}.copy_({n})
{n}[..., 0].sub_(1)
{b}.logical_not_()
{b}[0] = True
with torch.no_grad(): {w}.add_({f})
F.relu({w}, inplace=True)
""".strip().splitlines()

# Looks at values.
READS = """
seen.append({x}.tolist())
seen.append({x}.sum().item())
seen.append({x}.numpy().copy())
seen.append({n}.numpy().sum())
seen.append(float({f}.sum()))
seen.append(bool(({e} > 0).any()))
seen.append({x}.shape)
seen.append({x}.is_contiguous())
seen.append({x}._version)
seen.append(str({n}))
seen.append(len({x}))
seen.append(copy.deepcopy({x}.detach()))
seen.append(torch.equal({e}, {e}))
seen.append(torch.allclose({e}, {e}))
seen.append([float(u.sum()) for u in {x}])
seen.append({x}.data_ptr() != 0)
seen.append(({x} + 0).untyped_storage().nbytes())
seen.append(torch.from_dlpack({f}.detach()).sum().item())
seen.append(pickle.loads(pickle.dumps({x}.detach())))
seen.append({x}.clone())
seen.append({x}.detach())
seen.append(torch.get_rng_state().sum().item())
fe.sync()
""".strip().splitlines()

# Several lines that belong together.
BLOCKS = [
    "if int({n}.sum()) % 2:\n    {w}.add_({s})\nelse:\n    {w}.mul_({s})",
    "if bool(({e} > 0).any()):\n    {w} = {f} + 1",
    "for j in range(3):\n    {w}[j % {w}.shape[0]].add_(j)",
    "for u in {w}.unbind():\n    u.mul_({s})",
    "p = {f}.detach().clone().requires_grad_()\nq = (p * {f}).sum()\nq.backward()\n{a} = p.grad",
    "p = {f}.detach().clone().requires_grad_()\n(p.tanh() * p).mean().backward()\n"
    "with torch.no_grad():\n    p.sub_(p.grad)",
    "p = torch.nn.Parameter({f}.detach().clone())\no = torch.optim.SGD([p], lr={s} if {s} > 0 else 0.1, momentum=0.5)\n"
    "for j in range(2):\n    o.zero_grad()\n    (p * p).sum().backward()\n    o.step()\n{a} = p.detach()",
    "p = torch.nn.Parameter({f}.detach().clone())\no = torch.optim.AdamW([p], lr=0.01)\n"
    "for j in range(2):\n    o.zero_grad()\n    ((p - 1) ** 2).sum().backward()\n    o.step()\n{a} = p.detach()",
    "p = {f}.detach().clone().requires_grad_()\ng, = torch.autograd.grad((p ** 3).sum(), p, create_graph=True)\n"
    "{a}, = torch.autograd.grad(g.sum(), p)",
    "p = {f}.detach().clone().requires_grad_()\ny = p * 2\ny.register_hook(lambda g: g * {s})\n"
    "y[0].sum().backward()\n{a} = p.grad",
    "p = {f}.detach().clone().requires_grad_()\ny = p.clone()\ny[0].mul_({s})\ny.sum().backward()\n{a} = p.grad",
    "with torch.no_grad():\n    {a} = {f} * {f}\n    {w}.add_(1)",
    "with torch.inference_mode():\n    {a} = ({f} * 2).clone()\n{a} = {a}.clone()",
    "try:\n    {a} = {f}.view(7, 11)\nexcept RuntimeError:\n    {a} = {f} + 7",
    "s = torch.get_rng_state()\n{a} = torch.randn(3, dtype=D)\ntorch.set_rng_state(s)\n{w}.normal_()",
    "h = {w}.detach().numpy()\nh *= 2\nseen.append(h.sum())",
    "m = torch.from_numpy(np.ones((2, 3)))\n{a} = m * 2\nm.numpy()[0] = 5\n{w} = m + 1",
    "{a} = {w}\n{w} = {f} * 2\ndel {a}",
    "with fe.fused_eager(mode='strict'):\n    {a} = {f} * 2 + 1",
    "with fe.fused_eager(mode='off'):\n    {a} = {f} * 2 + 1",
]
