"""A rank that ends right after a call, while the store is still asked to erase its keys; for test_exit.py."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardow.distributed import store_group
from shardow.distributed.rank_group import RankGroup


class SlowToErase:
    def __init__(self, store: Any, folder: str) -> None:
        self._store, self._folder = store, folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def delete_key(self, key: str) -> bool:
        time.sleep(0.3)
        erased: bool = self._store.delete_key(key)
        Path(self._folder, key.replace("/", "-")).touch()
        return erased


def main(_: str, folder: str) -> None:
    dist.init_process_group("gloo")
    connected = store_group.connected
    store_group.connected = lambda prefix: SlowToErase(connected(prefix), folder)
    for _ in range(2):
        RankGroup(dist.group.WORLD, 60).agree("call()", lambda: None)
    dist.barrier()


main(*sys.argv[1:])
