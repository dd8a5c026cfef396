"""The checkpoint: model, optimizer and averages through torch.distributed.checkpoint, sharded; and the averages as files of their own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import shardow

from . import shard
from .evaluate import hashes
from .options import Options

if TYPE_CHECKING:
    from .train import Trainer


def save(trainer: Trainer, options: Options) -> dict[str, int]:
    """{path below --out: bytes}. Collective."""
    from .train import schedules

    if dist.get_rank() == 0:
        for name in ("checkpoint", "averages", "exported"):
            shutil.rmtree(options.out / name, ignore_errors=True)
        options.out.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    weights, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    dcp.save({"model": weights, "optimizer": optimizer, "ema": trainer.ema}, checkpoint_id=options.out / "checkpoint")
    trainer.ema.save(averages(options))
    trainer.ema.export(options.out / "exported", decay=schedules(options.decays)[-1])
    return {name: _size(options.out / name) for name in ("checkpoint", "averages", "exported")}


def load(trainer: Trainer, options: Options) -> None:
    """Collective, at any world size."""
    weights, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": optimizer, "ema": trainer.ema}
    dcp.load(state, checkpoint_id=options.out / "checkpoint")
    set_state_dict(trainer.model, trainer.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def averages(options: Options) -> Path:
    """One file, or with several decays a directory of them."""
    return options.out / "averages" / "ema.safetensors" if len(options.decays) == 1 else options.out / "averages"


def hashes_of_files(trainer: Trainer, options: Options) -> list[str]:
    """Of the averages that ema.save() wrote, read into averages that begin otherwise. Collective."""
    from .train import schedules

    with torch.no_grad():
        ema = shardow.EMA(trainer.model, decay=schedules(options.decays), group=shard.ema_group(options.shard))
    ema.load(averages(options))
    return hashes(ema, schedules(options.decays))


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
