"""compat.diffusers on ranks, with a model class that has what EMAModel asks of diffusers' (which takes seconds to
import on each).
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import walks
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardow.compat.diffusers import EMAModel
from shardow.sharding.fsdp_ownership import resharded

WEIGHTS = "diffusion_pytorch_model.safetensors"


class Tiny(nn.Sequential):
    """A ModelMixin and ConfigMixin, as far as they are asked."""

    config: dict[str, Any]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Tiny:
        model = cls(*walks.model("mlp"))
        model.config = dict(config)
        return model

    @classmethod
    def load_config(cls, path: str) -> Any:
        return json.loads((Path(path) / "config.json").read_text())

    @classmethod
    def from_pretrained(cls, path: str) -> Tiny:
        model = cls.from_config(cls.load_config(path))
        model.load_state_dict(load_file(Path(path) / WEIGHTS))
        return model

    def register_to_config(self, **counters: Any) -> None:
        self.config.update(counters)

    def save_config(self, path: str) -> None:
        (Path(path) / "config.json").write_text(json.dumps(self.config))


def _shard(kind: str, model: Any) -> Any:
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    fully_shard(model[0])
    return fully_shard(model)


def _local(tensors: Any) -> list[torch.Tensor]:
    return [getattr(t, "_local_tensor", t) for t in tensors]


def _equal(a: Any, b: Any) -> bool:
    return all(map(torch.equal, _local(a), _local(b)))


def _saved(kind: str, path: str) -> None:
    plain = walks.model("mlp")
    model = _shard(kind, copy.deepcopy(plain))
    options: dict[str, Any] = {"decay": 0.9, "model_cls": Tiny, "model_config": {"width": 6}}
    ours, whole = EMAModel(model.parameters(), **options), EMAModel(plain.parameters(), **options)
    for _ in range(12):
        with torch.no_grad():
            for p in [*_local(model.parameters()), *plain.parameters()]:
                p.mul_(0.9)
        ours.step(model.parameters())
        whole.step(plain.parameters())
    ours.store(model.parameters())
    assert ours.temp_stored_params is not None
    assert _equal(ours.temp_stored_params, model.parameters())
    if kind != "ddp" or torch.distributed.get_rank() == 0:  # without shards it is called on one rank, as scripts do
        ours.save_pretrained(path)
    torch.distributed.barrier()
    assert sorted(os.listdir(path)) == ["config.json", WEIGHTS]
    assert _equal(Tiny.from_pretrained(path).parameters(), whole.shadow_params)
    found = EMAModel.from_pretrained(path, Tiny, parameters=model.parameters())
    assert found.optimization_step == 12
    for ema in (found, ours):
        ema.step(model.parameters())
    assert _equal(found.shadow_params, ours.shadow_params)


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("fsdp2", 2), ("fsdp2", 4)])
def test_ranks_save_what_one_process_would(kind: str, world: int, tmp_path: Path) -> None:
    ranks.run(world, _saved, kind, str(tmp_path))


def _fails_on_rank_1(path: str) -> None:
    model = _shard("fsdp2", walks.model("mlp"))
    ema = EMAModel(model.parameters(), model_cls=Tiny, model_config={})
    if torch.distributed.get_rank() == 1:
        ema.model_cls = nn.Linear  # has no from_config()
    with pytest.raises((ConnectionError, AttributeError)):
        ema.save_pretrained(path)
    torch.distributed.barrier()
    assert not os.listdir(path)


def test_a_failure_on_one_rank_is_one_on_all(tmp_path: Path) -> None:
    ranks.run(2, _fails_on_rank_1, str(tmp_path))


def _steps_after_an_evaluation(kind: str) -> None:
    model = _shard(kind, walks.model("mlp")).eval()
    ema = EMAModel(model.parameters(), 0.5)
    x = torch.ones(4, 6)
    for step in range(4):
        with torch.no_grad():
            weights = [p.clone() for p in _local(model.parameters())]
            before = model(x)  # the root is unsharded now, and FSDP2 shows it
            ema.store(model.parameters())
            ema.copy_to(model.parameters())
            averaged = model(x)
            ema.restore(model.parameters())
            assert torch.equal(before, model(x))
            assert step == 0 or not torch.equal(averaged, before)
            ema.step(model.parameters())  # of what the root shows: shards are averaged
            assert _equal(model.parameters(), weights)
            for p in _local(resharded(model.parameters())):
                p.mul_(1.25)


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_an_evaluation_leaves_nothing_behind(kind: str) -> None:
    """The origin compares an unsharded parameter with a shard, or the next forward uses the copy of the averages."""
    ranks.run(2, _steps_after_an_evaluation, kind)


def _flat_shards_cannot_be_saved(path: str) -> None:
    model = _shard("fsdp1", walks.model("mlp"))
    ema = EMAModel(model.parameters(), model_cls=Tiny, model_config={})
    with pytest.raises(
        ValueError, match=r"'0\.weight' is a flat piece of \d+ elements, as FSDP1 has them, of which no Tiny"
    ):
        ema.save_pretrained(path)


def test_fsdp1s_pieces_are_refused_as_files(tmp_path: Path) -> None:
    ranks.run(2, _flat_shards_cannot_be_saved, str(tmp_path))


def _crossed(path: str) -> str:
    rank = torch.distributed.get_rank()
    emas = [EMAModel(_shard("fsdp2", walks.model("mlp")).parameters(), model_cls=Tiny, model_config={}) for _ in "ab"]
    with pytest.raises(ValueError, match="save_pretrained") as told:
        emas[rank].save_pretrained(f"{path}/{'ab'[rank]}")
    torch.distributed.barrier()
    assert not os.listdir(path)
    for name, ema in zip("ab", emas, strict=True):
        ema.save_pretrained(f"{path}/{name}")
    return str(told.value)


def test_a_save_that_meets_another_ones_is_an_error_that_names_both_before_anything_is_made(tmp_path: Path) -> None:
    for message in ranks.run(2, _crossed, str(tmp_path)):
        assert f"path is '{tmp_path}/a' on rank 0 and '{tmp_path}/b' on rank 1" in message
