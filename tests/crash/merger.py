"""Writes one merge after the other to the same path, on two ranks of this process, until it is killed.

Without torch: it starts in a tenth of a second.

merger.py INPUT OUT: every value of version i is i times the input's.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "python" / "tests"))
from core_modules import HOOKS

HOOKS.install()
from shardow import _core  # noqa: E402


def rank(group: _core.Group, me: int, source: _core.Checkpoint, out: str) -> None:
    for version in range(1, 1_000_000):
        inputs = [_core.MergeInput("a", source, version + 1.0), _core.MergeInput("b", source, -1.0)]
        _core.merge(group, inputs, out, metadata={"version": str(version)})
        if me == 0:
            print(version, flush=True)


def main() -> None:
    source = _core.Checkpoint.open(sys.argv[1])
    threads = [
        threading.Thread(target=rank, args=(group, me, source, sys.argv[2]))
        for me, group in enumerate(_core.hooks.threads(2))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


main()
