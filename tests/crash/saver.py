"""Saves one version after the other to the same path, on two ranks of this process, until it is killed.

Without torch: it starts in a tenth of a second.

saver.py PATH FILES: every value of version i is i; FILES 1 is one file, more is a directory of several.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "python" / "tests"))
from core_modules import HOOKS

HOOKS.install()
from shardow import _core  # noqa: E402

ROWS, COLUMNS, TENSORS = 64, 4096, 6


def rank(group: _core.Group, me: int, path: str, limit: int) -> None:
    region = _core.Region.grid([ROWS, COLUMNS], [[(me * ROWS // 2, (me + 1) * ROWS // 2)], [(0, COLUMNS)]])
    memory = [np.empty(region.size, dtype=np.float32) for _ in range(TENSORS)]
    views = [_core.TensorView(f"t{i}", "F32", region, one.ctypes.data) for i, one in enumerate(memory)]
    for version in range(1, 1_000_000):
        for one in memory:
            one.fill(version)
        file = _core.SaveFile("", views, {"version": str(version)})
        save = _core.Save(group, lambda file=file: (_core.SaveRequest([file], path, max_shard_size=limit), None, []))
        if version % 2:  # as async_save() does
            staging = np.empty(save.staging_bytes, dtype=np.uint8)
            save.stage(staging.ctypes.data, staging.nbytes)
        save.write()
        if me == 0:
            print(version, flush=True)


def main() -> None:
    path, files = sys.argv[1], int(sys.argv[2])
    groups = _core.hooks.threads(2)
    limit = 0 if files == 1 else ROWS * COLUMNS * 4 * TENSORS // files + 1
    threads = [threading.Thread(target=rank, args=(groups[me], me, path, limit)) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


main()
