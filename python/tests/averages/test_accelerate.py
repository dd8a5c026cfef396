"""accelerate's save_state() with averages: registered in parts, it keeps rank 0's alone, of which pickling warns.

Also hooks that keep every rank's, and what may be registered.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist

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


def registered(kind: str, held: bool, folder: str) -> list[str]:
    ema = averaged(kind, 3.0)
    with an_accelerator() as accelerator, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert accelerator.num_processes == dist.get_world_size()
        accelerator.register_for_checkpointing(Holder(ema) if held else ema)
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
    return [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]


@pytest.mark.parametrize(("kind", "held"), [("fsdp2", False), ("ddp", False), ("fsdp2", True)])
def test_registered_averages_in_parts_warn_on_the_rank_that_pickles_them(kind: str, held: bool, tmp_path: Path) -> None:
    zero, one = ranks.run(2, registered, kind, held, str(tmp_path))
    text = "this rank's part of sharded averages, not the whole: pickled on rank 0 alone the other parts are lost"
    assert any(text in message for message in zero)
    assert not any(text in message for message in one)
    assert "Use EMA.save()" in next(message for message in zero if text in message)


def by_hooks(folder: str) -> bool:
    """As docs/companions.md says."""
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


def test_hooks_save_and_load_every_rank_s_part(tmp_path: Path) -> None:
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
