"""What saves of real processes do beside one another.

Lone saves of all ranks to one path, averages beside a model, files that appear while a save goes on.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks import run
from safetensors.torch import load_file

import shardow

MOST = 200  # files written beside a save: each is looked at in every round of it


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def lone_saves(folder: str) -> list[str]:
    """On every rank, of a model that it holds whole, as with ``ddp.module``."""
    rank = torch.distributed.get_rank()
    model = torch.nn.Linear(64, 64)
    failures = []
    for turn in range(8):
        torch.nn.init.constant_(model.weight, 100 * rank + turn)
        torch.nn.init.constant_(model.bias, 100 * rank + turn)
        for path in (f"{folder}/model.safetensors", f"{folder}/model"):
            try:
                shardow.save(model, path)
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")
    return failures


def test_lone_saves_of_all_ranks_to_one_path_wait_for_each_other(tmp_path: Path) -> None:
    assert run(2, lone_saves, str(tmp_path)) == [[], []]
    assert names_in(tmp_path) == ["model", "model.safetensors"]
    for file in (tmp_path / "model.safetensors", tmp_path / "model" / "model.safetensors"):
        found = load_file(file)
        assert (found["weight"] == found["bias"][0]).all()
        assert found["bias"][0] in (7, 107)


def test_averages_of_several_decays_are_replaced_beside_a_model_that_stays(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    shardow.save(model, tmp_path)
    (tmp_path / "model-ema.safetensors").write_bytes(b"of a user")
    before = (tmp_path / "model.safetensors").read_bytes()
    ema = shardow.EMA(model, decay=[0.9, 0.99])
    for value in (1.0, 2.0):
        with torch.no_grad():
            model.weight.fill_(value)
        ema.update()
        ema.save(tmp_path)
        called = json.loads((tmp_path / "averages.json").read_text())["shardow.files"]
        assert sorted(called) == ["ema-0.9.safetensors", "ema-0.99.safetensors"]
        for decay in (0.9, 0.99):
            expected = ema.full_state_dict(decay=decay)["weight"]
            assert torch.equal(load_file(tmp_path / called[f"ema-{decay}.safetensors"])["weight"], expected)
            read = shardow.open(tmp_path / f"ema-{decay}.safetensors")
            assert torch.equal(read["weight"], expected)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert (tmp_path / "model-ema.safetensors").read_bytes() == b"of a user"
    assert names_in(tmp_path) == [
        "averages.json",
        *sorted(called.values()),
        "model-ema.safetensors",
        "model.safetensors",
    ]


def test_what_is_written_beside_a_background_save_stays(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    state = {"w": torch.zeros(500_000)}
    shardow.save(state, folder)
    for turn in range(5):
        state["w"].fill_(turn + 1)
        handle = shardow.async_save(state, folder)
        written = 0
        while not handle.done() and written < MOST:
            (folder / f"optimizer-{turn}-{written}.pt").write_bytes(f"{turn} {written}".encode())
            written += 1
        handle.wait()
        assert (load_file(folder / "model.safetensors")["w"] == turn + 1).all()
        for one in range(written):
            assert (folder / f"optimizer-{turn}-{one}.pt").read_bytes() == f"{turn} {one}".encode()
    assert names_in(tmp_path) == ["step"]


def test_a_mapping_takes_plain_values_too(tmp_path: Path) -> None:
    state = {"w": torch.arange(3.0), "step": 7, "best": float("inf"), "betas": (0.9, None), "by": {1: ["a"]}}
    path = tmp_path / "state.safetensors"
    shardow.save(state, path)
    found = {"w": torch.zeros(3), "step": 0, "best": 0.0, "betas": (), "by": None}
    report = shardow.load(found, path)
    assert report["missing"] == report["unexpected"] == []
    assert torch.equal(found.pop("w"), state.pop("w"))
    assert found == state
    with pytest.raises(ValueError, match="missing in the file: other"):
        shardow.load({"w": torch.zeros(3), **state, "other": 1}, path)
    with pytest.raises(ValueError, match="unexpected in the file: best, betas, by"):
        shardow.load({"w": torch.zeros(3), "step": 0}, path)
    some = {"w": torch.zeros(3), "step": 0, "other": 1}
    assert shardow.load(some, path, strict=False)["missing"] == ["other"]
    assert (some["step"], some["other"]) == (7, 1)
    with pytest.raises(ValueError, match=r"'model' is a torch.nn.modules.linear.Linear.*no pickles"):
        shardow.save({"model": torch.nn.Linear(1, 1)}, path)
