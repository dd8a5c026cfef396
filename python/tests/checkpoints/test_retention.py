"""Which steps stay, and that nothing goes which is not ours."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardow
from shardow import _core
from shardow.checkpoints import manifest
from shardow.checkpoints.manifest import directory_of
from shardow.checkpoints.restoring import Restoring


def save(checkpoints: shardow.Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.save(step, state={"step": step, "values": torch.full((100,), float(step))})


def there(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


def step_of(checkpoints: shardow.Checkpoints, step: int | None = None) -> int:
    found = checkpoints.restore(step=step)
    assert (found["values"] == found["step"]).all()
    return int(found["step"])


@pytest.mark.parametrize(
    ("keep", "keep_every", "expected"),
    [
        (3, None, [5, 6, 7]),
        (1, None, [7]),
        (None, None, [0, 1, 2, 3, 4, 5, 6, 7]),
        (2, 3, [0, 3, 6, 7]),
        (1, 4, [0, 4, 7]),
    ],
)
def test_the_newest_stay_and_multiples(
    keep: int | None, keep_every: int | None, expected: list[int], tmp_path: Path
) -> None:
    checkpoints = shardow.Checkpoints(tmp_path, keep, keep_every)
    save(checkpoints, *range(8))
    assert there(tmp_path) == expected
    assert [step_of(checkpoints, step) for step in expected] == expected
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("step-")] == []


def test_steps_of_ten_digits_come_after_those_of_nine(tmp_path: Path) -> None:
    checkpoints = shardow.Checkpoints(tmp_path, keep=1)
    save(checkpoints, 999_999_999, 1_000_000_000)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1000000000"]
    save(shardow.Checkpoints(tmp_path, keep=None), 999_999_999)
    assert checkpoints.latest() == 1_000_000_000


def test_a_save_opens_no_kept_step_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = shardow.Checkpoints(tmp_path, keep=6)
    save(checkpoints, *range(8))
    opened: list[Path] = []
    whole = manifest.whole
    monkeypatch.setattr(manifest, "whole", lambda at: [opened.append(at), whole(at)][1])
    save(checkpoints, 8, 9)
    assert len(opened) <= 2, "of six that stay"


def test_asynchronous_saves_retire_too(tmp_path: Path) -> None:
    checkpoints = shardow.Checkpoints(tmp_path, keep=2)
    for step in range(5):
        handle = checkpoints.save(
            step, state={"step": step, "values": torch.full((100,), float(step))}, asynchronous=True
        )
    handle.wait()
    assert there(tmp_path) == [3, 4]
    assert step_of(checkpoints) == 4


def test_what_is_damaged_does_not_count_and_the_last_whole_one_stays(tmp_path: Path) -> None:
    checkpoints = shardow.Checkpoints(tmp_path, keep=1)
    save(checkpoints, 5)
    for step in (7, 8):
        damaged = tmp_path / f"step-{step:09}"
        damaged.mkdir()
        (damaged / "checkpoint.json").write_text("{")
    save(checkpoints, 6)
    assert there(tmp_path) == [6, 7, 8]
    with pytest.warns(RuntimeWarning, match="passed over"):
        assert step_of(checkpoints) == 6


def test_what_is_damaged_takes_no_place_of_what_is_whole(tmp_path: Path) -> None:
    checkpoints = shardow.Checkpoints(tmp_path, keep=2)
    save(checkpoints, 5, 6)
    (tmp_path / "step-000000007").mkdir()
    (tmp_path / "step-000000007" / "checkpoint.json").write_text("{")
    save(checkpoints, 8)
    assert there(tmp_path) == [6, 7, 8]


def test_a_step_that_is_older_than_others_is_not_removed_by_its_own_save(tmp_path: Path) -> None:
    checkpoints = shardow.Checkpoints(tmp_path, keep=2)
    save(checkpoints, 10, 20, 30)
    save(checkpoints, 5)
    assert there(tmp_path) == [5, 20, 30]
    save(checkpoints, 6)
    assert there(tmp_path) == [6, 20, 30]


def test_what_others_put_there_stays(tmp_path: Path) -> None:
    checkpoints = shardow.Checkpoints(tmp_path, keep=1)
    for name in ("step-1", "step-final", "step-0000000010", "steps", "model"):  # none is a name of ours
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoint.json").write_text("theirs")
    (tmp_path / "step-000000001").mkdir()  # ours by its name alone
    (tmp_path / "step-000000001" / "model.safetensors").write_text("theirs")
    (tmp_path / "elsewhere").mkdir()
    os.symlink("elsewhere", tmp_path / "step-000000002")
    (tmp_path / "step-000000003").write_text("a file")
    save(checkpoints, 4)
    mine = tmp_path / "step-000000004"
    (mine / "notes.txt").write_text("theirs")
    (mine / "runs").mkdir()
    shardow.save({"w": torch.ones(2)}, mine / "other.safetensors")
    save(checkpoints, 5)
    assert sorted(path.name for path in mine.iterdir()) == ["notes.txt", "other.safetensors", "runs"]
    assert (tmp_path / "step-000000001" / "model.safetensors").read_text() == "theirs"
    assert (tmp_path / "step-000000002").is_symlink()
    assert (tmp_path / "step-000000003").read_text() == "a file"
    assert all((tmp_path / name / "checkpoint.json").exists() for name in ("step-1", "step-final", "steps", "model"))
    assert checkpoints.latest() == 5


def test_what_a_link_with_a_step_s_name_points_to_stays(tmp_path: Path) -> None:
    archive, root = tmp_path / "archive", tmp_path / "run"
    save(shardow.Checkpoints(archive), 1)
    root.mkdir()
    (root / "step-000000001").symlink_to(archive / "step-000000001")
    save(shardow.Checkpoints(root, keep=1), 2, 3)
    assert step_of(shardow.Checkpoints(archive), 1) == 1


def test_a_file_of_another_step_that_somebody_put_there_stays(tmp_path: Path) -> None:
    save(shardow.Checkpoints(tmp_path, keep=None), 1, 2)
    first, second = (tmp_path / f"step-{step:09}" for step in (1, 2))
    shutil.copy(second / "state.safetensors", first / "best.safetensors")
    save(shardow.Checkpoints(tmp_path, keep=1), 3)
    assert [path.name for path in first.iterdir()] == ["best.safetensors"]
    assert not second.exists()


def test_a_step_that_is_damaged_later_takes_no_place_any_more(tmp_path: Path) -> None:
    checkpoints = shardow.Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1, 2, 3)
    state = tmp_path / "step-000000003" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-1])
    save(checkpoints, 4)
    assert step_of(checkpoints, 2) == 2


def test_a_removal_that_was_cut_off_is_finished(tmp_path: Path) -> None:
    checkpoints = shardow.Checkpoints(tmp_path, keep=1)
    save(shardow.Checkpoints(tmp_path, keep=None), 1, 2)
    (tmp_path / "step-000000001" / "checkpoint.json").unlink()
    assert step_of(checkpoints) == 2
    save(checkpoints, 3)
    assert there(tmp_path) == [3]


def test_a_removal_that_stops_leaves_no_step_that_passes_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its list goes first, and is gone on the disk before anything else goes."""
    save(shardow.Checkpoints(tmp_path, keep=None), 1)
    calls: list[str] = []
    unlink, fsync = os.unlink, os.fsync

    def unlinked(name: Any, **where: Any) -> None:
        calls.append(str(name))
        if str(name) == "state.safetensors":
            raise OSError(5, "a disk that fails")
        unlink(name, **where)

    monkeypatch.setattr(os, "unlink", unlinked)
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append("fsync"), fsync(file)))
    with pytest.warns(RuntimeWarning, match="old checkpoints could not be removed"):
        save(shardow.Checkpoints(tmp_path, keep=1), 2)
    assert calls == ["checkpoint.json", "fsync", "state.safetensors"]
    assert [path.name for path in (tmp_path / "step-000000001").iterdir()] == ["state.safetensors"]


