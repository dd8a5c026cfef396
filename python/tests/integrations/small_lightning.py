"""A module that trains in no time under Lightning, on CPUs, and a Trainer for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning")
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy


class CpuFSDP(FSDPStrategy):
    """Which neither Lightning's Trainer nor FSDP refuses on CPUs."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


class Net(LightningModule):
    def __init__(self, batch_norm: bool = False, crash: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(6, 7), *([nn.BatchNorm1d(7)] if batch_norm else []), nn.Tanh(), nn.Linear(7, 3)
        )
        self.crash, self.seen = crash, []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if self.crash is not None and self.current_epoch >= self.crash:
            raise RuntimeError("crash")
        return self.layers(batch[0]).square().mean()

    def validation_step(self, batch: Any, index: int) -> None:
        self.seen.append(float(self.layers(torch.ones(1, 6)).sum()))

    test_step = predict_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.layers.parameters(), 0.05)


class Sharded(Net):
    def configure_model(self) -> None:
        fully_shard(self.layers[0], mesh=self.device_mesh["data_parallel"])
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


def batches(count: int = 8) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(count * 4, 6, generator=torch.Generator().manual_seed(1))), 4)


def trainer_of(kind: str, callback: Callback, *more: Callback, world: int = 1, epochs: int = 3, **options: Any) -> Any:
    strategies: dict[str, Callable[[], Any]] = {
        "one": lambda: "auto",
        "ddp": DDPStrategy,
        "fsdp1": lambda: CpuFSDP(state_dict_type="sharded"),
        "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1),
    }
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return Trainer(
        accelerator="cpu", devices=world, strategy=strategies[kind](), max_epochs=epochs, callbacks=[callback, *more],
        **{"enable_checkpointing": any(isinstance(one, ModelCheckpoint) for one in more), **quiet, **options},
    )  # fmt: skip


class Watching(Callback):
    """What others see where: the module's output at every hook of a validation, and what ModelCheckpoint saves."""

    def __init__(self) -> None:
        self.outputs: dict[str, float] = {}

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.outputs["training"] = output(pl_module)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.outputs["end of epoch"] = output(pl_module)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self.outputs["saved"] = output(pl_module)


@torch.no_grad()
def output(module: nn.Module) -> float:
    return float(module.eval().layers(torch.ones(1, 6)).sum())
