"""A variational autoencoder: reparametrised noise, a sum kept as a Python number, samples at the end of an epoch."""

import argparse

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(784, 40)
        self.fc21 = nn.Linear(40, 10)
        self.fc22 = nn.Linear(40, 10)
        self.fc3 = nn.Linear(10, 40)
        self.fc4 = nn.Linear(40, 784)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        h3 = F.relu(self.fc3(z))
        return torch.sigmoid(self.fc4(h3))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 784))
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 784), reduction="sum")
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(1)
    device = torch.device(args.device)
    images = torch.rand(4, 1, 28, 28)[torch.randint(0, 4, (160,))]
    train_loader = DataLoader([(image, 0) for image in images[:128]], batch_size=32, shuffle=True)
    test_loader = DataLoader([(image, 0) for image in images[128:]], batch_size=32)
    model = VAE().to(device)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    losses, tests, samples = [], [], []
    for epoch in range(1, args.epochs + 1):
        model.train()
        train_loss = 0
        for batch_idx, (data, _) in enumerate(train_loader):
            data = data.to(device)
            optimizer.zero_grad()
            recon_batch, mu, logvar = model(data)
            loss = loss_function(recon_batch, data, mu, logvar)
            loss.backward()
            train_loss += loss.item()
            optimizer.step()
            losses.append(loss.item() / len(data))
            print(f"step {len(losses)} epoch {epoch} [{batch_idx * len(data)}] loss {losses[-1]:.6f}")
        print(f"====> epoch {epoch} average loss {train_loss / 128:.4f}")
        model.eval()
        test_loss = 0
        with torch.no_grad():
            for i, (data, _) in enumerate(test_loader):
                data = data.to(device)
                recon_batch, mu, logvar = model(data)
                test_loss += loss_function(recon_batch, data, mu, logvar).item()
                if i == 0:
                    n = min(data.size(0), 8)
                    comparison = torch.cat([data[:n], recon_batch.view(32, 1, 28, 28)[:n]])
                    samples.append(comparison.cpu())
        tests.append(test_loss / 32)
        with torch.no_grad():
            sample = torch.randn(6, 10).to(device)
            sample = model.decode(sample).cpu()
            samples.append(sample.view(6, 1, 28, 28))
    if args.out:
        torch.save({"losses": losses, "tests": tests, "samples": samples, "model": model.state_dict()}, args.out)


if __name__ == "__main__":
    main()
