"""ranks.run() in processes that have the frameworks imported when they begin, which costs each of them seconds: one
process does it once, and forks them. ``fresh``: in processes of this call alone."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

import ranks
from ranks import RankError

__all__ = ["RankError", "fresh", "run"]

_server = ranks.Server(
    ["shardow", "lightning.pytorch", "transformers.trainer", "accelerate", "trl", "deepspeed"],
    DS_ACCELERATOR="cpu",  # asked for when DeepSpeed is imported
)
_pool = ranks.Pool(_server)
run = _pool.run
atexit.register(_pool.stop)


def fresh(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0, may_die: bool = False) -> list[Any]:
    pool = ranks.Pool(_server)
    try:
        return pool.run(world, fn, *args, timeout=timeout, may_die=may_die)
    finally:
        pool.stop()
