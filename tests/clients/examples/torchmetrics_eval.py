"""torchmetrics over batches of varying size: classification, regression, a collection, curves, averages, reset."""

import argparse

import torch
import torchmetrics as tm
from torchmetrics import classification as c


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.manual_seed(0)
    metrics = tm.MetricCollection(
        {
            "accuracy": c.MulticlassAccuracy(5),
            "top2": c.MulticlassAccuracy(5, top_k=2, average="micro"),
            "f1": c.MulticlassF1Score(5),
            "auroc": c.MulticlassAUROC(5, thresholds=20),
            "auroc_exact": c.MulticlassAUROC(5),
            "precision": c.MulticlassAveragePrecision(5),
            "confusion": c.MulticlassConfusionMatrix(5),
            "calibration": c.MulticlassCalibrationError(5),
            "kappa": c.MulticlassCohenKappa(5),
            "matthews": c.MulticlassMatthewsCorrCoef(5),
        }
    ).to(args.device)
    numbers = tm.MetricCollection(
        {
            "mse": tm.MeanSquaredError(),
            "mae": tm.MeanAbsoluteError(),
            "r2": tm.R2Score(),
            "pearson": tm.PearsonCorrCoef(),
            "spearman": tm.SpearmanCorrCoef(),
            "explained": tm.ExplainedVariance(),
        }
    ).to(args.device)
    mean = tm.MeanMetric().to(args.device)
    binary = c.BinaryPrecisionRecallCurve(thresholds=11).to(args.device)
    steps = []
    for size in (16, 16, 16, 9, 16, 5):
        logits, y = torch.randn(size, 5).to(args.device), torch.randint(0, 5, (size,)).to(args.device)
        logits[torch.arange(size), y] += 1
        steps.append(metrics(logits.softmax(1), y)["accuracy"].item())
        numbers.update(logits[:, 0], logits[:, 1] * 0.5 + logits[:, 0])
        mean.update(logits.mean(), weight=size)
        binary.update(logits[:, 0].sigmoid(), (y == 0).int())
    found = {"steps": steps, "metrics": metrics.compute(), "numbers": numbers.compute(), "mean": mean.compute()}
    found["curve"] = list(binary.compute())
    metrics.reset()
    found["after"] = metrics(logits.softmax(1), y)["f1"].item()
    image = tm.image.StructuralSimilarityIndexMeasure(data_range=1.0).to(args.device)
    a = torch.rand(2, 3, 24, 24).to(args.device)
    found["ssim"] = image(a, (a * 0.8 + 0.1)).item()
    if args.out:
        torch.save(found, args.out)


if __name__ == "__main__":
    main()
