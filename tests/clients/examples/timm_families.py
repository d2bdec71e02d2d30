"""timm: some families of its models, each trained for some steps and evaluated."""

import argparse

import torch

try:
    import torchvision  # noqa: F401
except RuntimeError:
    # PyPI's torchvision is CUDA's; of its kernels timm needs none, but their schemas are looked up on import.
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import timm
import timm.optim
import timm.utils

FAMILIES = {
    "convolutions": {
        "resnet10t": {},
        "regnetx_002": {},
        "convnext_atto": {"depths": (1, 1, 2, 1), "dims": (16, 24, 32, 48)},
    },
    "small convolutions": {"mobilenetv3_small_050": {}, "ghostnet_050": {}, "edgenext_xx_small": {}},
    "attention": {
        "vit_tiny_patch16_224": {"img_size": 64, "depth": 2},
        "swin_tiny_patch4_window7_224": {"img_size": 56, "depths": (1, 1), "num_heads": (2, 4), "embed_dim": 16},
        "xcit_nano_12_p16_224": {"img_size": 64, "depth": 2},
    },
    "mixers": {"mixer_s16_224": {"img_size": 64}, "mobilevit_xxs": {}, "poolformer_s12": {}},
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    parser.add_argument("--group", default="convolutions")
    args = parser.parse_args()
    found = {}
    for name, options in FAMILIES[args.group].items():
        torch.manual_seed(0)
        size = options.get("img_size", 64)
        model = timm.create_model(name, num_classes=7, **options).to(args.device)
        optimizer = timm.optim.create_optimizer_v2(model, "sgd", lr=1e-3, weight_decay=1e-4)
        losses = []
        for _ in range(2):
            x, y = torch.randn(4, 3, size, size), torch.randint(0, 7, (4,))
            loss = torch.nn.functional.cross_entropy(model(x.to(args.device)), y.to(args.device))
            optimizer.zero_grad()
            loss.backward()
            timm.utils.dispatch_clip_grad(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            features = model.forward_features(x.to(args.device)).flatten(1)[:, :8]
            found[name] = {"losses": losses, "output": model(x.to(args.device)).cpu(), "features": features.cpu()}
        print(name, losses)
    if args.out:
        torch.save(found, args.out)


if __name__ == "__main__":
    main()
