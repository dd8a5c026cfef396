"""What a start from a file costs between ranks: each round is a wait for the slowest."""

from __future__ import annotations

from pathlib import Path

import models
import ranks
import torch.distributed as dist

import shardow
from shardow.ranks.store_group import store_group


def counted(path: str) -> dict[str, int]:
    world = dist.get_world_size()
    model = models.build("fsdp2", world)
    shardow.save(model, path)
    group = store_group(dist.group.WORLD)  # type: ignore[arg-type]
    rounds = {}

    def count(what: str, before: int) -> None:
        rounds[what] = group.rounds - before

    before = group.rounds
    shardow.load(dict(model.state_dict()), path)
    count("a mapping", before)
    before = group.rounds
    shardow.load(model, path)
    count("a module", before)
    before = group.rounds
    shardow.load(model, path, progress=lambda done, total: None)
    count("with progress", before)
    return rounds


def test_loads_and_starts_from_a_file_take_few_rounds(tmp_path: Path) -> None:
    few = {"a mapping": 3, "a module": 3, "with progress": 4}
    assert ranks.run(3, counted, str(tmp_path / "a.safetensors")) == [few] * 3
