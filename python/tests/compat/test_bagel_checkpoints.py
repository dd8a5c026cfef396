"""BAGEL's checkpoints of five files: whole or not there, at any world size, and what is missing is said."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from bagel_models import FULL, made, pair, same, whole
from safetensors.torch import load_file, save_file
from torch import nn

import shardow
from shardow.compat import bagel
from shardow.compat._impl.files import publish
from shardow.compat.bagel import FSDPCheckpoint, FSDPConfig, fsdp_ema_setup, fsdp_ema_update, fsdp_wrapper
from shardow.distributed.rank_group import RankGroup


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, text: object) -> None:
        self.lines.append(str(text))


def _saves(directory: str, kind: str, step: int, config: FSDPConfig = FULL) -> dict[str, Any]:
    ema_model, model = pair(kind, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        model(torch.arange(6).view(2, 3) % 7).float().square().mean().backward()
        optimizer.step()
        scheduler.step()
        fsdp_ema_update(ema_model, model, decay=0.5)
    status = [{"set": {0: [rank, 2, 3]}} for rank in range(dist.get_world_size())]
    FSDPCheckpoint.fsdp_save_ckpt(directory, step, model, ema_model, optimizer, scheduler, status, Log(), config)
    again = pair(kind, config)
    optimizer2 = torch.optim.AdamW(again[1].parameters(), lr=0.1)
    scheduler2 = torch.optim.lr_scheduler.StepLR(optimizer2, 2)
    log, path = Log(), f"{directory}/{step:07d}"
    assert FSDPCheckpoint.try_load_ckpt(path, log, again[1], again[0]) == (again[1], again[0])
    state = FSDPCheckpoint.try_load_train_state(path, optimizer2, scheduler2, config)
    assert state == (optimizer2, scheduler2, step + 1, status[dist.get_rank()])
    assert scheduler2.last_epoch == 3
    for one, two in zip((ema_model, model), again, strict=True):
        assert same(whole(one), whole(two))
    for p in model.parameters():
        p.grad = None
    for one, optim in ((model, optimizer), (again[1], optimizer2)):
        one(torch.arange(6).view(2, 3) % 7).float().square().mean().backward()
        optim.step()
    assert same(whole(model), whole(again[1]))
    assert log.lines[1:] == ["model.safetensors: all names fit", "ema.safetensors: all names fit"]
    return {"ema": whole(ema_model), "files": sorted(os.listdir(path))}


@pytest.mark.parametrize(
    ("kind", "config", "shards"),
    [
        ("fsdp1", FULL, 2),
        ("fsdp2", FULL, 2),
        ("plain", FULL, 2),
        ("fsdp1", FSDPConfig("NO_SHARD", "BACKWARD_PRE", False, 1, 2), 1),
        ("fsdp1", FSDPConfig("HYBRID_SHARD", "BACKWARD_PRE", False, 2, 1), 1),
    ],
)
def test_a_run_resumes_from_its_five_files(tmp_path: Path, kind: str, config: FSDPConfig, shards: int) -> None:
    found = ranks.run(2, _saves, str(tmp_path / "run"), kind, 30, config)[0]
    optimizers = [f"optimizer.{i:05d}-of-{shards:05d}.pt" for i in range(shards)]
    assert found["files"] == ["data_status.pt", "ema.safetensors", "model.safetensors", *optimizers, "scheduler.pt"]
    assert os.listdir(tmp_path) == ["run"]
    assert os.listdir(tmp_path / "run") == ["0000030"]
    file = load_file(tmp_path / "run/0000030/ema.safetensors")
    assert "head.weight" not in file  # tied weights are stored, once: safetensors' save_file() refuses them
    report = made(1).load_state_dict(file, strict=False)  # as the origin reads it
    assert report.unexpected_keys == []
    assert report.missing_keys == ["head.weight"]
    assert all(torch.equal(file[name], average) for name, average in found["ema"].items())


def _loads_origins(path: str) -> None:
    state = load_file(f"{path}/ema.safetensors")
    for kind in ("fsdp1", "fsdp2", "plain"):
        ema_model, model = pair(kind)
        FSDPCheckpoint.try_load_ckpt(path, Log(), model, ema_model, resume_from_ema=True)
        for one in (model, ema_model):
            assert all(
                torch.equal(weight, state[name].float())
                for name, weight in whole(one).items()
                if "pos_embed" not in name
            )


def test_weights_of_the_origin_load_at_any_world_size(tmp_path: Path) -> None:
    path = tmp_path / "0000007"
    path.mkdir()
    state = {name: tensor.clone() for name, tensor in made(5).state_dict().items()}
    save_file(state, path / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in state.items()}, path / "ema.safetensors")
    for world in (1, 3):
        ranks.run(world, _loads_origins, str(path))


def test_positions_keep_the_models_own_resolution(tmp_path: Path) -> None:
    """The origin pops two names, and stops at the first that is not there."""
    save_file(
        {"vit_pos_embed.pos_embed": torch.ones(9, 4), **_untied(made(5, positions=8))}, tmp_path / "model.safetensors"
    )
    model, log = made(positions=2), Log()
    FSDPCheckpoint.try_load_ckpt(tmp_path, log, model)
    assert torch.equal(model.latent_pos_embed.pos_embed, made(positions=2).latent_pos_embed.pos_embed)
    assert torch.equal(model.first[0].weight, made(5).first[0].weight)
    assert log.lines[-1] == "model.safetensors: all names fit"


def _untied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "head.weight"}


def test_what_does_not_fit_is_told_or_refused_before_anything_changes(tmp_path: Path) -> None:
    """The origin loads with strict=False, whatever the file is."""
    model, ema_model, log = made(), made(), Log()
    before = copy.deepcopy(model.state_dict())
    state = _untied(made(5))
    save_file({**state, "more": torch.ones(1)}, tmp_path / "model.safetensors")
    save_file({**state, "first.0.weight": torch.ones(9, 9)}, tmp_path / "ema.safetensors")
    with pytest.raises(ValueError, match=r"first.0.weight"):
        FSDPCheckpoint.try_load_ckpt(tmp_path, log, model, ema_model)
    save_file({"other": torch.ones(3)}, tmp_path / "ema.safetensors")
    with pytest.raises(ValueError, match="has nothing of this model: it has other"):
        FSDPCheckpoint.try_load_ckpt(tmp_path, log, model, ema_model)
    assert same(model.state_dict(), before)
    del state["first.0.weight"]
    save_file(state, tmp_path / "ema.safetensors")
    FSDPCheckpoint.try_load_ckpt(tmp_path, log, model, ema_model)
    assert log.lines[-2:] == [
        "model.safetensors: missing in the file: []; not wanted: ['more']",
        "ema.safetensors: missing in the file: ['first.0.weight']; not wanted: []",
    ]


def test_a_checkpoint_without_averages_is_a_choice(tmp_path: Path) -> None:
    """The origin takes the weights for them."""
    model, ema_model, log = made(), made(1), Log()
    save_file(_untied(made(5)), tmp_path / "model.safetensors")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(FileNotFoundError, match=r"missing_ema='model'"):
        FSDPCheckpoint.try_load_ckpt(tmp_path, log, model, ema_model)
    assert same(model.state_dict(), before)
    FSDPCheckpoint.try_load_ckpt(tmp_path, log, model, ema_model, missing_ema="model")
    assert same(ema_model.state_dict(), made(5).state_dict())
    assert any("ema.safetensors is missing: the averages begin as" in line for line in log.lines)
    with pytest.raises(ValueError, match="missing_ema='perhaps'"):
        FSDPCheckpoint.try_load_ckpt(tmp_path, log, model, ema_model, missing_ema="perhaps")


def _half_written(directory: str) -> list[str]:
    """What lies in ckpt_dir while a save fails, and after it."""
    ema_model, model = pair("fsdp1")
    optimizer = torch.optim.AdamW(model.parameters())
    seen: list[str] = []

    def fails(*_: object) -> None:
        seen.extend(os.listdir(directory))
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 1:
            patched.setattr(bagel.files, "write", fails)
        with pytest.raises((OSError, shardow.Error), match="No space left"):
            FSDPCheckpoint.fsdp_save_ckpt(directory, 2, model, ema_model, optimizer, None, None, Log(), FULL)
    dist.barrier()
    return seen + os.listdir(directory)


def test_a_half_written_checkpoint_is_never_in_the_directory(tmp_path: Path) -> None:
    """auto_resume takes the greatest number there is, whole or not."""
    ranks.run(2, _saves, str(tmp_path / "run"), "fsdp1", 1)
    found = ranks.run(2, _half_written, str(tmp_path / "run"))
    assert [sorted(set(names)) for names in found] == [["0000001"], ["0000001"]]
    assert os.listdir(tmp_path) == ["run"]


def test_a_step_that_is_there_is_replaced(tmp_path: Path) -> None:
    for _ in range(2):
        ranks.run(2, _saves, str(tmp_path / "run"), "fsdp1", 1)
    assert os.listdir(tmp_path) == ["run"]
    assert os.listdir(tmp_path / "run") == ["0000001"]


def _resumes_elsewhere(path: str) -> list[str]:
    ema_model, model = pair("fsdp1")
    FSDPCheckpoint.try_load_ckpt(path, Log(), model, ema_model)  # weights fit any number of ranks
    with pytest.raises(FileNotFoundError) as told:
        FSDPCheckpoint.try_load_train_state(path, torch.optim.AdamW(model.parameters()), None, FULL)
    return [str(told.value)]


def test_the_optimizers_shards_fit_their_own_number_of_ranks(tmp_path: Path) -> None:
    ranks.run(2, _saves, str(tmp_path), "fsdp1", 1)
    for answer in ranks.run(3, _resumes_elsewhere, str(tmp_path / "0000001")):
        assert "this run has 3 shards of the optimizer's state, the checkpoint that of 2 shards" in answer[0]


def _on_meta(path: str | None) -> None:
    with shardow.meta_init():
        bare = made()
    ema_model, model = fsdp_ema_setup(bare, FULL), fsdp_wrapper(made(5), FULL)
    with pytest.raises(ValueError, match="have no values yet"):
        fsdp_ema_update(ema_model, model)
    FSDPCheckpoint.try_load_ckpt(path, Log(), model, ema_model)
    assert same(whole(ema_model), whole(model))
    fsdp_ema_update(ema_model, model)


def test_the_averaged_model_needs_no_copy_of_the_whole_on_any_rank(tmp_path: Path) -> None:
    """The origin's trainer begins with copy.deepcopy(model) on every rank."""
    for name in ("model", "ema"):
        save_file(_untied(made(5)), tmp_path / f"{name}.safetensors")
    ranks.run(2, _on_meta, str(tmp_path))
    ranks.run(2, _on_meta, None)


