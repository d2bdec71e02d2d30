"""Metrics as torchmetrics keeps them: states that grow, thresholds, ranks, calibration, retrieval, images and texts."""

import argparse

import torch
import torchmetrics as tm
from torchmetrics import functional as F
from torchmetrics.image import StructuralSimilarityIndexMeasure
from torchmetrics.regression import KendallRankCorrCoef, SpearmanCorrCoef


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    device = args.device
    g = torch.Generator().manual_seed(0)
    kinds = {
        "auroc": tm.AUROC(task="multiclass", num_classes=4),
        "binned auroc": tm.AUROC(task="multiclass", num_classes=4, thresholds=11),
        "precision": tm.AveragePrecision(task="multiclass", num_classes=4, average=None),
        "confusion": tm.ConfusionMatrix(task="multiclass", num_classes=4, normalize="true"),
        "calibration": tm.CalibrationError(task="multiclass", num_classes=4, n_bins=5),
        "kappa": tm.CohenKappa(task="multiclass", num_classes=4),
        "matthews": tm.MatthewsCorrCoef(task="multiclass", num_classes=4),
        "f1": tm.F1Score(task="multiclass", num_classes=4, average="macro"),
        "top 2": tm.Accuracy(task="multiclass", num_classes=4, top_k=2),
        "jaccard": tm.JaccardIndex(task="multiclass", num_classes=4),
    }
    whole = tm.MetricCollection(kinds).to(device)
    mean, high = tm.MeanMetric().to(device), tm.MaxMetric().to(device)
    ranks = {"spearman": SpearmanCorrCoef(), "kendall": KendallRankCorrCoef()}
    numbers = tm.MetricCollection({**ranks, "r2": tm.R2Score(), "pearson": tm.PearsonCorrCoef()}).to(device)
    retrieval = tm.retrieval.RetrievalMAP().to(device), tm.retrieval.RetrievalNormalizedDCG(top_k=3).to(device)
    image = StructuralSimilarityIndexMeasure(data_range=1.0).to(device)
    steps = []
    for step in range(4):
        n = 16 - step  # the last batches are smaller
        scores = torch.randn(n, 4, generator=g).softmax(-1).to(device)
        target = torch.randint(0, 4, (n,), generator=g).to(device)
        if step % 2:
            steps.append({k: v.cpu() for k, v in whole(scores, target).items()})
        else:
            whole.update(scores, target)
        mean.update(scores.max(-1).values, weight=target + 1)
        high.update(scores.max())
        numbers.update(scores[:, 0], scores[:, 0] * 0.5 + scores[:, 1])
        ids = torch.randint(0, 3, (n,), generator=g).to(device)
        for metric in retrieval:
            metric.update(scores[:, 1], target > 1, indexes=ids)
        image.update(torch.rand(2, 1, 16, 16, generator=g).to(device), torch.rand(2, 1, 16, 16, generator=g).to(device))
    found = {"steps": steps, "all": {k: v.cpu() for k, v in whole.compute().items()}}
    found |= {"mean": mean.compute().item(), "high": high.compute().item(), "ssim": image.compute().cpu()}
    found["numbers"] = {k: v.cpu() for k, v in numbers.compute().items()}
    found["retrieval"] = [metric.compute().cpu() for metric in retrieval]
    fpr, tpr, at = F.roc((scores[:, 0]), (target == 0).long(), task="binary")
    found["roc"] = [fpr.cpu(), tpr.cpu(), at.cpu()]
    found["quantiles"] = torch.quantile(scores, torch.tensor([0.1, 0.5, 0.9], device=device), dim=0).cpu()
    found["histogram"] = torch.histc(scores.flatten(), 8, 0, 1).cpu()
    found["places"] = torch.searchsorted(torch.linspace(0, 1, 9, device=device), scores[0].contiguous()).cpu()
    whole.reset()
    print("f1", found["all"]["f1"])
    if args.out:
        torch.save(found, args.out)


if __name__ == "__main__":
    main()
