"""Paths: what is no file, what no header can hold, and names as people write them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from test_opening import state

import shardow


def outside(tmp_path: Path) -> dict[str, tuple[Any, type[Exception], str]]:
    os.symlink(tmp_path / "loop", tmp_path / "loop")
    os.mkfifo(tmp_path / "fifo.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    return {
        "nul": (f"{tmp_path}/a.safetensors\0b", ValueError, "has a NUL in it"),
        "loop": (tmp_path / "loop" / "a.safetensors", OSError, "loop"),
        "link": (tmp_path / "loop", OSError, "loop"),
        "long": (tmp_path / ("n" * 300), OSError, "too long"),
        "fifo": (tmp_path / "fifo.safetensors", ValueError, "is not a regular file"),
        "device": ("/dev/null", ValueError, "is not a regular file"),
        "folder": (tmp_path / "folder.safetensors", FileNotFoundError, "has neither"),
        "surrogate": (f"{tmp_path}/\ud800", ValueError, "a character that no file name can have"),
        "number": (7, ValueError, "not a path"),
        "empty": ("", ValueError, "it is empty"),
    }


@pytest.mark.parametrize(
    "which", ["nul", "loop", "link", "long", "fifo", "device", "folder", "surrogate", "number", "empty"]
)
def test_what_is_no_file_is_a_typed_error_at_once(which: str, tmp_path: Path) -> None:
    path, kind, message = outside(tmp_path)[which]
    for read in (lambda: shardow.open(path), lambda: shardow.load({"w0": torch.zeros(1)}, path)):
        with pytest.raises(kind, match=message) as found:
            read()
        assert isinstance(found.value, shardow.Error)


def test_a_file_of_torch_save_is_said_to_be_one(tmp_path: Path) -> None:
    torch.save(state(1), tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a\.pt: a zip file, such as torch.save\(\) makes, is no safetensors file"):
        shardow.load(state(1), tmp_path / "a.pt")


def test_a_nul_in_a_path_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(ValueError, match="has a NUL in it"):
        shardow.save(state(1), f"{tmp_path}/precious\0.safetensors")
    with pytest.raises(ValueError, match="NUL"):
        shardow.EMA(torch.nn.Linear(2, 2)).save(f"{tmp_path}/precious\0")
    assert (tmp_path / "precious").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_paths_that_are_no_text_are_written_and_read(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe.safetensors")
    report = shardow.save(state(1), path)
    assert report["files"] == [path]
    assert torch.equal(shardow.open(path)["w2"], state(1)["w2"])
    os.unlink(path)
    with pytest.raises(FileNotFoundError, match=r"\\xff\\xfe"):
        shardow.open(path)


def test_the_home_directory_is_understood_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shardow.save(state(1), "~/a.safetensors")
    shardow.async_save(state(2), Path("~/b.safetensors")).wait()
    assert shardow.open("~/a.safetensors")["w0"][0, 0] == 10
    target = state(0)
    shardow.load(target, "~/b.safetensors")
    assert target["w0"][0, 0] == 20
    ema = shardow.EMA(torch.nn.Linear(2, 2))
    ema.save("~/ema")
    ema.load("~/ema")
    ema.export("~/export")
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.safetensors", "ema", "export"]


@pytest.mark.parametrize("name", ["x.pt", "x.PTH", "x.bin", "run.ckpt"])
def test_the_name_of_another_formats_file_is_refused_with_the_way_out(name: str, tmp_path: Path) -> None:
    for save in (shardow.save, shardow.async_save):
        with pytest.raises(
            ValueError, match=rf"what is written is safetensors. Give .*/{name.split('.')[0]}\.safetensors for one file"
        ):
            save(state(1), tmp_path / name)
    assert not list(tmp_path.iterdir())
    (tmp_path / name).mkdir()
    shardow.save(state(1), tmp_path / name)
