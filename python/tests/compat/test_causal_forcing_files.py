"""Self-Forcing's model.pt, and states of averages: what the origin got wrong there, by the numbers of its list."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from causal_forcing_models import Block, Wrapper, assert_same, averaged, expected, generator, shake
from torch import nn

from shardow.compat._impl import files
from shardow.compat.causal_forcing import EMA_FSDP, fsdp_state_dict, load_model_pt, read_model_pt, write_model_pt


def _gather_raises() -> None:
    model = generator()
    ema = averaged(model)
    before = models.whole_weights(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", _cut)
        patch.setattr(dist, "irecv", _cut)
        with pytest.raises(OSError, match="cable"):
            ema.full_state_dict(model)
    after = models.whole_weights(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def _cut(*_: Any, **__: Any) -> None:
    raise OSError("cable")


def test_defect_1_a_gather_that_fails_leaves_the_live_weights() -> None:
    ranks.run(2, _gather_raises)


def _every_key(transformer: bool) -> None:
    model = generator(wrap_strategy="transformer", transformer_module=Block) if transformer else generator()
    names = [name for name, _ in model.module.named_parameters()]
    assert max(name.count("_fsdp_wrapped_module") for name in names) >= (1 if transformer else 3)
    ema, whole = averaged(model), expected()
    wrapped, clean = ema.full_state_dict(model), ema.full_state_dict(model, key_style="clean")
    if dist.get_rank() == 0:
        assert list(wrapped) == names
        assert_same(clean, whole)
        assert all(torch.equal(a, b) for a, b in zip(wrapped.values(), clean.values(), strict=True))
    else:
        assert wrapped == clean == {}
    with pytest.raises(ValueError, match="key_style='dirty'"):
        ema.full_state_dict(key_style="dirty")


@pytest.mark.parametrize("transformer", [False, True])
def test_defect_2_every_parameter_is_saved_whatever_is_wrapped(transformer: bool) -> None:
    ranks.run(2, _every_key, transformer)


def _write(folder: str) -> None:
    model = generator()
    ema = averaged(model)
    for style in ("wrapped", "clean"):
        write_model_pt(f"{folder}/{style}.pt", ema, key_style=style, generator=model, critic=model)
    ema.decay = 0.25
    ema.save(f"{folder}/own.safetensors")
    torch.save(ema.state_dict(), f"{folder}/parts{dist.get_rank()}.pt")
    parts = torch.load(f"{folder}/parts{dist.get_rank()}.pt")
    shake(model, 9)
    ema.update()
    ema.load_state_dict(parts)
    full = ema.full_state_dict(key_style="clean")
    if dist.get_rank() == 0:
        assert_same(full, expected())


def _read(folder: str) -> None:
    whole = expected()
    for style in ("wrapped", "clean"):
        model = generator()
        ema = EMA_FSDP(model, 0.5)
        load_model_pt(ema, f"{folder}/{style}.pt")
        full = ema.full_state_dict(key_style="clean")
        assert dist.get_rank() > 0 or full.keys() == whole.keys()
        assert all(torch.equal(full[name], whole[name]) for name in full)
        for target in (generator(), models.PARALLEL["fsdp2"](Wrapper(), dist.get_world_size()), Wrapper()):
            load_model_pt(target, f"{folder}/{style}.pt")
            live = models.whole_weights(target)
            assert all(torch.equal(live[name], whole[name]) for name in whole)
    ema.load(f"{folder}/own.safetensors")
    assert ema.decay == 0.25
    assert ema.ema.stats()["step"] == 2
    full = ema.full_state_dict(key_style="clean")
    assert all(torch.equal(full[name], whole[name]) for name in full)
    shake(model, 3)
    ema.update(model)
    full, shaken = ema.full_state_dict(key_style="clean"), models.whole_weights(model)
    assert all(torch.equal(full[name], whole[name].mul(0.25).add(shaken[name], alpha=0.75)) for name in full)


def test_defects_3_and_10_files_of_either_style_are_read_back_at_another_world_size(tmp_path: Path) -> None:
    ranks.run(2, _write, str(tmp_path))
    ranks.run(4, _read, str(tmp_path))
    for style in ("wrapped", "clean"):
        fresh = Wrapper()
        fresh.load_state_dict({**dict(fresh.named_buffers()), **read_model_pt(tmp_path / f"{style}.pt")})
        assert_same(dict(fresh.named_parameters()), expected())
        assert set(read_model_pt(tmp_path / f"{style}.pt", "generator")) == set(fresh.state_dict())
    keys = list(torch.load(tmp_path / "wrapped.pt")["generator_ema"])
    assert all("_fsdp_wrapped_module" in key for key in keys if "blocks" in key)
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix == ".tmp") == []


def test_defect_3_a_local_part_is_not_taken_for_a_whole_tensor() -> None:
    ema = averaged(Wrapper())
    before = {name: tensor.clone() for name, tensor in ema.shadow.items()}
    for wrong in (
        {**before, "model.head.bias": torch.ones(1)},  # would be spread over the whole
        {name: tensor for name, tensor in before.items() if name != "model.head.bias"},
        {**before, "model.tail.bias": torch.ones(1)},
        {**before, "model.head.bias": torch.ones(5, dtype=torch.int64)},
    ):
        with pytest.raises(ValueError, match=r"model\.(head|tail)\.bias"):
            ema.load_state_dict({name: tensor + 1 for name, tensor in wrong.items()})
    assert_same(dict(ema.shadow), before)


def _gathers(folder: str) -> int:
    model = generator()
    ema = averaged(model)
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardow.compat.causal_forcing.full_state_dict", lambda model: calls.append(model))
        write_model_pt(f"{folder}/model.pt", ema)
    whole = fsdp_state_dict(model)
    assert (set(whole) == set(Wrapper().state_dict())) if dist.get_rank() == 0 else whole == {}
    return len(calls)


def test_defect_9_nothing_is_gathered_that_is_not_written(tmp_path: Path) -> None:
    assert ranks.run(2, _gathers, str(tmp_path)) == [0, 0]
    assert list(torch.load(tmp_path / "model.pt")) == ["generator_ema"]


def _fails_everywhere(folder: str) -> None:
    ema = averaged(generator())
    with pytest.raises(OSError, match="No such file"):
        write_model_pt(f"{folder}/missing/model.pt", ema)
    with pytest.raises((KeyError, OSError), match=r"has no 'generator'|there is no file"):
        load_model_pt(ema, f"{folder}/model.pt" if dist.get_rank() else f"{folder}/nowhere.pt", "generator")


def test_a_failure_on_one_rank_is_one_on_all(tmp_path: Path) -> None:
    torch.save({"generator_ema": {}}, tmp_path / "model.pt")
    ranks.run(2, _fails_everywhere, str(tmp_path))


def test_longlive_s_cleaned_keys_and_odd_files_are_told_apart(tmp_path: Path) -> None:
    ema, path = averaged(Wrapper()), tmp_path / "model.pt"
    torch.save({"generator_ema": {f"_orig_mod.{name}": tensor for name, tensor in expected().items()}}, path)
    fresh = EMA_FSDP(Wrapper())
    load_model_pt(fresh, path)
    assert_same(dict(fresh.shadow), dict(ema.shadow))
    with pytest.raises(KeyError, match="has no 'generator'; it has 'generator_ema'"):
        read_model_pt(path, "generator")
    torch.save({"generator_ema": {"a.b": torch.ones(1), "a._orig_mod.b": torch.ones(1)}}, path)
    with pytest.raises(ValueError, match=r"'a\.b' twice"):
        read_model_pt(path)
    path.write_bytes(b"PK no archive")
    with pytest.raises(ValueError, match="not a whole file of tensors"):
        read_model_pt(path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_model_pt(tmp_path / "none.pt")
    with pytest.raises(ValueError, match="nothing to write"):
        write_model_pt(path)


def keeps_whole_tensors(folder: Path) -> None:
    """Self-Forcing's trainer, which has the whole on every rank: what it saves on rank 0, and what it takes back on
    all.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = models.build("fsdp1", world)
    ema = EMA_FSDP(generator, 0.5)
    expected = dict(zip(ema.shadow, models.whole_weights(generator).values(), strict=True))
    content = {"generator": fsdp_state_dict(generator), "generator_ema": ema.full_state_dict(generator)}
    if rank == 0:
        with pytest.warns(UserWarning, match="part"):  # the line as it was: rank 0's part
            pickle.dumps(ema.state_dict())
        torch.save(content, folder / "model.pt")
    dist.barrier()
    content = torch.load(folder / "model.pt", map_location="cpu", weights_only=True)
    assert_same(content["generator_ema"], expected)
    doubled = {name: 2 * tensor for name, tensor in content["generator_ema"].items()}
    ema.shadow = doubled
    assert_same({name: tensor.cpu() for name, tensor in ema.full_state_dict().items()}, doubled if rank == 0 else {})
    ema.shadow = {name: tensor.clone() for name, tensor in ema.shadow.items()}  # own parts
    assert_same(ema.full_state_dict(), doubled if rank == 0 else {})
    before = ema.full_state_dict()
    with pytest.raises(ValueError, match=r"nothing was loaded|does not fit"):
        ema.shadow = {name: tensor[:1] for name, tensor in doubled.items()}
    assert_same(ema.full_state_dict(), before)


def test_a_trainer_that_keeps_whole_tensors_saves_and_takes_back_whole_ones(tmp_path: Path) -> None:
    ranks.run(2, keeps_whole_tensors, tmp_path)


def test_a_decay_that_was_set_is_the_one_to_ask_for() -> None:
    ema = EMA_FSDP(nn.Linear(2, 2), decay=0.9)
    ema.decay = 0.5
    assert ema.ema.decays == ("0.5",)
    assert ema.ema.full_state_dict(0.5).keys() == {"weight", "bias"}


def test_a_file_that_could_not_be_written_leaves_the_one_before_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    files.write({"step": 1}, path)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        files.write({"step": lambda: 2}, path)
    assert torch.load(path) == {"step": 1}
    assert [left.name for left in tmp_path.iterdir()] == ["model.pt"]
