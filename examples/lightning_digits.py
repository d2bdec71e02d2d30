"""A Lightning program on the device: one import, and two words for the Trainer."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fused_eager.tpu


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))

    def training_step(self, batch, i):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, i):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def digits(count):
    """Blurred copies of ten random pictures."""
    pictures = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    y = torch.randint(0, 10, (count,))
    return DataLoader(TensorDataset(pictures[y] + torch.randn(count, 64), y), batch_size=32, shuffle=True)


L.seed_everything(0)
trainer = L.Trainer(accelerator="fused_eager", strategy="fused_eager", precision="bf16-mixed", max_epochs=3)
trainer.fit(Digits(), digits(640), digits(128))
print(f"trained on {trainer.strategy.root_device}: accuracy {trainer.callback_metrics['accuracy']:.2f}")
