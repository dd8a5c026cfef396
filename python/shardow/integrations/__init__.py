"""Shardow inside training frameworks: one module for each, over EMA's own verbs; docs/integrations.md tells how they
are used.

Nothing is imported until one of them is. They use their frameworks' checkpoints, and keep the averages in them.

May import: ema, averaging, sharding, schedules, base, errors.
"""

__all__ = ["TESTED_WITH", "accelerate", "deepspeed", "lightning", "megatron", "torchtitan", "transformers", "trl"]

#: Versions that the tests ran with, by package; others may do.
TESTED_WITH = {
    "transformers": "5.23.0", "accelerate": "1.15.0", "deepspeed": "0.19.8", "lightning": "2.6.6",
    "megatron-core": "0.16.0", "torchtitan": "0.3.0", "trl": "1.16.0",
}  # fmt: skip


def __dir__() -> list[str]:
    return __all__
