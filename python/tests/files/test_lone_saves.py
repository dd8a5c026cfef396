"""Saves of some of a job's ranks to one path, one after another: parts of one model do not replace each other there.

What replaces itself does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from outcomes import Outcome, outcome
from store_host import host, stop
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardow
from shardow.distributed import store_group

__all__ = ["host"]

DEADLINE = 4.0


def stage(number: int, width: int = 3) -> nn.Module:
    """Of a pipeline, under the names of the whole model."""
    torch.manual_seed(number)
    model = nn.Module()
    model.add_module(f"layer{number}", nn.Linear(4, width))
    return model


def names_at(path: str) -> list[str]:
    with shardow.open(path) as found:
        return sorted(found)


def in_turn(save: Callable[[], Any]) -> Outcome:
    """Each rank when those before it are done."""
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank():
            told = outcome(save)
        dist.barrier()
    return told


WAYS: dict[str, Callable[[nn.Module, str], Any]] = {
    "save": shardow.save,
    "save of a mapping": lambda model, path: shardow.save(model.state_dict(), path),
    "async_save": lambda model, path: shardow.async_save(model, path).wait(),
    "EMA.save": lambda model, path: shardow.EMA(model, 0.5).save(path),
    "EMA.save of several": lambda model, path: shardow.EMA(model, [0.5, 0.9]).save(path),
    "EMA.async_save": lambda model, path: shardow.EMA(model, 0.5).async_save(path).wait(),
    "EMA.export": lambda model, path: shardow.EMA(model, 0.5).export(path),
}


def stages(folder: str, way: str) -> list[Outcome]:
    paths = [f"{folder}/model"] + ([f"{folder}/model.safetensors"] if "several" not in way else [])
    return [in_turn(lambda path=path: WAYS[way](stage(dist.get_rank()), path)) for path in paths]


@pytest.mark.parametrize("way", WAYS)
def test_a_second_stage_is_refused_at_the_path_of_the_first_whatever_saves(way: str, tmp_path: Path) -> None:
    first, second = ranks.run(2, stages, str(tmp_path), way)
    assert {kind for kind, _, _ in first} == {"none"}
    for kind, message, _ in second:
        assert kind == "InvalidArgumentError"
        assert f"{tmp_path}/model" in message
        assert re.search(r"'layer0\.bias' and \d more of rank 0", message)
        assert re.search(r"'layer1\.bias' and \d more of rank 1", message)
        assert "a path of its own" in message
    for file in tmp_path.rglob("*.safetensors"):
        assert names_at(str(file)) == ["layer0.bias", "layer0.weight"]


def at_once(path: str) -> tuple[str, str]:
    """Directories that do not exist yet, and a link to one."""
    rank = dist.get_rank()
    dist.barrier()
    told = [
        outcome(lambda where=where: shardow.save(stage(rank), f"{path}/{where}"))[0]
        for where in ("new/er/model", f"link{rank}/model")
    ]
    return told[0], told[1]


def test_of_stages_that_save_at_once_one_is_refused_also_through_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    for rank in range(3):
        (tmp_path / f"link{rank}").symlink_to("real")
    told = ranks.run(3, at_once, str(tmp_path))
    for kinds in zip(*told, strict=True):
        assert sorted(kinds) == ["InvalidArgumentError", "InvalidArgumentError", "none"]
    assert len(names_at(str(tmp_path / "real" / "model"))) == 2


def groups_of_two(path: str) -> Outcome:
    """Each stage is of two ranks, which share a DDP model."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DistributedDataParallel(stage(rank // 2), process_group=groups[rank // 2])
    if rank < 2:
        shardow.save(model, path)
    dist.barrier()
    return outcome(lambda: shardow.save(model, path, timeout=20)) if rank > 1 else ("none", "", 0.0)


def test_a_stage_of_several_ranks_is_refused_on_all_of_them(tmp_path: Path) -> None:
    *_, two, three = ranks.run(4, groups_of_two, str(tmp_path / "model"))
    for kind, message, seconds in (two, three):
        assert kind == "InvalidArgumentError"
        assert "'layer0.bias' and 1 more of ranks 0, 1" in message
        assert "'layer1.bias' and 1 more of ranks 2, 3" in message
        assert seconds < 15
    assert names_at(str(tmp_path / "model")) == ["layer0.bias", "layer0.weight"]


