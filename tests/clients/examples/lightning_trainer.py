"""Lightning's Trainer: accumulation, callbacks, a log; validate, test, predict; going on from a checkpoint."""

import argparse
import tempfile
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self, width=24, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(8 * 36, width),
            nn.ReLU(),
            nn.Linear(width, 4),
        )

    def forward(self, x):
        return self.net(x)

    def step(self, batch, name):
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log(f"{name}_loss", loss, prog_bar=True, on_step=name == "train", on_epoch=True)
        self.log(f"{name}_accuracy", (logits.argmax(1) == y).float().mean(), on_epoch=True, on_step=False)
        return loss

    def training_step(self, batch, i):
        return self.step(batch, "train")

    def validation_step(self, batch, i):
        self.step(batch, "val")

    def test_step(self, batch, i):
        self.step(batch, "test")

    def predict_step(self, batch, i):
        return self(batch[0]).float().softmax(1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Losses(Callback):
    def __init__(self):
        self.seen, self.places = [], set()

    def on_train_batch_end(self, trainer, module, outputs, batch, i):
        self.seen.append(outputs["loss"].item())
        self.places.add(next(module.parameters()).device.type)


def loader(seed, shuffle=False):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (64,), generator=g)
    x = torch.randn(64, 1, 8, 8, generator=g) + y.view(-1, 1, 1, 1) * 0.5
    return DataLoader(TensorDataset(x, y), batch_size=8, shuffle=shuffle)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--out")
    args = parser.parse_args()
    L.seed_everything(7)
    folder = Path(tempfile.mkdtemp())
    losses = Losses()

    def trainer(epochs):
        return L.Trainer(
            accelerator=args.accelerator,
            strategy=args.strategy,
            devices=1,
            precision=args.precision,
            max_epochs=epochs,
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            log_every_n_steps=2,
            enable_progress_bar=False,
            logger=CSVLogger(folder, name="log"),
            callbacks=[
                losses,
                LearningRateMonitor(),
                EarlyStopping("val_loss", patience=5),
                ModelCheckpoint(folder, "best", monitor="val_loss", save_last=True),
            ],
        )

    first = trainer(2)
    first.fit(Classifier(), loader(0), loader(1))
    second = trainer(4)
    module = Classifier()
    second.fit(module, loader(0), loader(1), ckpt_path=folder / "last.ckpt", weights_only=False)
    validated = second.validate(module, loader(1), verbose=False)
    tested = second.test(module, loader(2), verbose=False)
    predicted = torch.cat(second.predict(module, loader(2)))
    again = Classifier.load_from_checkpoint(folder / "last.ckpt", map_location="cpu", weights_only=False)
    log = (Path(second.logger.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    print("losses", losses.seen[-3:], validated, tested)
    if args.out:
        found = {"losses": losses.seen, "validated": validated, "tested": tested, "predicted": predicted.cpu()}
        found |= {"model": again.state_dict(), "placed": losses.places == {args.device}, "columns": sorted(log)}
        torch.save(found, args.out)


if __name__ == "__main__":
    main()
