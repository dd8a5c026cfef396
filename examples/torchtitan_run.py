"""Averages in torchtitan: any of its configurations, with averages, under its own Trainer.

    torchrun --nproc-per-node 8 examples/torchtitan_run.py --model llama3 --config llama3_debugmodel --steps 200 --out
    out/torchtitan

It wants CUDA devices and, for debug models, the data of torchtitan's repository. The same command goes on from the last
checkpoint, on any number of ranks. In the end out/torchtitan/model has the averages under torchtitan's names, and
out/torchtitan/hf under Hugging Face's.
"""

from __future__ import annotations

import argparse
import importlib
from dataclasses import fields
from pathlib import Path

import torch.distributed as dist
from torchtitan.trainer import Trainer

import shardow
from shardow.integrations.torchtitan import AveragedTrainer, EMAWeights


def averaged(config: Trainer.Config, ema: EMAWeights.Config) -> AveragedTrainer.Config:
    """In a registry of your own: ``AveragedTrainer.Config(..., ema=...)`` in place of ``Trainer.Config(...)``."""
    return AveragedTrainer.Config(**{one.name: getattr(config, one.name) for one in fields(config)}, ema=ema)


def train(base: Trainer.Config, steps: int, out: Path, save_every: int = 100) -> dict[str, float]:
    """What a logger takes of the averages."""
    base.dump_folder, base.training.steps = str(out), steps
    base.checkpoint.enable, base.checkpoint.interval, base.checkpoint.last_save_model_only = True, save_every, False
    # or decay=0.999; validation sees them
    config = averaged(base, EMAWeights.Config(enable=True, half_life_fraction=0.05))
    trainer = config.build()
    try:
        trainer.train()  # loads the last checkpoint first, averages too
    finally:
        trainer.close()
    averages = trainer.ema.averages
    averages.export(out / "model", max_shard_size="5GB")  # every rank writes its own bytes
    names = trainer.checkpointer.sd_adapter
    if names is not None:
        whole = averages.full_state_dict()  # on rank 0, which is all that torchtitan's adapter takes
        if dist.get_rank() == 0:
            shardow.save(names.to_hf(whole), out / "hf", max_shard_size="5GB")
    return {name: float(value) for name, value in averages.stats().items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama3")
    parser.add_argument("--config", default="llama3_debugmodel")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("out/torchtitan"))
    given = parser.parse_args()
    registry = importlib.import_module(f"torchtitan.models.{given.model}.config_registry")
    print(train(getattr(registry, given.config)(), given.steps, given.out))
