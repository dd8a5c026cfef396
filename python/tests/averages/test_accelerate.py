"""accelerate's save_state() with averages: registered, it would keep rank 0's parts alone, and says so on all ranks.

Also the way out that it names, and what it may keep.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from outcomes import Outcome, outcome

import shardow

accelerate = pytest.importorskip("accelerate")


@contextmanager
def an_accelerator(**environment: str) -> Iterator[Any]:
    before, rank = dict(os.environ), str(dist.get_rank())
    os.environ.update({"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(dist.get_world_size())})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "ACCELERATE_USE_CPU": "true", **environment})
    try:
        yield accelerate.Accelerator()
    finally:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
        os.environ.clear()
        os.environ.update(before)


def averaged(kind: str, value: float, **options: Any) -> shardow.EMA:
    model = models.build(kind, dist.get_world_size())
    ema = shardow.EMA(model, 0.5, **options)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(value)
    ema.update()
    return ema


class Holder:
    """Of the user's own, with an EMA in its state."""

    def __init__(self, ema: shardow.EMA) -> None:
        self.ema = ema

    def state_dict(self) -> dict[str, Any]:
        return {"ema": self.ema.state_dict(), "more": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ema.load_state_dict(state["ema"])


def registered(kind: str, held: bool, folder: str) -> Outcome:
    ema = averaged(kind, 3.0)
    with an_accelerator() as accelerator:
        assert accelerator.num_processes == dist.get_world_size()
        accelerator.register_for_checkpointing(Holder(ema) if held else ema)
        told = outcome(lambda: accelerator.save_state(folder))
        accelerator.wait_for_everyone()
    return told


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_registered_averages_in_parts_are_refused_on_all_ranks_before_they_are_written(
    kind: str, tmp_path: Path
) -> None:
    for name, message, _ in ranks.run(2, registered, kind, False, str(tmp_path)):
        assert name == "UnsupportedError"
        assert "the other parts would be lost" in message
        assert "register_save_state_pre_hook(lambda models, weights, folder: ema.save(" in message
    assert not list(tmp_path.glob("custom_checkpoint*"))


def test_in_a_state_of_the_users_own_they_are_refused_where_they_are_pickled(tmp_path: Path) -> None:
    zero, one = ranks.run(2, registered, "fsdp2", True, str(tmp_path))
    assert (zero[0], one[0]) == ("UnsupportedError", "none")
    assert "the other parts would be lost" in zero[1]


def by_hooks(folder: str) -> bool:
    """As the error says."""
    ema = averaged("fsdp2", 3.0)
    saved = ema.full_state_dict()
    with an_accelerator() as accelerator:
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: ema.save(f"{folder}/ema.safetensors"))
        accelerator.register_load_state_pre_hook(lambda models, folder: ema.load(f"{folder}/ema.safetensors"))
        accelerator.save_state(folder)
        ema.reset()
        accelerator.load_state(folder)
    found = ema.full_state_dict()
    return (
        ema.step == 1 and found.keys() == saved.keys() and all(torch.equal(found[name], saved[name]) for name in found)
    )


def test_the_way_out_saves_and_loads_every_rank_s_part(tmp_path: Path) -> None:
    assert ranks.run(2, by_hooks, str(tmp_path)) == [True, True]


def whole(folder: str) -> bool:
    """Every rank has all averages: one rank's are everybody's."""
    ema = averaged("ddp", 3.0, replicas="copy")
    saved = ema.full_state_dict()
    with an_accelerator() as accelerator:
        accelerator.register_for_checkpointing(ema)
        accelerator.save_state(folder)
        ema.reset()
        accelerator.wait_for_everyone()
        accelerator.load_state(folder)
    found = ema.full_state_dict()
    return ema.step == 1 and all(torch.equal(found[name], saved[name]) for name in saved)


def test_averages_that_every_rank_has_whole_are_registered_as_anything_else(tmp_path: Path) -> None:
    assert ranks.run(2, whole, str(tmp_path)) == [True, True]


def one_rank_a_node(folder: str) -> int:
    ema, node = averaged("fsdp2", 3.0), f"{folder}/node{dist.get_rank()}"
    os.makedirs(node)
    with an_accelerator(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1"):
        with pytest.warns(UserWarning, match="this rank's part"):
            accelerate.checkpointing.save_custom_state(ema, node, save_on_each_node=True)
        ema.reset()
        accelerate.checkpointing.load_custom_state(ema, node)
    return ema.step


def test_nodes_of_one_rank_that_each_keep_their_own_are_warned_as_ever(tmp_path: Path) -> None:
    assert ranks.run(2, one_rank_a_node, str(tmp_path)) == [1, 1]