def legitimate(path: str) -> None:
    rank = dist.get_rank()

    def by(saver: int, content: int, where: str = path) -> None:
        if rank == saver:
            shardow.save(stage(content), where)
        dist.barrier()

    for content in (0, 1, 1):  # the same rank again, whatever it saves
        by(0, content)
    for saver in (1, 2, 0):  # the same of all ranks, as with ddp.module
        by(saver, 1)
    for saver in (2, 0, 1):  # who have shared it before, with something new
        by(saver, 2)
    shardow.save(stage(3), path, group=dist.group.WORLD)  # all together
    strangers = [f"{path}-{turn}" for turn in range(3)]  # to ranks that have shared nothing there
    by(0, 4, strangers[0])
    shardow.save(stage(3), strangers[0], group=dist.group.WORLD)
    by(1, 6, strangers[0])  # what was rank 0's is not there any more
    for where, gone in zip(
        strangers[1:], (shutil.rmtree, lambda where: os.rename(where, f"{where}-moved")), strict=True
    ):
        for saver in (0, 1, 2):
            by(saver, 5 + saver, where)
            if rank == 0:
                gone(where)
                shutil.rmtree(f"{where}-moved", ignore_errors=True)
            dist.barrier()
    if rank == 1:
        shardow.EMA(stage(7), [0.5, 0.9]).save(path)  # beside a model
    dist.barrier()
    pair = dist.new_group([0, 1])
    if rank < 2:
        shardow.save(stage(8), path, group=pair)  # who saved before takes part
    dist.barrier()
    assert names_at(f"{path}/model.safetensors") == ["layer8.bias", "layer8.weight"]
    assert names_at(f"{path}/ema-0.5.safetensors") == ["layer7.bias", "layer7.weight"]


def test_what_replaces_itself_is_not_refused(tmp_path: Path) -> None:
    ranks.run(3, legitimate, str(tmp_path / "model"))


def test_another_job_knows_nothing_of_the_last_ones_saves(tmp_path: Path) -> None:
    for turn in (0, 1):
        assert [told[0] for told in ranks.run(2, one_saves, str(tmp_path / "model"), turn)] == ["none", "none"]


def one_saves(path: str, rank: int) -> Outcome:
    return outcome(lambda: shardow.save(stage(rank), path)) if rank == dist.get_rank() else ("none", "", 0.0)


def one_after_a_failure(path: str) -> tuple[Outcome, Outcome]:
    """Rank 0 has saved at one path and at another not; then it fails at both. Then rank 1 tries."""
    rank, old, new = dist.get_rank(), f"{path}/old", f"{path}/new"

    def fail(done: int, total: int) -> None:
        raise RuntimeError("as asked")

    if rank == 0:
        shardow.save(stage(0), old)
        for where in (old, new):
            with pytest.raises(RuntimeError, match="as asked"):
                shardow.save(stage(0), where, progress=fail)
    dist.barrier()
    nothing = ("none", "", 0.0)
    return (one_saves(old, 1), one_saves(new, 1)) if rank else (nothing, nothing)


def test_a_save_that_failed_is_in_nobodys_way_and_guards_what_was_there(tmp_path: Path) -> None:
    _, (old, new) = ranks.run(2, one_after_a_failure, str(tmp_path))
    assert (old[0], new[0]) == ("InvalidArgumentError", "none")
    assert names_at(str(tmp_path / "old")) == ["layer0.bias", "layer0.weight"]
    assert names_at(str(tmp_path / "new")) == ["layer1.bias", "layer1.weight"]


def while_it_is_written(path: str) -> Outcome:
    """Rank 0's save goes on in the background, over an older one of its own, until rank 1 has tried."""
    goes_on, told = threading.Event(), ("none", "", 0.0)
    if dist.get_rank() == 0:
        shardow.save(stage(0), path)
        handle = shardow.async_save(stage(0, 5), path, progress=lambda *_: goes_on.wait(60))
    dist.barrier()
    if dist.get_rank() == 1:
        told = outcome(lambda: shardow.save(stage(1), path))
    dist.barrier()
    goes_on.set()
    if dist.get_rank() == 0:
        handle.wait()
    dist.barrier()
    return outcome(lambda: shardow.save(stage(1), path)) if dist.get_rank() else told


