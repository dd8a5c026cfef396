"""`shardow verify` finds every flipped bit that a checksum can find."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command import flip, ours, run, tensors, told, told_json

import shardow


def test_sound_files_are_sound(tmp_path: Path) -> None:
    ours(tmp_path / "model", tensors(), max_shard_size=20_000)
    found = told_json("verify", tmp_path / "model", ours(tmp_path / "one.safetensors", tensors(1)))
    assert found["ok"]
    assert [file["checksums"] for path in found["paths"] for file in path["files"]] == [2, 1, 3]


def test_averages_of_several_decays_are_checked_where_their_directory_has_a_file_s_name(tmp_path: Path) -> None:
    path = tmp_path / "averages.safetensors"
    shardow.EMA(torch.nn.Linear(3, 2), [0.9, 0.99]).save(path)
    assert path.is_dir()
    assert run("verify", path).stdout.count(": OK") == 2
    assert run("inspect", path).stdout.count("2 tensors") == 2


@pytest.mark.parametrize("at", [-1, 4096, 4096 + 300_000, -100_000])
def test_one_flipped_bit_is_found_and_its_tensor_named(tmp_path: Path, at: int) -> None:
    path = ours(tmp_path / "a.safetensors", tensors())
    flip(path, at)
    done = run("verify", path)
    assert done.returncode == 1
    assert f"{path}: FAILED: 'layer." in done.stdout
    assert done.stdout.count("FAILED") == 1


def test_every_byte_of_a_file_in_many_pieces_is_looked_at(tmp_path: Path) -> None:
    path = ours(tmp_path / "a.safetensors", tensors(sizes=(3_000_000,)))
    told("verify", path)
    for at in (4096, 4096 + (4 << 20) - 1, 4096 + (4 << 20), 4096 + (8 << 20) - 1, -1):
        flip(path, at)
        told("verify", path, status=1)
        flip(path, at)
    told("verify", path)


def test_other_files_are_checked_all_the_same(tmp_path: Path) -> None:
    good, bad = (ours(tmp_path / f"{name}.safetensors", tensors()) for name in ("good", "bad"))
    flip(bad, -1)
    done = run("verify", tmp_path / "none", bad, good)
    assert done.returncode == 3  # trouble before failed checks
    assert f"{good}: OK" in done.stdout
    assert f"{bad}: FAILED" in done.stdout
    assert "none: cannot open" in done.stderr


@pytest.mark.parametrize("length", [-1, 7, 4000, 5000])
def test_a_file_that_was_cut_off_fails(tmp_path: Path, length: int) -> None:
    path = ours(tmp_path / "a.safetensors", tensors())
    path.write_bytes(path.read_bytes()[:length])
    assert "FAILED" in told("verify", path, status=1)


def test_an_index_that_lies_fails(tmp_path: Path) -> None:
    ours(tmp_path / "model", tensors(), max_shard_size=100_000)
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "model-00002"))
    assert f"{tmp_path / 'model'}: FAILED: the index says" in told("verify", tmp_path / "model", status=1)


@pytest.mark.parametrize("legacy", [False, True])
def test_files_of_torch_are_said_to_be_theirs(tmp_path: Path, legacy: bool) -> None:
    path = tmp_path / "model.pt"
    torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=not legacy)
    for words in (["verify", path], ["inspect", path], ["diff", path, path], ["convert", path, "-o", tmp_path / "x"]):
        done = run(*words)
        assert done.returncode == 5
        assert "as torch.save() writes" in done.stderr
    path.rename(tmp_path / "model.safetensors")  # it says that it is one
    assert "as torch.save() writes" in told("verify", tmp_path / "model.safetensors", status=1)
