"""ByteDance-Seed/Bagel's FSDP helpers (train/fsdp_utils.py): a second FSDP model with averaged weights, and its
checkpoints of five files. fsdp_ema_update() averages by e.mul_(d).add_(p, alpha=1-d), bit for bit as upstream does."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import CustomPolicy

from shardow import errors
from shardow.base.checks import invalid, unsupported, warn
from shardow.compat._impl import files
from shardow.compat._impl.averaged_copy import AveragedCopy, TrainedCopy
from shardow.compat._impl.swapped_model_proxy import all_ranks
from shardow.distributed.rank_group import RankGroup, Step, equal_facts
from shardow.files.checkpoint import save
from shardow.merging import foreign
from shardow.sharding.local_state import held_by
from shardow.start import fill, meta

__all__ = [
    "CHECKPOINTED_CLASSES", "WRAPPED_CLASSES", "FSDPCheckpoint", "FSDPConfig", "fsdp_ema_setup", "fsdp_ema_update",
    "fsdp_wrapper", "grad_checkpoint_check_fn",
]  # fmt: skip

_KEY = "_shardow_twin"  # of a model's __dict__

#: Classes that become FSDP units, by name: BAGEL's. Add those of another model to it.
WRAPPED_CLASSES = {
    "MLPconnector", "PositionEmbedding", "Qwen2DecoderLayer", "Qwen2MoEDecoderLayer", "Qwen2MoTDecoderLayer",
    "SiglipEncoderLayer", "SiglipVisionTransformer", "TimestepEmbedder",
}  # fmt: skip

#: Classes whose activations are recomputed, by name: BAGEL's.
CHECKPOINTED_CLASSES = {
    "MLPconnector", "Qwen2DecoderLayer", "Qwen2MoEDecoderLayer", "Qwen2MoTDecoderLayer", "SiglipEncoderLayer",
}  # fmt: skip

HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


@dataclass(eq=False)
class FSDPConfig:
    """``sharding_strategy``, ``backward_prefetch``: torch's names. The numbers are HYBRID_SHARD's mesh."""

    sharding_strategy: str
    backward_prefetch: str
    cpu_offload: bool
    num_replicate: int
    num_shard: int = 8


def strategy_of(config: FSDPConfig) -> ShardingStrategy:
    if config.sharding_strategy not in ShardingStrategy.__members__:
        names = ", ".join(ShardingStrategy.__members__)
        raise unsupported(f"sharding_strategy={config.sharding_strategy!r}; FSDP has {names}", KeyError)
    return ShardingStrategy[config.sharding_strategy]


def fsdp_wrapper(original_model: nn.Module, fsdp_config: FSDPConfig, ignored_modules: Iterable[nn.Module] = ()) -> FSDP:
    """Wraps a model in FSDP1 with units of WRAPPED_CLASSES, computing in bfloat16; on CUDA, or on the CPU where there
    is none. Weights on meta get memory without values: try_load_ckpt() brings them."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    mesh = None
    if fsdp_config.sharding_strategy in HYBRID:
        mesh = init_device_mesh(
            device.type, (fsdp_config.num_replicate, fsdp_config.num_shard), mesh_dim_names=("replicate", "shard")
        )
    bf16 = torch.bfloat16
    return FSDP(
        original_model,
        auto_wrap_policy=CustomPolicy(lambda module: _is_one_of(module, WRAPPED_CLASSES)),
        ignored_modules=list(ignored_modules),
        mixed_precision=MixedPrecision(param_dtype=bf16, reduce_dtype=bf16, buffer_dtype=bf16),
        device_id=device,
        sharding_strategy=strategy_of(fsdp_config),
        backward_prefetch=BackwardPrefetch[fsdp_config.backward_prefetch],
        cpu_offload=CPUOffload(offload_params=fsdp_config.cpu_offload),
        device_mesh=mesh,
        param_init_fn=meta.to_empty if any(p.is_meta for p in original_model.parameters()) else None,
    )


