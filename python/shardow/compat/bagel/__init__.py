"""ByteDance-Seed/Bagel's FSDP helpers (train/fsdp_utils.py): a second FSDP model with averaged weights, and its
checkpoints of five files. fsdp_ema_update() averages by e.mul_(d).add_(p, alpha=1-d), bit for bit as the origin."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from shardow.base.checks import invalid
from shardow.compat._impl.averaged_copy import TrainedCopy
from shardow.compat.bagel.checkpoint import HYBRID, FSDPCheckpoint, FSDPConfig, strategy_of
from shardow.start import meta

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


def fsdp_wrapper(
    original_model: nn.Module, fsdp_config: FSDPConfig, ignored_modules: Iterable[nn.Module] = ()
) -> FullyShardedDataParallel:
    """FSDP1 with units of WRAPPED_CLASSES, computing in bfloat16; on CUDA, or on the CPU where there is none. What is
    on meta gets memory without values: try_load_ckpt() brings them."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    mesh = None
    if fsdp_config.sharding_strategy in HYBRID:
        mesh = init_device_mesh(
            device.type, (fsdp_config.num_replicate, fsdp_config.num_shard), mesh_dim_names=("replicate", "shard")
        )
    low = torch.bfloat16
    return FullyShardedDataParallel(
        original_model,
        auto_wrap_policy=functools.partial(
            lambda_auto_wrap_policy, lambda_fn=lambda module: _is_one_of(module, WRAPPED_CLASSES)
        ),
        ignored_modules=list(ignored_modules),
        mixed_precision=MixedPrecision(param_dtype=low, reduce_dtype=low, buffer_dtype=low),
        device_id=device,
        sharding_strategy=strategy_of(fsdp_config),
        backward_prefetch=BackwardPrefetch[fsdp_config.backward_prefetch],
        cpu_offload=CPUOffload(offload_params=fsdp_config.cpu_offload),
        device_mesh=mesh,
        param_init_fn=meta.to_empty if any(p.is_meta for p in original_model.parameters()) else None,
    )


def fsdp_ema_setup(
    ema_model: nn.Module, fsdp_config: FSDPConfig, ignored_modules: Iterable[nn.Module] = ()
) -> FullyShardedDataParallel:
    """The model that will hold the averages, frozen and sharded. Built under shardow.meta_init() it takes no whole
    copy; try_load_ckpt() fills it."""
    for param in ema_model.parameters():
        param.requires_grad = False
    return fsdp_wrapper(ema_model, fsdp_config, ignored_modules)


def grad_checkpoint_check_fn(module: nn.Module) -> bool:
    """``check_fn`` of torch's apply_activation_checkpointing(): True for modules of CHECKPOINTED_CLASSES."""
    return _is_one_of(module, CHECKPOINTED_CLASSES)


def _is_one_of(module: nn.Module, names: Collection[str]) -> bool:
    return any(cls.__name__ in names for cls in type(module).__mro__)


@torch.no_grad()
def fsdp_ema_update(ema_model: nn.Module, model: nn.Module, decay: float = 0.9999) -> None:
    """After each optimizer step: the averages of what ``model`` trains now; persistent buffers are copied. Local. NaN
    and Inf are held.

    Both models are FSDP1, FSDP2 or plain ones, sharded alike. The first call pairs their weights, which ``ema_model``
    remembers while it lives.

    Raises AssertionError and ValueError where they differ in names, shapes or sharding, before anything changes.
    """
    twin = _twin_of(ema_model)
    try:
        twin.bind(model)
    except ValueError as error:
        raise invalid(f"fsdp_ema_update(): {error}", AssertionError) from None
    twin.update(model, decay, 1 - decay)


class _Kept:
    """A model's twin in its __dict__; no part of its copies and pickles."""

    def __init__(self, twin: TrainedCopy | None = None) -> None:
        self.twin = twin

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def _twin_of(ema_model: nn.Module) -> TrainedCopy:
    kept: _Kept = ema_model.__dict__.setdefault(_KEY, _Kept())
    if kept.twin is None:
        if valueless := meta.valueless(ema_model):
            some = f"'{min(valueless)}' and {len(valueless) - 1} more averages"
            raise invalid(f"fsdp_ema_update(): {some} have no values yet; call try_load_ckpt() first")
        kept.twin = TrainedCopy(ema_model, keeps=False)
    return kept.twin


__all__ = [
    "CHECKPOINTED_CLASSES", "WRAPPED_CLASSES", "FSDPCheckpoint", "FSDPConfig", "fsdp_ema_setup", "fsdp_ema_update",
    "fsdp_wrapper", "grad_checkpoint_check_fn",
]  # fmt: skip
