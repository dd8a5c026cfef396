"""The checkpoint: model, optimizer and averages through torch.distributed.checkpoint, sharded; and the averages as
files of their own.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import shardow

from . import averages, shard
from .options import Options

_FLAT = StateDictOptions(
    flatten_optimizer_state_dict=True
)  # nested, FSDP1 param_groups get a key on some ranks that other ranks lack
FOLDERS = ("checkpoint", "averages", "exported")


def save(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, ema: shardow.EMA | None, step: int, options: Options
) -> dict[str, int]:
    """{folder below --out: bytes}. What an earlier run left there goes. Without averages the weights are exported.
    Collective.
    """
    if dist.get_rank() == 0:
        for name in FOLDERS:
            shutil.rmtree(options.out / name, ignore_errors=True)
        options.out.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    weights, state = get_state_dict(model, optimizer, options=_FLAT)
    dcp.save(_everything(weights, state, ema, step), checkpoint_id=options.out / "checkpoint")
    if ema is None:
        shardow.save(model, options.out / "exported", group=shard.ema_group(options.shard))
    else:
        ema.save(averages_path(options))
        ema.export(options.out / "exported", decay=averages.schedules(options)[-1])
    return {name: _size(options.out / name) for name in FOLDERS if ema is not None or name != "averages"}


def load(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ema: shardow.EMA | None, options: Options) -> int:
    """The step of the checkpoint. Collective, at any world size."""
    weights, state = get_state_dict(model, optimizer, options=_FLAT)
    found = _everything(weights, state, ema, 0)
    dcp.load(found, checkpoint_id=options.out / "checkpoint")
    set_state_dict(
        model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"], options=_FLAT
    )
    return int(found["step"])


def _everything(weights: dict[str, Any], state: dict[str, Any], ema: shardow.EMA | None, step: int) -> dict[str, Any]:
    return {"model": weights, "optimizer": state, "step": step, **({} if ema is None else {"ema": ema})}


def hashes_of_files(model: torch.nn.Module, options: Options) -> list[str]:
    """Of the averages that ema.save() wrote, read into averages that begin otherwise. Collective."""
    if not options.use_ema:
        return []
    ema = averages.make(model, options)
    ema.load(averages_path(options))
    return averages.hashes(ema, options)


def averages_path(options: Options) -> Path:
    """A directory; with one decay a file in it."""
    return options.out / "averages" / "ema.safetensors" if len(options.decays) == 1 else options.out / "averages"


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