def fsdp_ema_setup(ema_model: nn.Module, fsdp_config: FSDPConfig, ignored_modules: Iterable[nn.Module] = ()) -> FSDP:
    """Freezes and shards the model that will hold the averages. Built under shardow.meta_init() it takes no whole copy;
    try_load_ckpt() fills it."""
    for param in ema_model.parameters():
        param.requires_grad = False
    return fsdp_wrapper(ema_model, fsdp_config, ignored_modules)


def grad_checkpoint_check_fn(module: nn.Module) -> bool:
    """Returns True for modules of CHECKPOINTED_CLASSES: ``check_fn`` of torch's apply_activation_checkpointing()."""
    return _is_one_of(module, CHECKPOINTED_CLASSES)


def _is_one_of(module: nn.Module, names: Collection[str]) -> bool:
    return any(cls.__name__ in names for cls in type(module).__mro__)


@torch.no_grad()
def fsdp_ema_update(ema_model: nn.Module, model: nn.Module, decay: float = 0.9999) -> None:
    """Updates, after each optimizer step, the averages of the parameters that ``model`` trains now, and copies
    persistent buffers. Local. NaN and Inf are held.

    Both models are FSDP1, FSDP2 or plain ones, sharded alike. The first call pairs their weights, which ``ema_model``
    remembers while it lives.

    Raises AssertionError and ValueError where they differ in names, shapes or sharding, before anything changes.
    """
    follower = _follower_of(ema_model)
    try:
        averages = follower.bind(ema_model, model)
    except ValueError as error:
        raise invalid(f"fsdp_ema_update(): {error}", AssertionError) from None
    averages.update(decay, 1 - decay)


def _follower_of(ema_model: nn.Module) -> TrainedCopy:
    """Returns the follower that keeps ``ema_model`` at the averages; that of a copy or pickle pairs the models anew."""
    if _KEY not in ema_model.__dict__:
        if valueless := meta.valueless(ema_model):
            some = f"'{min(valueless)}' and {len(valueless) - 1} more averages"
            raise invalid(f"fsdp_ema_update(): {some} have no values yet; call try_load_ckpt() first")
        ema_model.__dict__[_KEY] = TrainedCopy(keeps=False)
    follower: TrainedCopy = ema_model.__dict__[_KEY]
    return follower


# Sinusoids, which the model has for its own resolution: a file does not replace their values.
_FIXED = ("latent_pos_embed.pos_embed", "vit_pos_embed.pos_embed")


