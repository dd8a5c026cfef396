"""async_save(): the values of the moment it was called, while training goes on; errors that are not lost; one at a
time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from own_averages import averages_of
from torch import nn

import shardow
from shardow.files import background

ALL = bool(os.environ.get("SHARDOW_ALL"))
KINDS = [("plain", 1), ("ddp", 2), ("fsdp1", 2), ("fsdp2", 3), ("tp+fsdp2", 4)]


def save_and_train_on(kind: str, folder: str) -> None:
    model = models.build(kind, dist.get_world_size())
    ema = shardow.EMA(model, [0.5, 0.9], seed=1)
    shardow.save(model, f"{folder}/now.safetensors")
    ema.save(f"{folder}/now-ema")
    handle = shardow.async_save(model, f"{folder}/later.safetensors")
    averages = ema.async_save(f"{folder}/later-ema")
    for local in averages_of(ema).view.parameters:
        local.tensor.add_(1)
    ema.update()
    assert handle.wait()["bytes_written"] >= 0
    averages.wait()


@pytest.mark.parametrize(("kind", "world"), KINDS)
def test_a_checkpoint_has_the_values_of_the_moment(kind: str, world: int, tmp_path: Path) -> None:
    ranks.run(world, save_and_train_on, kind, str(tmp_path))
    assert (tmp_path / "later.safetensors").read_bytes() == (tmp_path / "now.safetensors").read_bytes()
    for file in ("ema-0.5.safetensors", "ema-0.9.safetensors"):
        assert (tmp_path / "later-ema" / file).read_bytes() == (tmp_path / "now-ema" / file).read_bytes()


def test_returns_before_it_is_written_and_a_second_save_waits(tmp_path: Path) -> None:
    asked, release, order = threading.Event(), threading.Event(), []

    def stopped(done: int, total: int) -> None:
        release.wait()
        order.append("first")

    state = {"a": torch.zeros(100)}
    handle = shardow.async_save(state, tmp_path / "a.safetensors", progress=stopped)
    state["a"].fill_(1)
    assert not handle.done()
    assert not (tmp_path / "a.safetensors").exists()
    with pytest.raises(TimeoutError, match="it goes on"):
        handle.wait(timeout=0.01)
    letting_go = threading.Thread(target=lambda: (asked.wait(), release.set()))
    letting_go.start()
    asked.set()
    shardow.save(state, tmp_path / "b.safetensors", progress=lambda done, total: order.append("second"))
    letting_go.join()
    assert handle.done()
    assert order == ["first"] * order.count("first") + ["second"] * order.count("second")
    assert not shardow.open(tmp_path / "a.safetensors")["a"].any()
    assert shardow.open(tmp_path / "b.safetensors")["a"].all()


def failing(path: str) -> list[str]:
    """What was raised: by wait(), by a second wait(), by the save after a failure that nobody waited for."""
    state = {"a": torch.ones(7)}
    found = []
    handle = shardow.async_save(state, path, group=dist.group.WORLD)
    for _ in range(2):
        with pytest.raises(ValueError, match="is a directory") as error:
            handle.wait()
        found.append(type(error.value).__name__)
    shardow.save(state, path + ".good.safetensors", group=dist.group.WORLD)  # the error has been told
    shardow.async_save(state, path, group=dist.group.WORLD)
    with pytest.raises(ValueError, match="is a directory"):
        shardow.save(state, path + ".second.safetensors", group=dist.group.WORLD)
    return found


def test_errors_come_from_wait_or_from_the_next_save_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.mkdir()  # found out when it is written
    assert ranks.run(2, failing, str(path)) == [["InvalidArgumentError"] * 2] * 2
    assert (tmp_path / "a.safetensors.good.safetensors").exists()
    assert not (tmp_path / "a.safetensors.second.safetensors").exists()


def test_what_is_wrong_with_the_call_is_raised_by_the_call(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_shard_size='5 parsecs'"):
        shardow.async_save({"a": torch.ones(1)}, tmp_path / "a", max_shard_size="5 parsecs")
    with pytest.raises(ValueError, match=r"'a' is a builtins\.object, which is not written"):
        shardow.async_save({"a": object()}, tmp_path / "a")


def staged(folder: str) -> tuple[int, bool]:
    model = nn.parallel.DistributedDataParallel(nn.Linear(1024, 1024, bias=False))
    addresses = set()
    for i in range(3):
        shardow.async_save(model, f"{folder}/{i}.safetensors", dtype="bfloat16").wait()
        staging = background._slot(dist.group.WORLD).staging
        assert staging is not None
        addresses.add(staging.data_ptr())
    return staging.numel(), len(addresses) == 1


def test_staging_holds_what_a_rank_writes_in_the_files_dtype_and_is_used_again(tmp_path: Path) -> None:
    assert ranks.run(2, staged, str(tmp_path)) == [(1024 * 1024, True)] * 2  # a half of the replicas, in 2 bytes each


@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "raise RuntimeError"] if ALL else ["sys.exit(3)"])
def test_the_interpreter_waits_at_its_end(ending: str, tmp_path: Path) -> None:
    code = f"""
import sys, torch, shardow
state = {{str(i): torch.full((1 << 20,), float(i)) for i in range(8)}}
shardow.async_save(state, {str(tmp_path / "a.safetensors")!r})
{ending}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == {"": 0, "sys.exit(3)": 3}.get(ending, 1)
    found = shardow.open(tmp_path / "a.safetensors")
    assert all((found[name] == float(name)).all() for name in found)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize(("ending", "status"), [("", 1), ("sys.exit(3)", 3)] if ALL else [("", 1)])
def test_an_error_that_nobody_waited_for_is_told_at_the_end_and_in_the_exit_status(
    ending: str, status: int, tmp_path: Path
) -> None:
    """What others have registered for the end runs, before and after."""
    (tmp_path / "a.safetensors").mkdir()
    code = f"""
import atexit, sys
atexit.register(print, "registered before")
import torch, shardow
atexit.register(print, "registered after")
shardow.async_save({{"a": torch.ones(1)}}, {str(tmp_path / "a.safetensors")!r})
{ending}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert "a.safetensors was not saved" in done.stderr
    assert "is a directory" in done.stderr
    assert done.stdout.split() == ["registered", "after", "registered", "before"]


def test_staging_is_not_pinned_where_devices_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch pins the next power of two, while the engine has pinned chunks for what devices copy."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(background._alone, "staging", None)
    shardow.async_save({"w": torch.ones(3)}, tmp_path / "w.safetensors").wait()
    assert not background._alone.staging.is_pinned()
