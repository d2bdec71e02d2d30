"""A Wasserstein GAN with a gradient penalty: gradients of gradients, a critic trained several times per step."""

import argparse

import torch
from torch import autograd, nn, optim


def calc_gradient_penalty(netD, real_data, fake_data, device):
    alpha = torch.rand(real_data.shape[0], 1, device=device).expand(real_data.size())
    interpolates = alpha * real_data + (1 - alpha) * fake_data
    interpolates = autograd.Variable(interpolates, requires_grad=True)
    critic = netD(interpolates)
    gradients = autograd.grad(
        outputs=critic,
        inputs=interpolates,
        grad_outputs=torch.ones(critic.size(), device=device),
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean() * 0.1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    torch.manual_seed(8)
    device = torch.device(args.device)
    netG = nn.Sequential(nn.Linear(2, 24), nn.ReLU(True), nn.Linear(24, 24), nn.ReLU(True), nn.Linear(24, 2)).to(device)
    netD = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Softplus(), nn.Linear(24, 1)).to(device)
    optimizerD = optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.9))
    optimizerG = optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.9))
    one = torch.tensor(1.0, device=device)
    mone = one * -1
    losses = []
    for step in range(args.steps):
        for p in netD.parameters():
            p.requires_grad = True
        for _ in range(3):
            real = (torch.randn(32, 2) * 0.1 + torch.randint(0, 2, (32, 1)).float()).to(device)
            netD.zero_grad()
            D_real = netD(real).mean().view(())
            D_real.backward(mone)
            with torch.no_grad():
                noise = torch.randn(32, 2).to(device)
            fake = netG(noise).data
            D_fake = netD(fake).mean()
            D_fake.backward(one)
            penalty = calc_gradient_penalty(netD, real.data, fake, device)
            penalty.backward()
            optimizerD.step()
        for p in netD.parameters():
            p.requires_grad = False
        netG.zero_grad()
        G = netD(netG(torch.randn(32, 2).to(device))).mean()
        G.backward(mone)
        optimizerG.step()
        losses += [(D_fake - D_real + penalty).cpu().data.numpy().item(), -G.item(), penalty.item()]
        print(f"step {step} D {losses[-3]:.4f} G {losses[-2]:.4f} penalty {losses[-1]:.4f}")
    if args.out:
        torch.save({"losses": losses, "G": netG.state_dict(), "D": netD.state_dict()}, args.out)


if __name__ == "__main__":
    main()
