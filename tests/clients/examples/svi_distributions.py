"""Stochastic variational inference with torch.distributions: families, transforms, constraints, divergences."""

import argparse

import torch
import torch.distributions as D
from torch import nn
from torch.distributions import constraints, transform_to


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    device, found = args.device, {}
    g = torch.Generator().manual_seed(0)
    counts = torch.poisson(torch.full((30,), 4.0), generator=g).to(device)
    points = torch.randn(30, 3, generator=g) @ torch.tensor([[1.0, 0.5, 0.0], [0.0, 1.0, 0.3], [0.0, 0.0, 0.5]])
    points, one = points.to(device), torch.ones((), device=device)

    def fit(name, shapes, bound, steps=8):
        torch.manual_seed(5)
        free = {k: nn.Parameter(torch.zeros(shape, device=device)) for k, (shape, _) in shapes.items()}
        optimizer, losses = torch.optim.Adam(free.values(), lr=0.05), []
        for _ in range(steps):
            loss = -bound({k: transform_to(c)(free[k]) for k, (_, c) in shapes.items()})
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found[name] = {"losses": losses, **{k: v.detach().cpu() for k, v in free.items()}}
        print(name, losses[-1])

    def poisson(p):
        q = D.Gamma(p["a"], p["b"])
        rate = q.rsample((4,))
        return D.Poisson(rate).log_prob(counts[:, None]).sum(0).mean() - D.kl_divergence(q, D.Gamma(2 * one, one))

    def beta(p):
        q = D.Beta(p["a"], p["b"])
        x = q.rsample((3,))
        many = (counts > 3).float()[:, None]
        return D.Bernoulli(x).log_prob(many).sum(0).mean() - D.kl_divergence(q, D.Beta(one, one))

    def dirichlet(p):
        q = D.Dirichlet(p["a"])
        x = q.rsample((2,))
        likely = D.Categorical(probs=x.unsqueeze(1)).log_prob((counts.long() % 3).expand(2, -1))
        return likely.sum(1).mean() - D.kl_divergence(q, D.Dirichlet(one.expand(3)))

    def normal(p):
        q = D.MultivariateNormal(p["m"], scale_tril=p["l"])
        z = q.rsample((2,))
        like = D.MultivariateNormal(z, covariance_matrix=torch.eye(3, device=device) * 0.5)
        prior = D.MultivariateNormal(torch.zeros(3, device=device), torch.eye(3, device=device))
        return like.log_prob(points[:, None]).sum(0).mean() - D.kl_divergence(q, prior)

    def low_rank(p):
        q = D.LowRankMultivariateNormal(p["m"], p["w"] + 0.1, p["d"])
        return q.log_prob(points).sum() + q.entropy()

    def mixture(p):
        parts = D.Independent(D.Normal(p["m"] + torch.arange(2.0, device=device)[:, None], p["s"]), 1)
        return D.MixtureSameFamily(D.Categorical(logits=p["c"]), parts).log_prob(points).sum()

    def flow(p):
        base = D.Normal(torch.zeros(3, device=device), torch.ones(3, device=device))
        steps = [D.AffineTransform(p["m"], p["s"]), D.SigmoidTransform(), D.AffineTransform(-4.0, 8.0)]
        made = D.TransformedDistribution(base, steps)
        return made.log_prob(points.clamp(-3.9, 3.9)).sum()

    def heavy(p):
        found = D.StudentT(p["df"] + 1, p["m"], p["s"]).log_prob(points[:, 0]).sum()
        found = found + D.Laplace(p["m"], p["s"]).entropy()
        return found + D.Gumbel(p["m"], p["s"]).log_prob(points[:, 1]).sum()

    def relaxed(p):
        q = D.RelaxedOneHotCategorical(torch.tensor(0.5, device=device), logits=p["c"])
        z = q.rsample((5,))
        return -(z * torch.arange(4.0, device=device)).sum() - 0.1 * q.log_prob(z).sum()

    def wishart(p):
        q = D.Wishart(torch.tensor(5.0, device=device), scale_tril=p["l"])
        root = torch.linalg.cholesky(torch.corrcoef(points.T))
        return q.log_prob(torch.cov(points.T)) + D.LKJCholesky(3, p["c"]).log_prob(root)

    positive, real = constraints.positive, constraints.real
    fit("poisson", {"a": ((), positive), "b": ((), positive)}, poisson)
    fit("beta", {"a": ((), positive), "b": ((), positive)}, beta)
    fit("dirichlet", {"a": ((3,), positive)}, dirichlet)
    fit("normal", {"m": ((3,), real), "l": ((3, 3), constraints.lower_cholesky)}, normal)
    fit("low rank", {"m": ((3,), real), "w": ((3, 1), real), "d": ((3,), positive)}, low_rank)
    fit("mixture", {"m": ((2, 3), real), "s": ((2, 3), positive), "c": ((2,), real)}, mixture)
    fit("flow", {"m": ((3,), real), "s": ((3,), positive)}, flow)
    fit("heavy", {"df": ((), positive), "m": ((), real), "s": ((), positive)}, heavy)
    fit("relaxed", {"c": ((4,), real)}, relaxed)
    fit("wishart", {"l": ((3, 3), constraints.lower_cholesky), "c": ((), positive)}, wishart)
    if args.out:
        torch.save(found, args.out)


if __name__ == "__main__":
    main()
