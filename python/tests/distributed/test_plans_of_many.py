"""What ranks tell each other when a save is planned is little; a next save of the same model has its values of then."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from emulated import Emulated, emulated, on_all

import shardow
from shardow import _core

TENSORS, SIZE = 20_000, 8


def rows(rank: int, size: int, tensors: int, data: int = 64) -> list[_core.TensorView]:
    """Of each of ``size`` ranks, of tensors of three shapes."""
    regions = [
        _core.Region.grid([n, 8], [[(n * rank // size, n * (rank + 1) // size)], [(0, 8)]]) for n in (400, 80, 1200)
    ]
    return [_core.TensorView(f"layers.{i}.weight", "F32", regions[i % 3], data) for i in range(tensors)]


def test_a_plan_of_many_tensors_is_told_in_kilobytes(tmp_path: Path) -> None:
    def plan(group: Emulated) -> None:
        group.begin("save()", 60.0)
        group.forget()
        file = _core.SaveFile("", rows(group.rank, SIZE, TENSORS))
        _core.Save(group, lambda: (_core.SaveRequest([file], str(tmp_path / "a.safetensors")), None, []), 60.0)
        sent.append(sum(store.sent for store in group.stores))

    sent: list[int] = []
    with emulated(SIZE) as groups:
        assert on_all(groups, plan)[0] == [None] * SIZE
    assert max(sent) < 4096


def test_a_next_save_of_the_same_model_writes_the_values_of_then(tmp_path: Path) -> None:
    size = 4
    memory = [np.full(400 * 8, rank, dtype=np.float32) for rank in range(size)]

    def save(group: Emulated, tensors: int = 30) -> None:
        group.begin("save()", 60.0)
        files = [_core.SaveFile("", rows(group.rank, size, tensors, memory[group.rank].ctypes.data))]
        _core.Save(group, lambda: (_core.SaveRequest(files, str(tmp_path / "a.safetensors")), None, []), 60.0).write()

    with emulated(size) as groups:
        for tensors in (30, 30, 31, 30):
            for one in memory:
                one += 1
            assert on_all(groups, lambda group, tensors=tensors: save(group, tensors))[0] == [None] * size
            with shardow.open(tmp_path / "a.safetensors") as found:
                assert len(found.keys()) == tensors
                weight = found["layers.2.weight"]
            for rank, one in enumerate(memory):
                assert (weight[1200 * rank // size : 1200 * (rank + 1) // size] == one[0]).all()
