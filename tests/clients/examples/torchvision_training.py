"""torchvision: five of its models trained for some steps on images that its transforms have changed."""

import argparse

import torch

try:
    import torchvision
except RuntimeError:
    # PyPI's torchvision is CUDA's; of its kernels these models need none, but their schemas are looked up on import.
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision
from torchvision import models
from torchvision.ops import box_iou, generalized_box_iou_loss, sigmoid_focal_loss
from torchvision.transforms import v2
from torchvision.utils import make_grid

SIZE = 48
MODELS = {
    "resnet18": {},
    "mobilenet_v2": {"width_mult": 0.25, "dropout": 0.0},
    "shufflenet_v2_x0_5": {},
    "squeezenet1_1": {"dropout": 0.0},
    "lraspp_mobilenet_v3_large": {"weights_backbone": None},
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    parser.add_argument("--models", default=",".join(MODELS))
    args = parser.parse_args()
    change = v2.Compose(
        [
            v2.RandomCrop(SIZE),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.2, 0.2),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.25] * 3),
        ]
    )
    found = {}
    for name in args.models.split(","):
        torch.manual_seed(0)
        model = models.get_model(name, weights=None, num_classes=4, **MODELS[name]).to(args.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        losses = []
        for _ in range(2):
            images = torch.randint(0, 256, (4, 3, 56, 56), dtype=torch.uint8).to(args.device)
            x, y = change(images), torch.randint(0, 4, (4,)).to(args.device)
            out = model(x)
            if isinstance(out, dict):
                y = y.view(-1, 1, 1).expand(-1, SIZE, SIZE)
                out = out["out"]
            loss = torch.nn.functional.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            found[name] = {"losses": losses, "output": model(x)["out"].cpu() if out.dim() > 2 else model(x).cpu()}
        print(name, losses)
    boxes = (torch.rand(6, 4).to(args.device) * 20).requires_grad_()
    corners = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:] + 1], 1)
    between = generalized_box_iou_loss(corners[:3], corners[3:], reduction="mean")
    between.backward()
    focal = sigmoid_focal_loss(corners / 20 - 0.5, (corners > 15).float(), reduction="mean")
    grid = make_grid(images, nrow=2)
    found["boxes"] = {"iou": box_iou(corners, corners).cpu(), "loss": between.item(), "grad": boxes.grad.cpu()}
    found |= {"focal": focal.item(), "grid": grid.cpu(), "version": torchvision.__version__}
    if args.out:
        found = {k: v if isinstance(v, (dict, float, str)) else v.detach() for k, v in found.items()}
        found["boxes"]["iou"] = found["boxes"]["iou"].detach()
        torch.save(found, args.out)


if __name__ == "__main__":
    main()