def test_a_save_in_the_background_has_claimed_its_path_when_it_begins(tmp_path: Path) -> None:
    assert ranks.run(2, while_it_is_written, str(tmp_path / "model"))[1][0] == "InvalidArgumentError"
    assert names_at(str(tmp_path / "model")) == ["layer0.bias", "layer0.weight"]


def without_an_answer(pid: int, port: int, path: str, known: bool) -> tuple[list[str], float]:
    """Rank 0 saves while the store's host is stopped. ``known``: the job's id was asked for before."""
    if dist.get_rank():
        return [], 0.0
    own = store_group._connection
    store_group._connection = lambda: dist.TCPStore("127.0.0.1", port, is_master=False)
    try:
        if known:
            shardow.save(stage(0), f"{path}-before")
        stop(pid)
        began = time.monotonic()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            shardow.save(stage(0), path, timeout=DEADLINE)
        return [f"{one.category.__name__} {one.filename}: {one.message}" for one in said], time.monotonic() - began
    finally:
        os.kill(pid, signal.SIGCONT)
        store_group._connection = own


@pytest.mark.parametrize("known", [True, False])
def test_a_store_that_does_not_answer_delays_a_lone_save_no_longer_than_its_timeout(
    known: bool, host: tuple[int, int], tmp_path: Path
) -> None:
    said, seconds = ranks.run(2, without_an_answer, *host, str(tmp_path / "model"), known)[0]
    told = f"RuntimeWarning {__file__}: {tmp_path}/model: the job's store did not answer within 2 s"
    assert [one[: len(told)] for one in said] == ([] if known else [told])
    assert seconds < DEADLINE + 1
    assert names_at(str(tmp_path / "model")) == ["layer0.bias", "layer0.weight"]


def groups_at_once(path: str) -> list[str]:
    """Two stages of two ranks each, to a path where nothing is; then all ranks, each alone, with one content."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DistributedDataParallel(stage(rank // 2), process_group=groups[rank // 2])
    dist.barrier()
    told = [outcome(lambda: shardow.save(model, path))[0]]
    told.append(outcome(lambda: shardow.async_save(model, f"{path}-later").wait())[0])
    dist.barrier()
    told.append(outcome(lambda: shardow.save(stage(5), f"{path}-copies"))[0])
    dist.barrier()
    told.append(in_turn(lambda: shardow.save(stage(6), f"{path}-copies"))[0])  # they have shared it
    return told


def test_of_groups_that_save_at_once_one_is_refused_on_all_its_ranks_and_copies_are_not(tmp_path: Path) -> None:
    told = ranks.run(4, groups_at_once, str(tmp_path / "model"))
    for turn in (0, 1):
        assert [one[turn] for one in told[::2]] == [one[turn] for one in told[1::2]]
        assert sorted(one[turn] for one in told[::2]) == ["InvalidArgumentError", "none"]
    assert {kind for one in told for kind in one[2:]} == {"none"}
    assert names_at(str(tmp_path / "model-copies")) == ["layer6.bias", "layer6.weight"]


def claims(path: str) -> list[bool]:
    """Which saves' files say in their headers who saved them: by one rank, by all."""
    shardow.save(stage(dist.get_rank()), f"{path}-{dist.get_rank()}.safetensors")
    shardow.save(stage(0), f"{path}.safetensors", group=dist.group.WORLD)
    dist.barrier()
    return ["shardow.part" in shardow.open(one).metadata for one in (f"{path}-0.safetensors", f"{path}.safetensors")]


def test_only_the_file_of_a_part_of_a_job_says_who_saved_it(tmp_path: Path) -> None:
    path = str(tmp_path / "model")
    assert ranks.run(2, claims, path)[0] == [True, False]
    shardow.save(stage(0), f"{path}-alone.safetensors")
    assert (tmp_path / "model-alone.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    with shardow.open(f"{path}-0.safetensors") as opened:
        text = json.loads(opened.metadata["shardow.part"])
    assert text.keys() == {"job", "ranks", "digest"}
    assert text["ranks"] == [0]
