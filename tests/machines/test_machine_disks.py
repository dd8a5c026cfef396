"""Storage that stands still, fails, lacks something, or is not shared by all machines: training goes on, every rank has
an error that names rank and path in time, the old checkpoint stays whole, and processes end."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from fuse_server import Faults
from lab import Lab
from miniature import Plan
from outcomes import Outcome, outcome
from verbs import NAME, TENSORS, put_first, sharded, version_at, whole

import shardow

ALL = bool(os.environ.get("SHARDOW_ALL"))
TIMEOUT = 3.0
GRACE = 4.0  # seconds beyond it, of a busy machine
END = 30.0  # seconds that a process may take to end, of a busy machine


def save_to(path: str, timeout: float = 20.0, version: int = 2) -> Outcome:
    state = sharded(version)
    return outcome(lambda: shardow.save(state, path, timeout=timeout))


def load_from(path: str) -> tuple[Outcome, bool]:
    """Also whether all is there."""
    state = {name: torch.zeros(shape) for name, (shape, _) in TENSORS.items()}
    ended = outcome(lambda: shardow.load(state, path, timeout=20.0, group=torch.distributed.group.WORLD))
    return ended, all(torch.equal(found, whole(name, 2)) for name, found in state.items())


def train_beside(path: str, timeout: float) -> tuple[Outcome, int]:
    """How a save in the background ended, and how many updates were made until then."""
    layer = torch.nn.Linear(8, 8)
    ema = shardow.EMA(layer, 0.9)
    handle, updates = shardow.async_save(sharded(2), path, timeout=timeout), 0
    began = time.monotonic()
    while not handle.done() and time.monotonic() - began < 60:
        with torch.no_grad():
            layer.weight.add_(1.0)
        ema.update()
        updates += 1
        time.sleep(1e-3)
    kind, message, _ = outcome(handle.wait)
    return (kind, message, time.monotonic() - began), updates


def wrong_with(ended: list[Outcome], path: Path) -> list[str]:
    """Where rank 0's storage stands still."""
    return [
        f"rank {rank}: {one}"
        for rank, one in enumerate(ended)
        if one[0] != "IoError"
        or one[2] > TIMEOUT + GRACE
        or (rank > 0 and "rank 0" not in one[1])
        or str(path.parent) not in one[1]
        or "stands still" not in one[1]
    ]


@pytest.mark.parametrize("call", ["write", "fsync", "create", "mkdir", "rename2"] if ALL else ["fsync"])
def test_a_call_that_never_returns_is_an_error_that_names_rank_and_path_in_time(call: str, tmp_path: Path) -> None:
    path = tmp_path / "disk" / "model"
    with Lab(Plan(tmp_path, disks={"disk": Faults()})) as lab:
        lab.all_fine(put_first, str(path))
        lab.command("faults", "disk", Faults(hangs=call))
        assert not wrong_with(lab.all_fine(save_to, str(path), TIMEOUT), path)
        lab.command("faults", "disk", Faults())
        assert version_at(tmp_path / "disk.files" / "model") == 1


def test_training_goes_on_beside_a_write_that_never_returns_and_no_process_waits_for_it_at_its_end(
    tmp_path: Path,
) -> None:
    """Of a process in whose name the kernel waits for storage, nothing is left but that wait."""
    path = tmp_path / "disk" / "model"
    with Lab(Plan(tmp_path, disks={"disk": Faults()})) as lab:
        lab.all_fine(put_first, str(path))
        lab.command("faults", "disk", Faults(hangs="write"))
        answers = lab.run(train_beside, str(path), TIMEOUT, last=True, stuck=[0])
        assert all(one.fine for one in answers), answers
        assert not wrong_with([one.value[0] for one in answers], path)
        assert all(one.value[1] > 50 for one in answers), [one.value[1] for one in answers]
        until = time.monotonic() + END
        while lab.command("state", 0) != "Z":
            assert time.monotonic() < until, lab.command("state", 0)
            time.sleep(0.05)
        assert all(one.ended is not None and one.ended < END for one in answers[1:])
        assert version_at(tmp_path / "disk.files" / "model") == 1


def test_storage_without_renaming_or_random_writes_takes_checkpoints_of_several_machines(tmp_path: Path) -> None:
    disks = {
        "fixed": Faults(renames=False),
        "in_order": Faults(anywhere=False),
        "neither": Faults(renames=False, anywhere=False),
    }
    with Lab(Plan(tmp_path, disks=disks)) as lab:
        for disk in disks:
            for name in ("model", NAME) if ALL else ("model",):
                path = str(tmp_path / disk / name)
                for version in (1, 2):
                    ended = lab.all_fine(save_to, path, 20.0, version)
                    assert [one[:2] for one in ended] == [("none", "")] * 4, (disk, ended)
                found = lab.all_fine(load_from, path)
                assert all(one[0][0] == "none" and one[1] for one in found), (disk, found)


def test_storage_that_fails_at_random_leaves_one_whole_version_and_one_error_for_all(tmp_path: Path) -> None:
    path, seen = tmp_path / "disk" / "model", set()
    with Lab(Plan(tmp_path, disks={"disk": Faults(seed=7)})) as lab:
        lab.all_fine(put_first, str(path))
        version = 1
        for number in range(40 if ALL else 5):
            wanted = 3 - version
            lab.command("faults", "disk", Faults(fails=0.04, seed=number))
            ended = lab.all_fine(save_to, str(path), 20.0, wanted)
            lab.command("faults", "disk", Faults())
            kinds = {kind for kind, _, _ in ended}
            assert len(kinds) == 1, ended
            seen |= kinds
            found = version_at(tmp_path / "disk.files" / "model")
            assert found in (1, 2) if kinds != {"none"} else found == wanted, ended
            version = found
    assert seen == {"none", "IoError"}


def test_a_path_that_machines_do_not_share_is_an_error_that_names_them(tmp_path: Path) -> None:
    path = tmp_path / "own" / "model"
    with Lab(Plan(tmp_path)) as lab:
        ended = lab.all_fine(save_to, str(path))
        for kind, message, seconds in ended:
            assert kind == "IoError"
            assert "rank 0 has made it on north, and it is not there on south" in message
            assert "not on storage that all machines share" in message
            assert seconds < 10
        assert all("rank 2" in message or "ranks 2, 3" in message for _, message, _ in ended[:2]), ended
        assert lab.all_fine(os.listdir, str(path.parent)) == [["hosts"]] * 4
        shared = str(tmp_path / "shared" / "model")
        assert all(kind == "none" for kind, _, _ in lab.all_fine(save_to, shared))
        lab.all_fine(copy_on, 0, shared, str(path))
        for (kind, message, _), _ in lab.all_fine(load_from, str(path)):
            assert kind == "IoError"
            assert "rank 0 found it, and it is not there on south" in message


def copy_on(rank: int, source: str, target: str) -> None:
    if torch.distributed.get_rank() == rank:
        shutil.copytree(source, target)
    torch.distributed.barrier()


def test_machines_of_one_name_are_several(tmp_path: Path) -> None:
    """On such a mount several machines' writes into one file are not merged: each file is one rank's, from front to
    end.
    """
    path = tmp_path / "disk" / "model"
    with Lab(Plan(tmp_path, hosts=("twin", "twin"), disks={"disk": Faults(merges=False)})) as lab:
        assert all(kind == "none" for kind, _, _ in lab.all_fine(save_to, str(path)))
        assert version_at(tmp_path / "disk.files" / "model") == 2
