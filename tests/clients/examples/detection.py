"""A detector's head and what follows it: anchors, boxes, masks of varying length, suppression in a loop."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F


def box_iou(a, b):
    area = lambda t: (t[:, 2] - t[:, 0]) * (t[:, 3] - t[:, 1])  # noqa: E731
    lt, rb = torch.max(a[:, None, :2], b[:, :2]), torch.min(a[:, None, 2:], b[:, 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[:, :, 0] * wh[:, :, 1]
    return inter / (area(a)[:, None] + area(b) - inter)


def nms(boxes, scores, threshold):
    keep, order = [], scores.argsort(descending=True)
    while order.numel() > 0:
        i = order[0]
        keep.append(i)
        if order.numel() == 1:
            break
        iou = box_iou(boxes[i][None], boxes[order[1:]])[0]
        order = order[1:][iou <= threshold]
    return torch.stack(keep) if keep else torch.empty(0, dtype=torch.long, device=boxes.device)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        first, second = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.body = nn.Sequential(first, nn.GroupNorm(2, 8), nn.Hardswish(), second)
        self.cls, self.box = nn.Conv2d(8, 2, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = F.relu(self.body(x))
        return self.cls(x).flatten(2).permute(0, 2, 1), self.box(x).flatten(2).permute(0, 2, 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    torch.manual_seed(21)
    device = torch.device(args.device)
    model = Head().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    objects = [[4.0, 4.0, 14.0, 13.0], [16.0, 10.0, 28.0, 24.0]]
    ys, xs = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    centers = torch.stack([xs, ys], -1).reshape(-1, 2).float().to(device) * 4 + 2
    anchors = torch.cat([centers - 4, centers + 4], 1)
    losses, kept = [], []
    for step in range(args.steps):
        images = torch.randn(2, 3, 32, 32).to(device)
        targets = [torch.tensor(objects[: 1 + (step + i) % 2]) for i in range(2)]
        logits, deltas = model(images)
        total = torch.zeros((), device=device)
        for i, target in enumerate(targets):
            target = target.to(device)
            best, index = box_iou(anchors, target).max(1)
            positive = best > 0.3
            labels = positive.long()
            total = total + F.cross_entropy(logits[i], labels)
            if positive.any():
                wanted = (target[index[positive]] - anchors[positive]) / 8
                total = total + F.smooth_l1_loss(deltas[i][positive], wanted)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(total.item())
        with torch.no_grad():
            scores = logits.softmax(-1)[0, :, 1]
            boxes = (anchors + 8 * deltas[0]).clamp(0, 32)
            mask = scores > scores.median()
            sizes = (boxes[:, 2:] - boxes[:, :2] > 1).all(1)
            mask &= sizes
            boxes, scores = boxes[mask], scores[mask]
            chosen = nms(boxes, scores, 0.4)
            top = boxes[chosen][:3]
        kept.append((len(chosen), scores[chosen].sum().item(), top.tolist()))
        print(f"step {step} loss {losses[-1]:.4f} kept {len(chosen)}")
    if args.out:
        torch.save({"losses": losses, "kept": kept, "model": model.state_dict()}, args.out)


if __name__ == "__main__":
    main()
