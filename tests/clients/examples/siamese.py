"""A Siamese network on pairs of pictures: weights shared by two passes, a batch norm that sees both."""

import argparse
import random

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset


class Encoder(nn.Module):
    """A small residual network, as the published one takes a ResNet's body."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))

    def forward(self, x):
        x = self.pool(torch.relu(self.bn1(self.conv1(x))))
        return self.avgpool(torch.relu(self.bn2(self.conv2(x)) + x))


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.fc = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 1))
        self.sigmoid = nn.Sigmoid()
        self.encoder.apply(self.init_weights)
        self.fc.apply(self.init_weights)

    def init_weights(self, m):
        if isinstance(m, nn.Linear):
            torch.nn.init.xavier_uniform_(m.weight)
            m.bias.data.fill_(0.01)

    def forward_once(self, x):
        output = self.encoder(x)
        return output.view(output.size()[0], -1)

    def forward(self, input1, input2):
        output = torch.cat((self.forward_once(input1), self.forward_once(input2)), 1)
        return self.sigmoid(self.fc(output))


class Matcher(Dataset):
    def __init__(self, seed, count):
        self.random = random.Random(seed)
        self.patterns = torch.rand(5, 28, 28, generator=torch.Generator().manual_seed(9))
        self.pairs = [(self.random.randrange(5), self.random.randrange(5), i % 2) for i in range(count)]

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        first, second, alike = self.pairs[index]
        a, b = self.patterns[first].clone().float(), self.patterns[first if alike else second].clone().float()
        return a.unsqueeze(0), b.unsqueeze(0), torch.tensor(float(alike or first == second))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(2)
    device = torch.device(args.device)
    kwargs = {"num_workers": 1, "pin_memory": args.device != "cpu", "shuffle": True, "persistent_workers": True}
    train_loader = DataLoader(Matcher(0, 72), batch_size=16, **kwargs)
    test_loader = DataLoader(Matcher(1, 32), batch_size=16)
    model = SiameseNetwork().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    criterion = nn.BCELoss()
    losses, tests = [], []
    for epoch in range(1, args.epochs + 1):
        model.train()
        for images_1, images_2, targets in train_loader:
            images_1, images_2, targets = images_1.to(device), images_2.to(device), targets.to(device)
            optimizer.zero_grad()
            outputs = model(images_1, images_2).squeeze()
            loss = criterion(outputs, targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            print(f"step {len(losses)} epoch {epoch} loss {losses[-1]:.6f}")
        model.eval()
        test_loss, correct = 0, 0
        with torch.no_grad():
            for images_1, images_2, targets in test_loader:
                images_1, images_2, targets = images_1.to(device), images_2.to(device), targets.to(device)
                outputs = model(images_1, images_2).squeeze()
                test_loss += criterion(outputs, targets).sum().item()
                pred = torch.where(outputs > 0.5, 1, 0)
                correct += pred.eq(targets.view_as(pred)).sum().item()
        tests.append((test_loss, correct))
        scheduler.step()
    if args.out:
        torch.save({"losses": losses, "tests": tests, "model": model.state_dict()}, args.out)


if __name__ == "__main__":
    main()
