"""GPyTorch: sparse variational Gaussian processes, natural gradients, classification, several tasks at once."""

import argparse

import gpytorch
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    NaturalVariationalDistribution,
    VariationalStrategy,
)


class Sparse(gpytorch.models.ApproximateGP):
    def __init__(self, inducing, natural=False):
        kind = (NaturalVariationalDistribution if natural else CholeskyVariationalDistribution)(inducing.size(0))
        super().__init__(VariationalStrategy(self, inducing, kind, learn_inducing_locations=True))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5))

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Tasks(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.MultitaskMean(gpytorch.means.LinearMean(1), num_tasks=2)
        self.covar_module = gpytorch.kernels.MultitaskKernel(gpytorch.kernels.RBFKernel(), num_tasks=2, rank=1)

    def forward(self, x):
        return MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.linspace(0, 1, 60)
    y = torch.sin(6 * x) + 0.1 * torch.randn(60, generator=torch.Generator().manual_seed(1))
    x, y, found = x.to(args.device), y.to(args.device), {}
    for name, natural, likelihood, target in [
        ("regression", False, gpytorch.likelihoods.GaussianLikelihood(), y),
        ("natural", True, gpytorch.likelihoods.GaussianLikelihood(), y),
        ("classification", False, gpytorch.likelihoods.BernoulliLikelihood(), (y > 0).float()),
    ]:
        torch.manual_seed(3)
        model = Sparse(torch.linspace(0.05, 0.95, 9).unsqueeze(-1), natural).to(args.device)
        likelihood = likelihood.to(args.device)
        bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=60)
        optimizers = [torch.optim.Adam([*model.hyperparameters(), *likelihood.parameters()], lr=0.05)]
        if natural:
            optimizers.append(gpytorch.optim.NGD(model.variational_parameters(), num_data=60, lr=0.1))
        else:
            optimizers[0].add_param_group({"params": list(model.variational_parameters())})
        losses = []
        for _ in range(3):
            for at in range(0, 60, 20):
                for o in optimizers:
                    o.zero_grad()
                loss = -bound(model(x[at : at + 20].unsqueeze(-1)), target[at : at + 20])
                loss.backward()
                for o in optimizers:
                    o.step()
                losses.append(loss.item())
        model.eval(), likelihood.eval()
        with torch.no_grad():
            told = likelihood(model(torch.linspace(0, 1, 7).unsqueeze(-1).to(args.device)))
        found[name] = {"losses": losses, "mean": told.mean.cpu(), "variance": told.variance.cpu()}
        print(name, losses[-1])
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2).to(args.device)
    both = torch.stack([y[::3], torch.cos(6 * x[::3])], -1)
    model = Tasks(x[::3], both, likelihood).to(args.device)
    model.train(), likelihood.train()
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.1), []
    bound = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    for _ in range(5):
        optimizer.zero_grad()
        loss = -bound(model(x[::3]), both)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval(), likelihood.eval()
    with torch.no_grad(), gpytorch.settings.fast_pred_var():
        told = likelihood(model(torch.linspace(0, 1, 5).to(args.device)))
        low, high = told.confidence_region()
    found["tasks"] = {"losses": losses, "mean": told.mean.cpu(), "low": low.cpu(), "high": high.cpu()}
    if args.out:
        torch.save(found, args.out)


if __name__ == "__main__":
    main()
