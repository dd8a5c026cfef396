"""Saving where something is already: memory maps of it, permissions, repetition, symbolic links."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import shardow

NAMES = ["a.safetensors", "hub"]  # a file, a directory of several


def state(value: float) -> dict[str, torch.Tensor]:
    """Beyond one page, so that a map that is read late would show."""
    return {name: torch.full((3000,), value + i) for i, name in enumerate("abc")}


def save(value: float, path: Path) -> list[Path]:
    return [
        Path(file)
        for file in shardow.save(state(value), path, max_shard_size=13000 if path.suffix == "" else None)["files"]
    ]


def read(files: list[Path]) -> dict[str, torch.Tensor]:
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_holds(path: Path, value: float) -> None:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    found = read(files)
    assert set(found) == set("abc")
    assert all(torch.equal(found[name], tensor) for name, tensor in state(value).items())


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("where", NAMES)
def test_tensors_on_a_map_of_the_old_file_keep_their_values(where: str, tmp_path: Path) -> None:
    mapped = {}
    for file in save(1, tmp_path / where):
        with safe_open(file, "pt") as opened:
            mapped |= {name: opened.get_tensor(name) for name in opened.offset_keys()}
    save(5, tmp_path / where)
    assert all(torch.equal(mapped[name], tensor) for name, tensor in state(1).items())
    assert_holds(tmp_path / where, 5)


@pytest.mark.parametrize("where", NAMES)
def test_weights_that_lie_on_the_file_that_they_replace_are_saved(where: str, tmp_path: Path) -> None:
    mapped = read(save(1, tmp_path / where))
    shardow.save(mapped, tmp_path / where, max_shard_size=13000 if where == "hub" else None)
    assert_holds(tmp_path / where, 1)


@pytest.mark.parametrize("where", NAMES)
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002], ids=oct, indirect=True)
def test_files_have_the_mode_that_the_umask_leaves(where: str, umask: int, tmp_path: Path) -> None:
    for value in (1, 2):  # a new one, then one that replaces it
        save(value, tmp_path / where)
        found = [tmp_path / where, *tmp_path.glob("hub/*")]
        assert {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in found} == {
            path.name: oct((0o777 if path.is_dir() else 0o666) & ~umask) for path in found
        }
    assert len(found) == (5 if where == "hub" else 1)


@pytest.mark.parametrize("where", NAMES)
def test_the_second_save_to_a_path_is_the_one_that_stays(where: str, tmp_path: Path) -> None:
    for value in (1, 2):
        save(value, tmp_path / where)
    assert_holds(tmp_path / where, 2)
    assert [path.name for path in tmp_path.iterdir()] == [where]


def test_fewer_files_replace_more(tmp_path: Path) -> None:
    save(1, tmp_path / "hub")
    (tmp_path / "hub" / "config.json").write_text("{}")
    shardow.save(state(2), tmp_path / "hub")
    assert sorted(path.name for path in (tmp_path / "hub").iterdir()) == ["config.json", "model.safetensors"]
    assert_holds(tmp_path / "hub", 2)


def test_a_directory_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir(mode=0o700)
    save(1, tmp_path / "hub")
    assert stat.S_IMODE((tmp_path / "hub").stat().st_mode) == 0o700


def test_a_link_to_a_directory_stays_and_the_directory_gets_the_checkpoint(tmp_path: Path) -> None:
    save(1, tmp_path / "disk" / "run")
    (tmp_path / "latest").symlink_to("disk/run")
    save(2, tmp_path / "latest")
    assert_holds(tmp_path / "latest", 2)
    assert (tmp_path / "latest").is_symlink()
    assert_holds(tmp_path / "disk" / "run", 2)


def test_links_beside_a_checkpoint_that_is_reached_by_a_link_still_lead_to_their_files(tmp_path: Path) -> None:
    save(1, tmp_path / "disk" / "run")
    (tmp_path / "disk" / "tokenizer.txt").write_text("words")
    (tmp_path / "disk" / "run" / "tokenizer.txt").symlink_to("../tokenizer.txt")
    (tmp_path / "latest").symlink_to("disk/run")
    save(2, tmp_path / "latest")
    assert (tmp_path / "latest" / "tokenizer.txt").resolve().is_file()


def test_a_link_to_a_file_is_replaced_and_the_file_stays(tmp_path: Path) -> None:
    """As in a hub's cache, whose blobs others have linked too."""
    save(1, tmp_path / "blob.safetensors")
    (tmp_path / "a.safetensors").symlink_to("blob.safetensors")
    save(2, tmp_path / "a.safetensors")
    assert_holds(tmp_path / "blob.safetensors", 1)
    assert_holds(tmp_path / "a.safetensors", 2)


@pytest.mark.parametrize("where", NAMES)
def test_a_link_above_the_checkpoint_is_followed(where: str, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to("disk")
    for value in (1, 2):
        save(value, tmp_path / "runs" / where)
    assert_holds(tmp_path / "disk" / where, 2)
    assert (tmp_path / "runs").is_symlink()
