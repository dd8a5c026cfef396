"""ranks.run() in processes that have the frameworks imported when they begin, which costs each of them seconds: one
process does it once, and forks them. ``fresh``: in processes of this call alone."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any
from unittest.mock import patch

import ranks
from ranks import RankError

__all__ = ["RankError", "fresh", "run"]

_server = forkserver.ForkServer()  # the other ranks' knows torch alone
_server.set_forkserver_preload(
    ["shardow", "lightning.pytorch", "transformers.trainer", "accelerate", "trl", "deepspeed"]
)


class _Process(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        ours = patch.object(forkserver, "connect_to_new_process", _server.connect_to_new_process)
        with ours, patch.dict(os.environ, DS_ACCELERATOR="cpu"):  # asked for when DeepSpeed is imported
            return ForkServerProcess._Popen(process_obj)


class _Context(ForkServerContext):
    Process = _Process


_pool = ranks.Pool(_Context())
run = _pool.run
atexit.register(_pool.stop)


def fresh(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0, may_die: bool = False) -> list[Any]:
    pool = ranks.Pool(_Context())
    try:
        return pool.run(world, fn, *args, timeout=timeout, may_die=may_die)
    finally:
        pool.stop()
