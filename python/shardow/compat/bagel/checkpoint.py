"""BAGEL's checkpoints: five files in a directory that is named after the step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from shardow import errors
from shardow.base.checks import invalid, unsupported, warn
from shardow.compat._impl.averaged_copy import TrainedCopy
from shardow.compat._impl.swapped_model_proxy import all_ranks
from shardow.compat.files import torch_files
from shardow.compat.files.published import publish
from shardow.distributed.rank_group import RankGroup, Step, equal_facts
from shardow.files.checkpoint import save
from shardow.model.parts import held_by
from shardow.start import fill, meta

HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


class FSDPConfig:
    """``sharding_strategy``, ``backward_prefetch``: torch's names. The numbers are HYBRID_SHARD's mesh."""

    def __init__(
        self, sharding_strategy: str, backward_prefetch: str, cpu_offload: bool, num_replicate: int, num_shard: int = 8
    ) -> None:
        self.sharding_strategy = sharding_strategy
        self.backward_prefetch = backward_prefetch
        self.cpu_offload = cpu_offload
        self.num_replicate = num_replicate
        self.num_shard = num_shard


def strategy_of(config: FSDPConfig) -> ShardingStrategy:
    if config.sharding_strategy not in ShardingStrategy.__members__:
        known = ", ".join(ShardingStrategy.__members__)
        raise unsupported(f"sharding_strategy={config.sharding_strategy!r}; FSDP has {known}", KeyError)
    return ShardingStrategy[config.sharding_strategy]


# Sinusoids, which the model has for its own resolution.
_FIXED = ("latent_pos_embed.pos_embed", "vit_pos_embed.pos_embed")


class FSDPCheckpoint:
    """``{ckpt_dir}/{step:07d}/``: ema.safetensors, model.safetensors, optimizer.{i:05d}-of-{n:05d}.pt, scheduler.pt,
    data_status.pt.
    """

    @staticmethod
    def fsdp_save_ckpt(
        ckpt_dir: str | Path, train_steps: int, model: nn.Module, ema_model: nn.Module | None,
        optimizer: torch.optim.Optimizer, scheduler: Any, data_status: Any, logger: Any, fsdp_config: FSDPConfig,
    ) -> None:  # fmt: skip
        """Collective over all ranks. Each writes its own bytes of the weights and its shard of the optimizer's state.

        The directory appears by one rename when it is whole. Until then it lies beside ``ckpt_dir``, where auto_resume
        does not look; inside, where another file system begins at ``ckpt_dir``.
        """
        path = Path(ckpt_dir).resolve() / f"{train_steps:07d}"
        logger.info(f"Saving checkpoint to {path}.")
        ranks = all_ranks()
        shard_name, _, writes = _shard_of(fsdp_config)

        def fill(partial: Path) -> None:
            for name, one in (("ema", ema_model), ("model", model)):
                if one is not None:
                    save(one, partial / f"{name}.safetensors", group=ranks.process_group)
            ranks.agree("fsdp_save_ckpt()", lambda: write_rest(partial))

        def write_rest(partial: Path) -> None:
            if writes:
                torch_files.write(optimizer.state_dict(), partial / shard_name)
            if ranks.rank == 0 and scheduler is not None:
                torch_files.write(scheduler.state_dict(), partial / "scheduler.pt")
            if ranks.rank == 0 and data_status is not None:
                torch_files.write(data_status, partial / "data_status.pt")

        publish("fsdp_save_ckpt()", path, _beside(path, ranks), ranks, fill)

    @staticmethod
    def try_load_ckpt(
        resume_from: str | Path | None, logger: Any, model: nn.Module, ema_model: nn.Module | None = None,
        resume_from_ema: bool = False, missing_ema: str = "error",
    ) -> tuple[nn.Module, nn.Module | None]:  # fmt: skip
        """Weights into ``model`` and ``ema_model``, wrapped or not; of what is sharded each rank reads its own bytes.
        Collective.

        Everything that fits by name is loaded, the rest is told to ``logger``, as in the origin; tensors of another
        shape, and files of which nothing fits, are refused before anything changes. ``missing_ema``: for a checkpoint
        without ema.safetensors: "error", or "model": the averages begin as the weights of the file that ``model`` is
        loaded from. Where there is no checkpoint, an ``ema_model`` without values (made on meta) begins as ``model``.
        """
        if missing_ema not in ("error", "model"):
            raise invalid(f"missing_ema={missing_ema!r}; 'error', or 'model': the averages begin as the weights")
        ranks = all_ranks()
        folder = _existing(resume_from, ranks)
        if folder is None:
            logger.info("Training from scratch.")
            if ema_model is not None and meta.valueless(ema_model):
                TrainedCopy(ema_model, keeps=False).begin(model)
                meta.have_values(ema_model)
            return model, ema_model
        logger.info(f"Loading checkpoint from {folder}.")
        source = folder / ("ema.safetensors" if resume_from_ema else "model.safetensors")
        wanted = [(model, source)]
        if ema_model is not None:
            ema_file = ranks.agree("try_load_ckpt()", lambda: _ema_file(folder, source, missing_ema, logger))
            wanted.append((ema_model, ema_file))
        for check_only in (True, False):
            for one, path in wanted:
                _load(one, path, ranks, logger, check_only)
        return model, ema_model

    @staticmethod
    def try_load_train_state(
        resume_from: str | Path | None, optimizer: torch.optim.Optimizer, scheduler: Any, fsdp_config: FSDPConfig
    ) -> tuple[torch.optim.Optimizer, Any, int, Any]:
        """(optimizer, scheduler, the next step, this rank's data_status). Collective. Everything is read before
        anything is loaded. Raises FileNotFoundError where the optimizer's state was saved in another number of shards,
        naming both."""
        ranks = all_ranks()
        folder = _existing(resume_from, ranks)
        if folder is None:
            return optimizer, scheduler, 0, None
        name, count, _ = _shard_of(fsdp_config)

        def read() -> tuple[Any, Any, int, Any]:
            step = os.path.basename(os.path.normpath(folder))
            if not step.isdigit():
                raise invalid(f"{folder} is not named after its step, e.g. 0001000; its step is unknown")
            status = _read(folder / "data_status.pt") if (folder / "data_status.pt").exists() else []
            schedule = _read(folder / "scheduler.pt") if scheduler is not None else None
            own = status[ranks.rank] if ranks.rank < len(status) else None
            return _read_shard(folder, name, count), schedule, int(step) + 1, own

        state, schedule, step, status = ranks.agree("try_load_train_state()", read)
        ranks.agree("try_load_train_state()", lambda: optimizer.load_state_dict(state))
        if scheduler is not None:
            scheduler.load_state_dict(schedule)
        return optimizer, scheduler, step, status


def _load(model: nn.Module, path: Path, ranks: RankGroup, logger: Any, check_only: bool) -> None:
    valueless = meta.valueless(model)
    fixed = set(_FIXED) - valueless

    what, names = "try_load_ckpt()", list[str]()

    def look() -> Step[fill.Job]:
        held = held_by(model, ranks.process_group, saving=False)
        held.parts = [part for part in held.parts if part.name not in fixed]
        names[:] = [part.name for part in held.parts]
        return Step(fill.Job(what, held, ranks, names, valueless, strict=False))

    report = fill.FileLoad(path, look).fill(ranks, what, check_only)
    if len(report["missing"]) == len(names):
        there, here = ", ".join(report["unexpected"][:5]), ", ".join(names[:5])
        raise invalid(f"try_load_ckpt(): {path} has nothing of this model: it has {there} ..., the model {here} ...")
    if not check_only:
        meta.have_values(model)
        unexpected = [name for name in report["unexpected"] if name not in fixed]
        differ = f"missing in the file: {report['missing']}; not wanted: {unexpected}"
        logger.info(f"{path.name}: {differ if report['missing'] or unexpected else 'all names fit'}")


def _ema_file(folder: Path, source: Path, missing_ema: str, logger: Any) -> Path:
    path = folder / "ema.safetensors"
    if path.exists():
        return path
    if missing_ema == "error":
        raise errors.make("not_found", f"{path} is missing; missing_ema='model' begins the averages as {source.name}")
    logger.info(f"{path.name} is missing: the averages begin as {source}.")
    return source


def _shard_of(config: FSDPConfig) -> tuple[str, int, bool]:
    """Returns the file of this rank's shard of the optimizer's state, how many shards there are, and whether this rank
    writes it: of ranks that have the same one, the first does."""
    rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    writes = True
    if strategy_of(config) == ShardingStrategy.NO_SHARD:
        rank, count, writes = 0, 1, rank == 0
    elif config.sharding_strategy in HYBRID:
        rank, count, writes = rank % config.num_shard, config.num_shard, rank < config.num_shard
    return f"optimizer.{rank:05d}-of-{count:05d}.pt", count, writes


def _read_shard(folder: Path, name: str, count: int) -> Any:
    if (folder / name).exists():
        return _read(folder / name)
    counts = sorted({int(path.stem.rpartition("-")[2]) for path in folder.glob("optimizer.*-of-*.pt")})
    there = f"that of {' and '.join(map(str, counts))} shards" if counts else "none"
    differ = f"this run has {count} shards of the optimizer's state, the checkpoint {there}"
    way_out = "Resume with as many, or from the weights alone, which fit any number"
    raise errors.make("not_found", f"{folder} has no {name}: {differ}. {way_out}")


def _read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _existing(resume_from: str | Path | None, ranks: RankGroup) -> Path | None:
    if resume_from is None:
        return None
    path = Path(resume_from)
    what = f"resuming from {path}"
    ranks.step(what, lambda: Step(None, [equal_facts(what, {"it is there": path.exists()}, ranks)]))
    if path.exists():
        return path
    warn(f"{path}, to resume from, does not exist")
    return None


def _beside(path: Path, ranks: RankGroup) -> Path:
    """Where rank 0 finds room for what is not whole yet."""
    folder = path.parent

    def choose() -> bytes:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.stat().st_dev == folder.parent.stat().st_dev and os.access(folder.parent, os.W_OK):
            return os.fsencode(folder.parent / f".{folder.name}-{path.name}.partial")
        return os.fsencode(folder / f".{path.name}.partial")

    return Path(os.fsdecode(ranks.on_first("fsdp_save_ckpt()", choose)))
