"""GPyTorch: exact regression by Cholesky and by conjugate gradients, and a variational classifier."""

import argparse

import gpytorch
import torch


class Exact(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean = gpytorch.means.ConstantMean()
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel() + gpytorch.kernels.MaternKernel(1.5))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


class Classifier(gpytorch.models.ApproximateGP):
    def __init__(self, points):
        distribution = gpytorch.variational.CholeskyVariationalDistribution(len(points))
        super().__init__(gpytorch.variational.VariationalStrategy(self, points, distribution))
        self.mean = gpytorch.means.ConstantMean()
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.manual_seed(0)
    found = {}
    x = torch.linspace(0, 1, 40)
    y = torch.sin(x * 6.28) + 0.1 * torch.randn(40)
    x, y = x.to(args.device), y.to(args.device)
    for way in ("cholesky", "conjugate gradients"):
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        model = Exact(x, y, likelihood).to(args.device)
        likelihood.to(args.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        score = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
        model.train()
        likelihood.train()
        losses = []
        with gpytorch.settings.fast_computations(*[way != "cholesky"] * 3), gpytorch.settings.max_cholesky_size(
            1000 if way == "cholesky" else 1
        ), gpytorch.settings.deterministic_probes(True):
            for _ in range(12 if way == "cholesky" else 4):
                optimizer.zero_grad()
                loss = -score(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            model.eval()
            likelihood.eval()
            with torch.no_grad(), gpytorch.settings.fast_pred_var(way != "cholesky"):
                seen = likelihood(model(torch.linspace(0, 1, 9).to(args.device)))
                found[way] = {"losses": losses, "mean": seen.mean.cpu(), "variance": seen.variance.cpu()}
    labels = (y > 0).to(y.dtype)
    model = Classifier(torch.linspace(0, 1, 6).unsqueeze(-1)).to(args.device)
    likelihood = gpytorch.likelihoods.BernoulliLikelihood().to(args.device)
    score = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=40)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = -score(model(x.unsqueeze(-1)), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found["variational"] = losses
    if args.out:
        torch.save(found, args.out)


if __name__ == "__main__":
    main()