@pytest.mark.parametrize("call", ["listdir", "fsync"])
def test_a_directory_that_takes_the_place_of_one_that_goes_is_left_alone(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on storage without locks, where no removal keeps another job from saving."""
    monkeypatch.setattr(_core, "while_locked", lambda _, work: work())
    checkpoints = shardow.Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)
    own, new = getattr(os, call), []

    def replaced(at: int | Path) -> Any:
        if isinstance(at, int) and not new:  # another job saves the step that this one is about to remove
            new.append(1)
            save(shardow.Checkpoints(tmp_path, keep=None), 1)
        return own(at)

    monkeypatch.setattr(os, call, replaced)
    save(checkpoints, 2)
    monkeypatch.undo()
    assert new
    assert step_of(checkpoints, 1) == 1


def test_a_step_that_another_job_is_saving_anew_stays(tmp_path: Path) -> None:
    checkpoints = shardow.Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)
    _core.while_locked(tmp_path / "step-000000001", lambda: save(checkpoints, 2))  # as that save holds it
    assert there(tmp_path) == [1, 2]
    save(checkpoints, 3)
    assert there(tmp_path) == [3]
    assert sorted(os.listdir(tmp_path)) == ["step-000000003"]


def test_two_jobs_in_one_directory_count_each_others_steps(tmp_path: Path) -> None:
    one, other = (shardow.Checkpoints(tmp_path, keep=2) for _ in range(2))
    save(one, 1, 3)
    save(other, 2, 4)
    assert there(tmp_path) == [3, 4]
    assert step_of(one) == step_of(other) == 4


def test_what_cannot_be_removed_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = shardow.Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.warns(RuntimeWarning, match="could not be removed"):
        save(checkpoints, 2)
    assert checkpoints.latest() == 2


def test_what_dead_saves_left_is_cleared_away_by_a_save_of_another_step(tmp_path: Path) -> None:
    nonce = "0123456789abcdef"
    dead, living = tmp_path / f".step-000000009.{nonce}.tmp", tmp_path / f".step-000000008.{nonce}.tmp"
    lock, left = tmp_path / ".step-000000008.lock.tmp", tmp_path / ".step-000000007.lock.tmp"
    for file in (lock, left):
        file.touch()
    for directory in (dead, living):
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(bytes(8))
    others = {f".step-9.{nonce}.tmp", f".model.{nonce}.tmp", ".step-000000009.tmp", ".step-000000009.notes.tmp"}
    for name in others:
        (tmp_path / name).write_text("theirs")
    handle = os.open(lock, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    save(shardow.Checkpoints(tmp_path), 10)
    os.close(handle)
    assert {path.name for path in tmp_path.iterdir()} == {"step-000000010", living.name, lock.name, *others}


SAVES = """
import sys, torch, shardow
checkpoints = shardow.Checkpoints(sys.argv[1], keep=1)
checkpoints.save(1, state={"values": torch.ones(100)})
print("begun", flush=True)
for step in range(2, 60):
    checkpoints.save(step, state={"values": torch.ones(100)})
"""


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_who_looks_while_another_process_saves_and_removes_always_finds_a_step(tmp_path: Path) -> None:
    checkpoints = shardow.Checkpoints(tmp_path)
    with subprocess.Popen([sys.executable, "-c", SAVES, tmp_path], stdout=subprocess.PIPE, text=True) as saves:
        assert saves.stdout is not None
        assert saves.stdout.readline() == "begun\n"
        seen = [1]
        while saves.poll() is None:
            newest = checkpoints.latest()
            assert newest is not None
            assert newest >= seen[-1]
            seen.append(newest)
            assert (checkpoints.restore()["values"] == 1).all()
    assert saves.returncode == 0
    assert len(set(seen)) > 5
    assert checkpoints.latest() == 59


def fifo(path: Path) -> None:
    os.mkfifo(path)


ODD: dict[str, Callable[[Path], object]] = {
    "a FIFO": fifo,
    "a directory": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path),
    "nested": lambda path: path.write_text("[" * 100_000),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe"),
    "nothing": Path.touch,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("odd", ODD)
def test_whatever_stands_at_a_newer_step_s_list_the_older_one_is_found(odd: str, tmp_path: Path) -> None:
    checkpoints = shardow.Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)
    at = tmp_path / "step-000000005"
    at.mkdir()
    ODD[odd](at / "checkpoint.json")
    with pytest.warns(RuntimeWarning, match="passed over"):
        assert checkpoints.latest() == 1
    with pytest.warns(RuntimeWarning, match="passed over"):
        assert step_of(checkpoints) == 1
    with pytest.raises(shardow.Error, match=r"step-000000005/checkpoint\.json"):
        checkpoints.restore(step=5)
    save(checkpoints, 2)
    assert there(tmp_path) == [2, 5]


@pytest.mark.timeout(60)
def test_links_and_files_with_a_step_s_name_are_no_steps(tmp_path: Path) -> None:
    checkpoints = shardow.Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)
    (tmp_path / "step-000000005").symlink_to(tmp_path / "step-000000005")
    (tmp_path / "step-000000006").touch()
    fifo(tmp_path / "step-000000007")
    assert checkpoints.latest() == 1
    save(checkpoints, 2)
    assert there(tmp_path) == [2, 5, 6, 7]


def test_a_step_that_appears_while_older_ones_are_removed_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, checkpoints = nn.Linear(2, 2), shardow.Checkpoints(tmp_path / "run")
    checkpoints.save(1, model)
    newer = shardow.Checkpoints(tmp_path / "other")
    newer.save(2, model)
    whole, looked_at = manifest.whole, []

    def replaced(directory: Path) -> manifest.Manifest | None:
        if not looked_at:  # another process saves a step, and removes the older one, after they were listed
            os.rename(newer.directory / directory_of(2), checkpoints.directory / directory_of(2))
            shutil.rmtree(directory)
        looked_at.append(directory.name)
        return whole(directory)

    monkeypatch.setattr(manifest, "whole", replaced)
    assert checkpoints.latest() == 2
    assert looked_at == [directory_of(1), directory_of(2)]


@torch.no_grad()
def test_a_step_that_is_saved_again_while_it_is_opened_is_restored_as_it_is_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, checkpoints = nn.Linear(2, 2), shardow.Checkpoints(tmp_path)
    checkpoints.save(1, model.requires_grad_(False))
    find, steps = Restoring.find, []

    def saved_again(restoring: Restoring) -> tuple[str, list[str], bytes]:
        step = find(restoring)
        if not steps:
            model.weight.fill_(7)
            checkpoints.save(1, model)
            model.weight.zero_()
        steps.append(step)
        return step

    monkeypatch.setattr(Restoring, "find", saved_again)
    checkpoints.restore(model)
    assert len(steps) == 2
    assert (model.weight == 7).all()
