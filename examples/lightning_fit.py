"""Averages under Lightning: a small network, sharded by FSDP2, learns scikit-learn's handwritten digits.

    torchrun --standalone --nproc-per-node 2 examples/lightning_fit.py --epochs 4 --out out/lightning

The same command goes on from the last checkpoint. In the end out/lightning/model is the averaged model, for inference.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from shardow.integrations.lightning import EMACallback


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))

    def configure_model(self) -> None:
        for layer in self.layers[::2]:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        """By the averages."""
        named = self.layers(batch[0]).argmax(1) == batch[1]
        self.log("accuracy", named.float().mean(), sync_dist=True, batch_size=len(named))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(epochs: int, out: Path, **options: object) -> float:
    """The share of held-out digits that the averages name rightly. ``options``: more of the Trainer's."""
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.images / 8 - 1).float().flatten(1), torch.tensor(digits.target))
    held_out, rest = torch.utils.data.random_split(data, [300, len(data) - 300], torch.Generator().manual_seed(0))
    seed_everything(0, verbose=False)
    averages = EMACallback(0.98)
    world = int(os.environ["WORLD_SIZE"])
    trainer = Trainer(
        max_epochs=epochs, devices=world,
        strategy=ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1),
        callbacks=[averages, ModelCheckpoint(out, "{epoch}", save_top_k=-1)], num_sanity_val_steps=0, logger=False,
        **options,
    )  # fmt: skip
    # Lightning writes meta.pt last
    last = max(out.glob("epoch=*.ckpt/meta.pt"), key=lambda one: int(one.parent.stem[6:]), default=None)
    trainer.fit(Digits(), DataLoader(rest, 32), DataLoader(held_out, 150), ckpt_path=last and last.parent)
    averages.ema.export(out / "model")
    return float(trainer.callback_metrics["accuracy"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("out/lightning"))
    print(train(**vars(parser.parse_args())))
