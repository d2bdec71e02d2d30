"""Sparse tensors made of the program's values, and parameters with sparse gradients."""

from __future__ import annotations

STATEMENTS = """
kept['coo'] = torch.sparse_coo_tensor(torch.tensor([[0, 2, 0], [1, 0, 1]]), {f}.detach().flatten()[:3] * 2, (3, 2))
kept['coo'] = torch.sparse_coo_tensor(torch.tensor([[0, 2], [1, 0]]) * 1, torch.full((2,), {s}, dtype=D) + 1, (3, 2))
kept['coo'] = torch.sparse_coo_tensor({n}.flatten()[:2].abs()[None] % 3, {f}.detach().flatten()[:2] * 2, (3,))
kept['coo'] = ({f}.detach() * 2).to_sparse()
kept['coo'] = {f}.detach().relu().to_sparse()
kept['coo'] = kept['coo'].coalesce()
kept['coo'] = kept['coo'] * {s}
kept['coo'] = (kept['coo'] + kept['coo']).coalesce()
kept['coo'] = kept['coo'].clone()
kept['coo'].mul_({s})
kept['coo']._values().add_({s})
kept['coo'] = kept['coo'].t()
kept['coo'] = copy.deepcopy(kept['coo'])
kept['coo'] = pickle.loads(pickle.dumps(kept['coo']))
{a} = kept['coo'].to_dense()
{a} = kept['coo'].coalesce().values() * 2
{a} = kept['coo']._values().clone()
{a} = {f}.detach() + kept['coo']
{w}.add_(kept['coo'])
{a} = torch.sparse.mm(kept['coo'], {f}.detach().to(D).flatten()[:2].reshape(2, 1))
{a} = torch.sparse.sum(kept['coo']) * 1
{a} = (kept['coo'] @ torch.ones((2, 2), dtype=D)) * {s}
seen.append((kept['coo']._nnz(), kept['coo'].is_coalesced(), kept['coo'].shape))
seen.append(kept['coo'].to_dense().tolist())
{a} = ({f}.detach() * 2).to_sparse_csr().to_dense()
{a} = ({f}.detach() * 2).to_sparse_csr().values() + 1
""".strip().splitlines() + [
    "m = torch.nn.Embedding(3, 2, sparse=True).to(D)\no = OPTIMIZER\n"
    "for j in range(3):\n    o.zero_grad()\n    (m(torch.tensor([0, 2, run % 3])) ** 2).sum().backward()\n"
    "    o.step()\n"
    "{a} = m.weight.detach() * 1".replace("OPTIMIZER", made)
    for made in (
        "torch.optim.SparseAdam(m.parameters(), lr=0.1)", "torch.optim.SGD(m.parameters(), lr=0.1)",
        "torch.optim.Adagrad(m.parameters(), lr=0.1)",
    )
] + [
    "m = torch.nn.Embedding(3, 2, sparse=True).to(D)\nm(torch.tensor([0, 2, 0])).sum().backward()\n"
    "seen.append((m.weight.grad._nnz(), m.weight.grad.is_coalesced()))\n{a} = m.weight.grad.to_dense() + 1",
    "p = {f}.detach().clone().flatten()[:6].reshape(-1, 2).requires_grad_()\n"
    "F.embedding({n}.abs().flatten() % p.shape[0], p, sparse=True).tanh().sum().backward()\n"
    "seen.append(p.grad.coalesce())\n{a} = p.grad.to_dense()\np.grad = None",
    "m = torch.nn.EmbeddingBag(3, 2, mode='sum', sparse=True).to(D)\no = torch.optim.SGD(m.parameters(), lr=0.1)\n"
    "for j in range(2):\n    o.zero_grad()\n    m(torch.tensor([[0, 1], [2, 2]])).sin().sum().backward()\n"
    "    o.step()\n"
    "{a} = m.weight.detach() * 1",
    "p = {f}.detach().clone().requires_grad_()\n(p * 2).to_sparse().coalesce().values().sum().backward()\n"
    "{a} = p.grad.clone()",
    "m = torch.nn.ParameterList([torch.nn.Parameter({f}.detach().clone()), "
    "torch.nn.Parameter(torch.ones((3, 2), dtype=D))])\n"
    "o = torch.optim.SGD(m.parameters(), lr=0.1)\nfor j in range(2):\n    o.zero_grad()\n"
    "    (F.embedding(torch.tensor([1, 1]), m[1], sparse=True).sum() + (m[0] ** 2).sum()).backward()\n    o.step()\n"
    "{a} = m[1].detach() * 1",
]
