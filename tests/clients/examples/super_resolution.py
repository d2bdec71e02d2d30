"""Sub-pixel super resolution: orthogonal weights, a pixel shuffle, PSNR, the whole model saved and loaded."""

import argparse
import os
import tempfile
from math import log10

import torch
from torch import nn, optim
from torch.nn import init
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 16, (5, 5), (1, 1), (2, 2))
        self.conv2 = nn.Conv2d(16, 16, (3, 3), (1, 1), (1, 1))
        self.conv3 = nn.Conv2d(16, 8, (3, 3), (1, 1), (1, 1))
        self.conv4 = nn.Conv2d(8, upscale_factor**2, (3, 3), (1, 1), (1, 1))
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        init.orthogonal_(self.conv1.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv2.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv3.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv4.weight)

    def forward(self, x):
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x))
        x = self.relu(self.conv3(x))
        return self.pixel_shuffle(self.conv4(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--upscale", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(123)
    device = torch.device(args.device)
    large = torch.rand(24, 1, 3, 3).repeat_interleave(8, 2).repeat_interleave(8, 3)
    small = nn.functional.interpolate(large, scale_factor=1 / args.upscale, mode="bicubic")
    training = DataLoader(TensorDataset(small, large), num_workers=0, batch_size=4, shuffle=True)
    testing = DataLoader(TensorDataset(small[:8], large[:8]), num_workers=0, batch_size=4)
    model = Net(upscale_factor=args.upscale).to(device)
    criterion = nn.MSELoss()
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    losses, tests = [], []
    for _ in range(args.epochs):
        for batch in training:
            input, target = batch[0].to(device), batch[1].to(device)
            optimizer.zero_grad()
            loss = criterion(model(input), target)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            print(f"step {len(losses)} loss {losses[-1]:.4f}")
        avg_psnr = 0
        with torch.no_grad():
            for batch in testing:
                input, target = batch[0].to(device), batch[1].to(device)
                mse = criterion(model(input), target)
                avg_psnr += 10 * log10(1 / mse.item())
        tests.append(avg_psnr / len(testing))
        print(f"===> avg. PSNR {tests[-1]:.4f} dB")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.pth")
        torch.save(model, path)
        loaded = torch.load(path, weights_only=False)
        out_img = loaded(small[:1].to(device))
        elsewhere = torch.load(path, weights_only=False, map_location="cpu")
        again = elsewhere(small[:1])
    picture = out_img[0].detach().cpu().numpy() * 255.0
    picture = picture.clip(0, 255)
    if args.out:
        found = {"losses": losses, "tests": tests, "picture": torch.from_numpy(picture), "again": again.detach()}
        torch.save(found, args.out)


if __name__ == "__main__":
    main()
