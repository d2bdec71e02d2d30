"""A small convolutional network on digits: loaders with workers, a schedule, a test loop, a checkpoint."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    """Noisy pictures of ten patterns, of MNIST's shape."""

    def __init__(self, train, count):
        generator = torch.Generator().manual_seed(0 if train else 1)
        patterns = torch.rand(10, 1, 28, 28, generator=torch.Generator().manual_seed(7))
        self.targets = torch.randint(0, 10, (count,), generator=generator)
        self.images = patterns[self.targets] + 0.3 * torch.randn(count, 1, 28, 28, generator=generator)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return (self.images[index] - 0.5) / 0.3, int(self.targets[index])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(2304, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = self.dropout1(x)
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        x = self.dropout2(x)
        return F.log_softmax(self.fc2(x), dim=1)


def train(args, model, device, loader, optimizer, epoch, losses):
    model.train()
    for batch_idx, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"step {len(losses)} epoch {epoch} [{batch_idx * len(data)}/{len(loader.dataset)}] loss {losses[-1]:.6f}")


def test(model, device, loader):
    model.eval()
    test_loss, correct = 0, 0
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()
    test_loss /= len(loader.dataset)
    print(f"test: average loss {test_loss:.4f}, accuracy {correct}/{len(loader.dataset)}")
    return test_loss, correct


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    loaders = {"num_workers": 2, "pin_memory": args.device != "cpu"}
    train_loader = DataLoader(Digits(True, 200), batch_size=32, shuffle=True, **loaders)
    test_loader = DataLoader(Digits(False, 100), batch_size=50, **loaders)
    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    losses, tests = [], []
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch, losses)
        tests.append(test(model, device, test_loader))
        scheduler.step()
    if args.out:
        torch.save({"losses": losses, "tests": tests, "model": model.state_dict()}, args.out)


if __name__ == "__main__":
    main()
