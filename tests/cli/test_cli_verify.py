"""`shardow verify` finds every flipped bit that a checksum can find, and manifests are sha256sum's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from command import flip, foreign, ours, run, tensors, told, told_json


def test_sound_files_are_sound(tmp_path: Path) -> None:
    ours(tmp_path / "model", tensors(), max_shard_size=20_000)
    found = told_json("verify", tmp_path / "model", ours(tmp_path / "one.safetensors", tensors(1)))
    assert found["ok"]
    assert [file["checksums"] for path in found["paths"] for file in path["files"]] == [2, 1, 3]


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


@pytest.mark.parametrize("directory", [False, True])
def test_a_manifest_is_written_once_then_checked_also_by_sha256sum(tmp_path: Path, directory: bool) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    file = foreign(folder / "model.safetensors", tensors())
    path, manifest = (folder, folder / "SHA256SUMS") if directory else (file, folder / "model.safetensors.sha256")
    assert f"{manifest}: written" in told("verify", "--manifest", path)
    before = manifest.read_bytes()
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", manifest.name], cwd=folder, check=True)
    assert ": written" not in told("verify", "--manifest", path)
    flip(file, -1)
    told("verify", path)  # it has no checksums of its own
    assert "its SHA-256 is" in told("verify", "--manifest", path, status=1)
    assert "its SHA-256 is" in told("verify", "--manifest=check", path, status=1)
    assert manifest.read_bytes() == before
    told("verify", "--manifest=write", path)
    assert manifest.read_bytes() != before
    told("verify", "--manifest=check", path)


def test_what_sha256sum_wrote_is_checked(tmp_path: Path) -> None:
    names = [
        "model.safetensors",
        "with space.safetensors",
        "new\nline.safetensors",
        "back\\slash.safetensors",
        "config.json",
    ]
    for i, name in enumerate(names):
        foreign(tmp_path / name, tensors(i, (5,)))
    sums = subprocess.run(["sha256sum", "--binary", *names], cwd=tmp_path, capture_output=True, check=True).stdout
    (tmp_path / "SHA256SUMS").write_bytes(sums)
    found = told_json("verify", "--manifest=check", tmp_path)
    assert sorted(Path(file["path"]).name for file in found["paths"][0]["files"]) == sorted(names)
    assert all(file["sha256"] for file in found["paths"][0]["files"])
    flip(tmp_path / "config.json", -1)
    assert "config.json: FAILED" in told("verify", "--manifest", tmp_path, status=1)
    (tmp_path / "SHA256SUMS").unlink()
    told("verify", "--manifest", tmp_path)
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=tmp_path, check=True)


def test_a_manifest_is_not_written_for_what_is_wrong(tmp_path: Path) -> None:
    path = ours(tmp_path / "a.safetensors", tensors())
    flip(path, -1)
    assert "not written" in told("verify", "--manifest", path, status=1)
    assert [one.name for one in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_file_that_the_manifest_does_not_name_fails(tmp_path: Path) -> None:
    foreign(tmp_path / "a.safetensors", tensors())
    told("verify", "--manifest", tmp_path)
    foreign(tmp_path / "b.safetensors", tensors())
    assert "does not name it" in told("verify", "--manifest", tmp_path, status=1)


def test_a_manifest_that_must_be_there(tmp_path: Path) -> None:
    path = foreign(tmp_path / "a.safetensors", tensors())
    assert "a.safetensors.sha256" in run("verify", "--manifest=check", path).stderr
    assert run("verify", "--manifest=check", path).returncode == 3
    assert not (tmp_path / "a.safetensors.sha256").exists()


def test_a_manifest_leads_nowhere_else(tmp_path: Path) -> None:
    foreign(tmp_path / "a.safetensors", tensors())
    for line in (
        "0" * 64 + "  ../x\n",
        "0" * 64 + "  /etc/passwd\n",
        "0" * 64 + "  sub/../../x\n",
        "0" * 64 + "  sub//x\n",
        "SHA256 (../x) = " + "0" * 64 + "\n",
        "no line\n",
        "0" * 64 + "  a.safetensors\n" + "1" * 64 + "  a.safetensors\n",
    ):
        (tmp_path / "SHA256SUMS").write_text(line)
        assert "line " in told("verify", "--manifest", tmp_path, status=1)


@pytest.mark.parametrize("words", [[], ["--tag"], ["--binary"]])
def test_every_format_of_sha256sum_is_read_also_of_files_below(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    names = ["a.safetensors", "sub/b.safetensors", "sub/deep/c (1) = x.safetensors", "new\nline.safetensors"]
    for i, name in enumerate(names):
        foreign(tmp_path / name, tensors(i, (5,)))
    sums = subprocess.run(["sha256sum", *words, *names], cwd=tmp_path, capture_output=True, check=True).stdout
    (tmp_path / "SHA256SUMS").write_bytes(sums)
    found = told_json("verify", "--manifest=check", tmp_path)
    assert sorted(file["path"] for file in found["paths"][0]["files"]) == sorted(str(tmp_path / name) for name in names)
    assert all(file["sha256"] for file in found["paths"][0]["files"])
    flip(tmp_path / "sub" / "b.safetensors", -1)
    assert "sub/b.safetensors: FAILED" in told("verify", "--manifest", tmp_path, status=1)


@pytest.mark.parametrize("legacy", [False, True])
def test_files_of_torch_are_said_to_be_theirs_and_have_manifests(tmp_path: Path, legacy: bool) -> None:
    path = tmp_path / "model.pt"
    torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=not legacy)
    for words in (["verify", path], ["inspect", path], ["diff", path, path], ["convert", path, "-o", tmp_path / "x"]):
        done = run(*words)
        assert done.returncode == 5
        assert "as torch.save() writes" in done.stderr
        assert "--manifest" in done.stderr
    assert "model.pt: OK (SHA-256" in told("verify", "--manifest", path)
    told("verify", "--manifest=check", path)
    flip(path, -1)
    assert "its SHA-256 is" in told("verify", "--manifest=check", path, status=1)
    (tmp_path / "model.pt.sha256").unlink()
    assert "OK" not in told("verify", "--manifest=check", path, status=3)
    path.rename(tmp_path / "model.safetensors")  # it says that it is one
    assert "as torch.save() writes" in told("verify", "--manifest", tmp_path / "model.safetensors", status=1)


def test_a_manifest_is_a_file_or_a_link_to_one(tmp_path: Path) -> None:
    path, manifest = foreign(tmp_path / "a.safetensors", tensors()), tmp_path / "a.safetensors.sha256"
    os.mkfifo(manifest)
    for mode in ("", "=check", "=write"):
        assert "a.safetensors.sha256 is no regular file" in run("verify", f"--manifest{mode}", path).stderr
    assert manifest.is_fifo()
    manifest.unlink()
    (tmp_path / "elsewhere").mkdir()
    manifest.symlink_to("elsewhere/sums")
    told("verify", "--manifest", path)  # leads to nothing yet
    assert manifest.is_symlink()
    (tmp_path / "elsewhere" / "sums").chmod(0o640)
    told("verify", "--manifest=write", path)
    assert manifest.is_symlink()
    assert (tmp_path / "elsewhere" / "sums").stat().st_mode & 0o777 == 0o640
    assert sorted(one.name for one in (tmp_path / "elsewhere").iterdir()) == ["sums"]
