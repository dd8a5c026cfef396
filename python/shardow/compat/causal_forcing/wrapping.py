"""How Self-Forcing's trainers start and wrap: FSDP1 with their options."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from shardow.base.checks import invalid

_STRATEGIES = {
    "full": ShardingStrategy.FULL_SHARD,
    "hybrid_full": ShardingStrategy.HYBRID_SHARD,
    "hybrid_zero2": ShardingStrategy._HYBRID_SHARD_ZERO2,
    "no_shard": ShardingStrategy.NO_SHARD,
}
_BF16 = MixedPrecision(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32, cast_forward_inputs=False
)


def fsdp_wrap(
    module: nn.Module, sharding_strategy: str = "full", mixed_precision: bool = False, wrap_strategy: str = "size",
    min_num_params: int = int(5e7), transformer_module: type[nn.Module] | Iterable[type[nn.Module]] | None = None,
    cpu_offload: bool = False, **options: Any,
) -> FullyShardedDataParallel:  # fmt: skip
    """FSDP1 around ``module``; every parameter keeps its name and its own requires_grad.

    Args:
        sharding_strategy: "full", "hybrid_full", "hybrid_zero2" or "no_shard".
        mixed_precision: computes in bfloat16, reduces in float32.
        wrap_strategy: "size": units of at least ``min_num_params`` parameters; "transformer": units that are a
            ``transformer_module``.
        options: further ones of FullyShardedDataParallel, e.g. ``device_mesh`` for "hybrid_full" on a CPU, before those
            above.

    Raises:
        KeyError, ValueError: no such strategy, or no ``transformer_module`` where one is needed.
    """
    if sharding_strategy not in _STRATEGIES:
        raise invalid(
            f"sharding_strategy={sharding_strategy!r}; there are {', '.join(map(repr, _STRATEGIES))}", KeyError
        )
    policy = _policy(wrap_strategy, min_num_params, transformer_module)
    os.environ.setdefault("NCCL_CROSS_NIC", "1")
    device = torch.cuda.current_device() if torch.cuda.is_available() else torch.device("cpu")
    chosen: dict[str, Any] = {
        "auto_wrap_policy": policy,
        "sharding_strategy": _STRATEGIES[sharding_strategy],
        "mixed_precision": _BF16 if mixed_precision else None,
        "device_id": device,
        "limit_all_gathers": True,
        "use_orig_params": True,
        "cpu_offload": CPUOffload(offload_params=cpu_offload),
        "sync_module_states": False,
    }
    return FullyShardedDataParallel(module, **{**chosen, **options})


def _policy(wrap_strategy: str, min_num_params: int, transformer_module: Any) -> Any:
    if wrap_strategy == "size":
        return partial(size_based_auto_wrap_policy, min_num_params=min_num_params)
    if wrap_strategy != "transformer":
        raise invalid(f"wrap_strategy={wrap_strategy!r}; it must be 'size' or 'transformer'")
    if not transformer_module:
        raise invalid("wrap_strategy='transformer' needs transformer_module=, the class of the blocks, or several")
    classes = {transformer_module} if isinstance(transformer_module, type) else set(transformer_module)
    return partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)


def barrier() -> None:
    """Of all ranks, where there are several."""
    if dist.is_initialized():
        dist.barrier()


def launch_distributed_job(backend: str = "nccl") -> None:
    """The process group that torchrun's variables tell of, and this process's CUDA device where there are any."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    dist.init_process_group(
        backend,
        init_method=f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(minutes=30),
    )
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
