"""Paths: what is no file, what no header can hold, and names as people write them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run
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


def test_directory_whose_name_is_no_utf8_takes_every_verb(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    model = torch.nn.Linear(2, 2)
    single, two = shardow.EMA(model, 0.5), shardow.EMA(model, [0.5, 0.9])
    for ema, path in ((single, folder / "one.safetensors"), (two, folder / "two")):
        for step in (1, 2):
            ema.update()
            ema.snapshot(folder / f"snapshots of {path.stem}", every=step)
        ema.save(path)
        ema.load(path)
        ema.async_save(path).wait()
    assert [*shardow.open(folder / "two")] == ["0.5", "0.9"]
    with pytest.raises(ValueError, match=r"\\xff.*0\.9"):
        shardow.EMA(model, [0.5, 0.9, 0.99]).load(folder / "two")
    plan = shardow.posthoc.plan(folder / "snapshots of two", 0.2)
    assert "of 4 snapshots" in str(plan)
    assert folder in plan.terms[0].path.parents
    shardow.posthoc.synthesize(folder / "snapshots of two", 0.2, out=folder / "after")
    single.export(folder / "exported")
    shardow.save(model, folder / "model")
    torch.save(model.state_dict(), folder / "model.pt")
    inputs = [folder / "model", folder / "exported", folder / "model.pt"]
    report = shardow.merge(inputs, folder / "merged")
    assert {entry["name"] for entry in report["inputs"]} == {*map(str, inputs)}
    assert shardow.open(folder / "merged").metadata["shardow.merge"]
    shardow.load(model, shardow.merged(inputs))
    shardow.load(model, folder / "merged")
    with pytest.raises(ValueError, match="\udcff/model"):
        shardow.merge([folder / "one.safetensors", folder / "model.pt"], folder / "b", key="weights")
    steps = shardow.Checkpoints(folder / "run", keep=1)
    for step in (1, 2):
        steps.save(step, model, single)
    assert steps.latest() == 2
    steps.restore(model, single)
    with pytest.raises(FileNotFoundError, match="/run has no checkpoint of step 7"):
        steps.restore(model, single, step=7)


def test_error_with_a_lone_surrogate_is_raised(tmp_path: Path) -> None:
    text = "\udcff\ud800"

    def failing(name: str, parameter: torch.Tensor) -> bool:
        raise RuntimeError(text)

    with pytest.raises(RuntimeError, match=text):
        shardow.EMA(torch.nn.Linear(2, 2), params=failing)
    with pytest.raises(ValueError, match="'w"):
        shardow.save({"w" + text: torch.ones(1)}, tmp_path / "a.safetensors")


class WithoutText(Exception):
    def __str__(self) -> str:
        raise TypeError("no text")


def test_error_that_has_no_text_is_raised() -> None:
    def failing(name: str, parameter: torch.Tensor) -> bool:
        raise WithoutText

    with pytest.raises(WithoutText):
        shardow.EMA(torch.nn.Linear(2, 2), params=failing)


def read_what_is_missing(folder: Path, rank_fails: int) -> str:
    model = shardow.EMA(torch.nn.Linear(2, 2), group=torch.distributed.group.WORLD)

    def failing(*_: object) -> bool:
        raise OSError(f"{folder}: no")

    try:
        if torch.distributed.get_rank() == rank_fails:
            shardow.EMA(torch.nn.Linear(2, 2), group=torch.distributed.group.WORLD, params=failing)
        else:
            shardow.EMA(torch.nn.Linear(2, 2), group=torch.distributed.group.WORLD)
    except OSError as error:
        failed = str(error)
    with pytest.raises(FileNotFoundError, match=r"\\xff"):
        model.load(folder)
    return failed


def test_ranks_learn_of_an_error_in_a_directory_that_is_no_utf8(tmp_path: Path) -> None:
    texts = run(2, read_what_is_missing, Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")), 1)
    assert "\\xff: no" in texts[0]
    assert "\udcff: no" in texts[1]
