"""What a start from a file costs between ranks: each round is a wait for the slowest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import models
import ranks
import torch.distributed as dist
from outcomes import outcome

import shardow
from shardow.distributed.store_group import store_group


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


def from_others_paths(folder: Path) -> list[str]:
    """Each rank loads what another one saved."""
    model = models.build("fsdp2", dist.get_world_size())
    ema = shardow.EMA(model, 0.9)
    for rank in range(dist.get_world_size()):
        shardow.save(model, folder / f"{rank}.safetensors")
        ema.save(folder / f"ema-{rank}.safetensors")
        shardow.Checkpoints(folder / f"run-{rank}").save(1, model)
    rank = dist.get_rank()
    calls: list[Callable[[], object]] = [
        lambda: shardow.load(model, folder / f"{rank}.safetensors"),
        lambda: shardow.load(dict(model.state_dict()), folder / f"{rank}.safetensors"),
        lambda: ema.load(folder / f"ema-{rank}.safetensors"),
        lambda: shardow.Checkpoints(folder / f"run-{rank}").restore(model),
    ]
    return [outcome(call)[1] for call in calls]


def test_ranks_that_load_from_other_paths_all_raise_and_say_which(tmp_path: Path) -> None:
    for messages in ranks.run(2, from_others_paths, tmp_path):
        for message, name in zip(
            messages, ["0.safetensors", "0.safetensors", "ema-0.safetensors", "run-0"], strict=True
        ):
            assert f"{tmp_path / name}" in message, message
            assert f"{tmp_path / name.replace('0', '1')}" in message, message
