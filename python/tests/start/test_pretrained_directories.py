"""Directories of transformers' save_pretrained() whose names and tensors are not the module's: loaded and written by
parts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardow

transformers = pytest.importorskip("transformers", "5")
accelerate = pytest.importorskip("accelerate")

from families import FAMILIES, build  # noqa: E402
from transformers.core_model_loading import Transpose, WeightConverter  # noqa: E402

from shardow.integrations.accelerate import save_averages  # noqa: E402

SOME = FAMILIES if os.environ.get("SHARDOW_ALL") else ("Mixtral", "ViT", "Llava")


def files(folder: Path) -> dict[str, torch.Tensor]:
    file = shardow.open(folder)
    return {name: file[name] for name in file.keys()}  # noqa: SIM118


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


@pytest.mark.parametrize("family", SOME)
def test_load_takes_what_save_pretrained_wrote_and_averages_are_written_alike(family: str, tmp_path: Path) -> None:
    saved, model = build(family, 1), build(family, 2)
    saved.save_pretrained(tmp_path / "saved")
    report = shardow.load(model, tmp_path / "saved")
    assert (report["missing"], report["unexpected"]) == ([], [])
    assert same(model.state_dict(), saved.state_dict())
    save_averages(accelerate.Accelerator(cpu=True), shardow.EMA(model), model, tmp_path / "averages")
    written = files(tmp_path / "averages")
    assert same({name: written[name] for name in files(tmp_path / "saved")}, files(tmp_path / "saved"))
    again = type(saved).from_pretrained(tmp_path / "averages", local_files_only=True)
    assert same(again.state_dict(), saved.state_dict())


def on_two_ranks(family: str, folder: Path) -> None:
    saved, model = build(family, 1), build(family, 2)
    if dist.get_rank() == 0:
        saved.save_pretrained(folder / "saved")
    dist.barrier()
    shardow.wrap(model, init_device_mesh("cpu", (2,)))
    shardow.load(model, folder / "saved")
    ema = shardow.EMA(model)
    full = ema.full_state_dict()
    assert dist.get_rank() or all(torch.equal(tensor, full[name]) for name, tensor in saved.state_dict().items())
    save_averages(accelerate.Accelerator(cpu=True), ema, model, folder / "averages")
    assert same({**files(folder / "averages"), **files(folder / "saved")}, files(folder / "averages"))


@pytest.mark.parametrize("family", SOME if os.environ.get("SHARDOW_ALL") else ("Mixtral",))
def test_fsdp2_ranks_read_and_write_their_parts_of_fused_tensors(family: str, tmp_path: Path) -> None:
    ranks.run(2, on_two_ranks, family, tmp_path)


def test_load_names_what_is_missing_in_the_directory_and_leaves_it_where_that_is_allowed(tmp_path: Path) -> None:
    saved, model = build("Mixtral", 1), build("Mixtral", 2)
    saved.save_pretrained(tmp_path / "saved")
    tensors = files(tmp_path / "saved")
    lost = next(name for name in tensors if ".experts.3." in name)
    del tensors[lost]
    shardow.save(tensors, tmp_path / "part")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"missing.*{lost}"):
        shardow.load(model, tmp_path / "part")
    assert same(model.state_dict(), before)
    report = shardow.load(model, tmp_path / "part", strict=False)
    (fused,) = report["missing"]
    assert fused in before
    expected = {**saved.state_dict(), fused: before[fused]}
    assert same(model.state_dict(), expected)


def test_a_conversion_that_reorders_elements_is_refused_by_the_tensors_name(tmp_path: Path) -> None:
    model: Any = build("Llama", 1)
    turn = WeightConverter("mlp.down.weight", "mlp.down_proj.weight", operations=[Transpose(0, 1)])
    model._weight_conversions = [turn]
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(shardow.Error, match=r"layers\.0\.mlp\.down\.weight.*from_pretrained"):
        shardow.load(model, tmp_path / "saved")