def test_training_from_scratch_says_so(tmp_path: Path) -> None:
    model, log = made(), Log()
    assert FSDPCheckpoint.try_load_ckpt(None, log, model) == (model, None)
    optimizer = torch.optim.SGD(model.parameters())
    assert FSDPCheckpoint.try_load_train_state(None, optimizer, None, FULL) == (optimizer, None, 0, None)
    with pytest.warns(UserWarning, match="does not exist"):
        FSDPCheckpoint.try_load_ckpt(tmp_path / "nothing", log, model)
    assert log.lines == ["Training from scratch."] * 2


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_misuse_raises_the_origins_exceptions(tmp_path: Path) -> None:
    unknown = FSDPConfig("SOME_SHARD", "BACKWARD_PRE", False, 1)
    assert unknown.num_shard == 8
    with pytest.raises(KeyError, match="FSDP has FULL_SHARD"):
        fsdp_wrapper(made(), unknown)
    model = made()
    with pytest.raises(NotImplementedError, match="SOME_SHARD"):
        FSDPCheckpoint.fsdp_save_ckpt(
            tmp_path, 1, model, None, torch.optim.SGD(model.parameters()), None, None, Log(), unknown
        )
    (tmp_path / "last").mkdir()
    with pytest.raises(ValueError, match="not named after its step"):
        FSDPCheckpoint.try_load_train_state(tmp_path / "last", torch.optim.SGD(model.parameters()), None, FULL)
    with pytest.raises(FileNotFoundError, match=r"model.safetensors"):
        FSDPCheckpoint.try_load_ckpt(tmp_path / "last", Log(), model)