class FSDPCheckpoint:
    """Saves and loads ``{ckpt_dir}/{step:07d}/``: ema.safetensors, model.safetensors, optimizer.{i:05d}-of-{n:05d}.pt,
    scheduler.pt, data_status.pt."""

    @staticmethod
    def fsdp_save_ckpt(
        ckpt_dir: str | Path, train_steps: int, model: nn.Module, ema_model: nn.Module | None,
        optimizer: torch.optim.Optimizer, scheduler: Any, data_status: Any, logger: Any, fsdp_config: FSDPConfig,
    ) -> None:  # fmt: skip
        """Saves a step. Collective over all ranks. Each writes its own bytes of the weights and its shard of the
        optimizer's state.

        The directory appears by one rename when it is whole. Until then it lies beside ``ckpt_dir``, where auto_resume
        does not look; inside, where another file system begins at ``ckpt_dir``.
        """
        path = Path(ckpt_dir).resolve() / f"{train_steps:07d}"
        logger.info(f"Saving checkpoint to {path}.")
        ranks = all_ranks()
        shard_name, _, writes = _shard_of(fsdp_config)

        def fill(partial: Path) -> None:
            for name, module in (("ema", ema_model), ("model", model)):
                if module is not None:
                    save(module, partial / f"{name}.safetensors", group=ranks.process_group)
            ranks.agree("fsdp_save_ckpt()", lambda: write_rest(partial))

        def write_rest(partial: Path) -> None:
            if writes:
                files.write(optimizer.state_dict(), partial / shard_name)
            if ranks.rank == 0 and scheduler is not None:
                files.write(scheduler.state_dict(), partial / "scheduler.pt")
            if ranks.rank == 0 and data_status is not None:
                files.write(data_status, partial / "data_status.pt")

        files.publish("fsdp_save_ckpt()", path, ranks, fill)

    @staticmethod
    def try_load_ckpt(
        resume_from: str | Path | None, logger: Any, model: nn.Module, ema_model: nn.Module | None = None,
        resume_from_ema: bool = False, missing_ema: str = "error",
    ) -> tuple[nn.Module, nn.Module | None]:  # fmt: skip
        """Loads weights into ``model`` and ``ema_model``, wrapped or not; of a sharded tensor each rank reads its own
        bytes. Collective.

        Everything that fits by name is loaded, and ``logger`` gets the rest, as in upstream. Tensors of another shape,
        and files of which nothing fits, are refused before anything changes. ``missing_ema``: for a checkpoint without
        ema.safetensors: "error", or "model": the averages begin as the weights of the file that ``model`` is loaded
        from. Where there is no checkpoint, an ``ema_model`` without values (made on meta) begins as ``model``.
        """
        if missing_ema not in ("error", "model"):
            raise invalid(f"missing_ema={missing_ema!r}; 'error', or 'model': the averages begin as the weights")
        ranks = all_ranks()
        folder = _existing(resume_from, ranks)
        if folder is None:
            logger.info("Training from scratch.")
            if ema_model is not None and meta.valueless(ema_model):
                AveragedCopy("mul_add").bind(ema_model, model).copy()
                meta.have_values(ema_model)
            return model, ema_model
        logger.info(f"Loading checkpoint from {folder}.")
        source = folder / ("ema.safetensors" if resume_from_ema else "model.safetensors")
        wanted = [(model, source)]
        if ema_model is not None:
            ema_file = ranks.agree("try_load_ckpt()", lambda: _ema_file(folder, source, missing_ema, logger))
            wanted.append((ema_model, ema_file))
        for check_only in (True, False):
            for module, path in wanted:
                _load(module, path, ranks, logger, check_only)
        return model, ema_model

    @staticmethod
    def try_load_train_state(
        resume_from: str | Path | None, optimizer: torch.optim.Optimizer, scheduler: Any, fsdp_config: FSDPConfig
    ) -> tuple[torch.optim.Optimizer, Any, int, Any]:
        """Returns (optimizer, scheduler, the next step, this rank's data_status), the first two loaded. Collective.
        Everything is read before anything is loaded. Raises FileNotFoundError where the optimizer's state was saved in
        another number of shards, naming both."""
        ranks = all_ranks()
        folder = _existing(resume_from, ranks)
        if folder is None:
            return optimizer, scheduler, 0, None
        name, count, _ = _shard_of(fsdp_config)

        def read() -> tuple[Any, Any, int, Any]:
            step = os.path.basename(os.path.normpath(folder))
            if not step.isdigit():
                raise invalid(f"{folder} is not named after its step, e.g. 0001000; its step is unknown")
            status = foreign.loaded(folder / "data_status.pt") if (folder / "data_status.pt").exists() else []
            schedule = foreign.loaded(folder / "scheduler.pt") if scheduler is not None else None
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
        stored, wanted = ", ".join(report["unexpected"][:5]), ", ".join(names[:5])
        raise invalid(f"try_load_ckpt(): {path} has nothing of this model: it has {stored} ..., the model {wanted} ...")
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
        return foreign.loaded(folder / name)
    counts = sorted({int(path.stem.rpartition("-")[2]) for path in folder.glob("optimizer.*-of-*.pt")})
    stored = f"that of {' and '.join(map(str, counts))} shards" if counts else "none"
    differ = f"this run has {count} shards of the optimizer's state, the checkpoint {stored}"
    way_out = "Resume with as many, or from the weights alone, which fit any number"
    raise errors.make("not_found", f"{folder} has no {name}: {differ}. {way_out}")


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
