"""How BAGEL's models are sharded: FSDP1's options by torch's names."""

from __future__ import annotations

from torch.distributed.fsdp import ShardingStrategy

from shardow.base.checks import unsupported

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
