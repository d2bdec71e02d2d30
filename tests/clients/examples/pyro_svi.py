"""Pyro: variational inference of a regression, and NUTS on a small posterior."""

import argparse

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    pyro.set_rng_seed(0)
    x = torch.randn(40, 3)
    y = (x @ torch.tensor([1.0, -2.0, 0.5]) + 0.3 + 0.1 * torch.randn(40)).to(args.device)
    x = x.to(args.device)

    def model(x, y=None):
        zero = torch.zeros(3, device=x.device)
        w = pyro.sample("w", dist.Normal(zero, 1.0).to_event(1))
        b = pyro.sample("b", dist.Normal(zero[0], 1.0))
        s = pyro.sample("s", dist.LogNormal(zero[0] - 1, 0.5))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(x @ w + b, s), obs=y)

    found = {}
    for name, guide in {"diagonal": AutoDiagonalNormal(model), "full": AutoMultivariateNormal(model)}.items():
        pyro.clear_param_store()
        guide.to(args.device)
        svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 0.03}), Trace_ELBO())
        found[name] = [svi.step(x, y) for _ in range(25)]
    predictions = Predictive(model, guide=guide, num_samples=6)(x[:5])["y"]
    found["predictions"] = predictions.detach().cpu()
    pyro.set_rng_seed(1)
    chain = MCMC(NUTS(model, max_tree_depth=3), num_samples=5, warmup_steps=5, disable_progbar=True)
    chain.run(x, y)
    found["samples"] = {k: v.cpu() for k, v in chain.get_samples().items()}
    if args.out:
        torch.save(found, args.out)


if __name__ == "__main__":
    main()
