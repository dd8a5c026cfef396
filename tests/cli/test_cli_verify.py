"""`shardow verify` finds every flipped bit that a checksum can find, and manifests are sha256sum's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
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
    names = ["model.safetensors", "with space.safetensors", "new\nline.safetensors", "back\\slash.safetensors", "config.json"]
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
        "no line\n",
        "0" * 64 + "  a.safetensors\n" + "1" * 64 + "  a.safetensors\n",
    ):
        (tmp_path / "SHA256SUMS").write_text(line)
        assert "line " in told("verify", "--manifest", tmp_path, status=1)
