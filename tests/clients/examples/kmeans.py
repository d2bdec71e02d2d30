"""k-means until nothing moves: distances, means by masks and by index_add, a comparison read in each round."""

import argparse

import torch


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    parser.add_argument("--clusters", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(4)
    device = torch.device(args.device)
    points = (torch.randn(300, 2) * 0.3 + torch.randint(0, 3, (300, 2)).float()).to(device)
    centers = points[torch.randperm(300)[: args.clusters].to(device)].clone()
    rounds, moved = [], True
    while moved and len(rounds) < 40:
        labels = torch.cdist(points, centers).argmin(dim=1)
        new = torch.zeros_like(centers).index_add_(0, labels, points)
        counts = torch.bincount(labels, minlength=args.clusters)
        new /= counts.clamp(min=1).unsqueeze(1)
        moved = not torch.allclose(new, centers, atol=1e-4)
        inertia = ((points - new[labels]) ** 2).sum().item()
        rounds.append(inertia)
        print(f"step {len(rounds)} inertia {inertia:.4f}")
        centers = new
    spreads = []
    for k in range(args.clusters):
        members = points[labels == k]
        if len(members) > 1:
            spreads += [members.shape[0], members.std(0).sum().item(), members.mean(0).norm().item()]
    order = torch.unique(labels, return_counts=True)
    if args.out:
        found = {"losses": rounds, "spreads": spreads, "labels": labels, "counts": order[1], "centers": centers}
        torch.save(found, args.out)


if __name__ == "__main__":
    main()