def test_what_a_killed_save_left_is_no_part_of_the_next_checkpoint(tmp_path: Path) -> None:
    directory, partial = tmp_path / "run" / "0000001", tmp_path / ".run-0000001.partial"
    partial.mkdir()
    (partial / "of the killed one").touch()
    publish("save()", directory, RankGroup(None, None), lambda folder: (folder / "new").touch())
    assert [path.name for path in directory.iterdir()] == ["new"]
    assert not partial.exists()


def test_a_checkpoint_is_on_the_disk_until_the_one_that_replaces_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, partial = tmp_path / "run" / "0000001", tmp_path / ".run-0000001.partial"
    directory.mkdir(parents=True)
    (directory / "model.safetensors").touch()
    rename = Path.rename

    def fails(path: Path, target: Path) -> None:
        if path == partial:
            raise OSError("no")
        rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="no"):
        publish("save()", directory, RankGroup(None, None), lambda folder: (folder / "new").touch())
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["model.safetensors"]


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_a_checkpoint_with_what_is_not_its_own_is_not_replaced(kind: str, tmp_path: Path) -> None:
    directory, elsewhere = tmp_path / "0000001", tmp_path / "elsewhere"
    directory.mkdir()
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    (directory / "model.safetensors").touch()
    if kind == "file":
        (directory / "notes.txt").touch()
    elif kind == "directory":  # where a volume may be mounted
        (directory / "volume").mkdir()
    else:
        (directory / "ema.safetensors").symlink_to(elsewhere / "kept")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        shardow.Error, match=r"0000001 would be replaced, and has \w+(\.\w+)?, which no such save wrote"
    ):
        publish("save()", directory, RankGroup(None, None), lambda folder: None)
    assert sorted(tmp_path.rglob("*")) == before
