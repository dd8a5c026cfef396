"""kill -9 at random instants of saves, and of merges, that replace one another.

The path always has one version, whole, and the next save clears away what the dead one left.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from versions import listed

import shardow

SAVER, MERGER = (Path(__file__).with_name(name) for name in ("saver.py", "merger.py"))
KILLS = 400 if os.environ.get("SHARDOW_ALL") else 6


def kill_after(program: Path, arguments: list[str], seconds: float) -> int:
    """The last version that was reported as saved before the kill, so long after the first one."""
    process = subprocess.Popen([sys.executable, program, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.readline()
    time.sleep(seconds)
    process.kill()
    reported, _ = process.communicate(timeout=30)
    return max(int(line) for line in (first + reported).split("\n") if line.isdigit())


def version_at(path: Path) -> int:
    """Of the checkpoint, after looking at every value, through safetensors and through ours."""
    names = [f"t{i}" for i in range(6)]
    target = {name: torch.zeros(64, 4096) for name in names}
    version = int(shardow.load(target, path)["metadata"]["version"])
    assert all((tensor == version).all() for tensor in target.values())
    for file in [path] if path.is_file() else listed(path):
        with safe_open(file, "pt") as theirs:
            assert theirs.metadata()["version"] == str(version)
            assert all((theirs.get_tensor(name) == version).all() for name in theirs.keys())  # noqa: SIM118
    return version


@pytest.mark.timeout(60 + 3 * KILLS)
@pytest.mark.parametrize("files", [1, 3])
def test_the_old_version_or_the_new_one_is_there_whole(files: int, tmp_path: Path) -> None:
    path = tmp_path / ("model.safetensors" if files == 1 else "model")
    rng, unfinished = random.Random(files), 0
    shardow.save({f"t{i}": torch.zeros(64, 4096) for i in range(6)}, path, metadata={"version": "0"})
    for _ in range(KILLS):
        reported = kill_after(SAVER, [str(path), str(files)], rng.uniform(0.0, 0.4))
        unfinished += any(entry.name.endswith(".tmp") for entry in tmp_path.iterdir())
        found = version_at(path)
        assert found in (reported, reported + 1)
    assert unfinished > 0  # some kill fell into a save
    shardow.save({f"t{i}": torch.zeros(64, 4096) for i in range(6)}, path, metadata={"version": "0"})
    assert version_at(path) == 0
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    if files > 1:
        assert [entry.name for entry in path.iterdir()] == ["model.safetensors"]  # as the last save has it


@pytest.mark.timeout(60 + 3 * KILLS)
def test_a_merge_that_is_killed_leaves_one_version_whole(tmp_path: Path) -> None:
    ones, out = tmp_path / "ones.safetensors", tmp_path / "out" / "model.safetensors"
    out.parent.mkdir()
    shardow.save({f"t{i}": torch.ones(64, 4096) for i in range(6)}, ones)
    rng, unfinished = random.Random(7), 0
    for _ in range(KILLS):
        reported = kill_after(MERGER, [str(ones), str(out)], rng.uniform(0.0, 0.4))
        unfinished += any(entry.name.endswith(".tmp") for entry in out.parent.iterdir())
        assert version_at(out) in (reported, reported + 1)
    assert unfinished > 0  # some kill fell into a merge
    shardow.merge([ones, ones], out, weights=[4, -1], metadata={"version": "3"})
    assert version_at(out) == 3
    assert [entry.name for entry in out.parent.iterdir()] == [out.name]
