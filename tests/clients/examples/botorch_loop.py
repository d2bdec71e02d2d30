"""BoTorch: a loop of Bayesian optimization with float64, L-BFGS of SciPy's, and quasi Monte Carlo."""

import argparse

import torch
from botorch.acquisition import LogExpectedImprovement, qLogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.mlls import ExactMarginalLogLikelihood


def target(x):
    return -((x - 0.3) ** 2).sum(-1, keepdim=True) + 0.1 * torch.sin(12 * x[..., :1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.rand(8, 2, dtype=torch.float64).to(args.device)
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64).to(args.device)
    best = []
    for i in range(3):
        y = target(x)
        model = SingleTaskGP(x, y)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        if i < 2:
            acquisition = LogExpectedImprovement(model, best_f=y.max())
        else:
            sampler = SobolQMCNormalSampler(torch.Size([32]), seed=1)
            acquisition = qLogExpectedImprovement(model, best_f=y.max(), sampler=sampler)
        options = {"maxiter": 30, "seed": i}
        candidate, _ = optimize_acqf(acquisition, bounds, 1 + i // 2, 2, raw_samples=16, options=options)
        x = torch.cat([x, candidate])
        best.append(target(x).max().item())
        print(i, best[-1])
    posterior = model.posterior(bounds)
    if args.out:
        torch.save({"best": best, "mean": posterior.mean.detach().cpu(), "x": x[:10].cpu()}, args.out)


if __name__ == "__main__":
    main()
