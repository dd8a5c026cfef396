"""NeMo Automodel: the numbers of both managers are the formula's, their face is the origin's; and the YAML section."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
import walks
from automodel_managers import BOTH, Manager, local, made, same, wander
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardow.compat.automodel import EMAManager, ShardedModelEMAManager, build_ema
from shardow.sharding.partial_tensor import PartialTensor

DECAYS = (0.9, 0.9999)


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): p for name, p in model.named_parameters() if p.requires_grad}


def _sharded(name: str, kind: str) -> nn.Module:
    model = walks.model(name).to(memory_format=torch.contiguous_format)  # as fully_shard() wants it
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp2":
        alone = {p for p in model.parameters() if p.ndim == 0}
        for child in model.children():
            if any(True for _ in child.parameters()):
                fully_shard(child)
        fully_shard(model, ignored_params=alone)
    return model


def _walks(kind: str, names: tuple[str, ...], steps: int) -> None:
    for name in names:
        model = _sharded(name, kind)
        managers: list[tuple[float, Manager]] = [(d, EMAManager(model, d)) for d in DECAYS]
        managers.append((DECAYS[0], ShardedModelEMAManager(_sharded(name, kind), model, DECAYS[0])))
        split = EMAManager(model, DECAYS[0], replicas="split")
        parameters = trained(model)
        expected = {d: {key: local(p).clone() for key, p in parameters.items()} for d in DECAYS}
        for _ in walks.walk(model, name, steps):
            for _, manager in managers:
                manager.update(model)
            split.update(model)
            for d, shadows in expected.items():
                for key, shadow in shadows.items():
                    shadow.mul_(d).add_(local(parameters[key]), alpha=1.0 - d)
        for d, manager in managers:
            state = manager.state_dict()
            assert all(torch.equal(local(state[key]), shadow) for key, shadow in expected[d].items()), (
                name,
                kind,
                d,
                type(manager),
            )
        together = split._ema.full_state_dict(complete=False)
        apart = managers[0][1]._ema.full_state_dict(complete=False)  # type: ignore[union-attr]
        assert same(together, apart)


def test_1000_steps_alone_equal_the_formula_bit_for_bit() -> None:
    _walks("plain", walks.NAMES, walks.STEPS)


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_1000_steps_on_ranks_equal_the_formula_bit_for_bit(kind: str) -> None:
    for world in (1, 2, 4):
        ranks.run(world, _walks, kind, walks.NAMES, walks.STEPS if world == 2 or os.environ.get("SHARDOW_ALL") else 50)


def _of_sources_dtype(kind: str, name: str, dtype: torch.dtype) -> None:
    model = models.build(kind, dist.get_world_size(), dtype)
    assert name in {"bfloat16", "float16"}
    with pytest.warns(UserWarning, match="lose most increments"):
        manager = EMAManager(model, 0.999, dtype="source")
    expected = {key: local(p).clone() for key, p in trained(model).items()}
    for step in range(60):
        wander(model, step)
        manager.update(model)
        for key, shadow in expected.items():
            shadow.mul_(0.999).add_(local(trained(model)[key]), alpha=1.0 - 0.999)
    state = manager.state_dict()
    assert all(state[key].dtype == dtype and torch.equal(local(state[key]), expected[key]) for key in expected)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize(("kind", "world"), [("plain", 1), ("ddp", 2), ("fsdp2", 2)])
def test_averages_of_the_sources_dtype_are_the_origins(kind: str, world: int, name: str) -> None:
    ranks.run(world, _of_sources_dtype, kind, name, getattr(torch, name))


def test_the_sources_dtype_is_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    with pytest.raises(ValueError, match="the weights are of torch"):
        EMAManager(model, dtype="source")


def _every_sharding(kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        model = models.build(kind, dist.get_world_size())
        manager = EMAManager(model, 0.9)
        expected = models.whole_weights(model)
        for step in range(3):
            wander(model, step)
            manager.update(model)
            for key, weight in models.whole_weights(model).items():
                expected[key].mul_(0.9).add_(weight, alpha=1.0 - 0.9)
        full = manager._ema.full_state_dict(complete=False)
        assert dist.get_rank() or same(full, expected), kind
        partial = [tensor for tensor in manager._shadow.values() if isinstance(tensor, PartialTensor)]
        assert kind.startswith("fsdp1") or not partial, kind


def test_every_sharding_averages_alike_and_looks_like_its_weights() -> None:
    ranks.run(4, _every_sharding, tuple(models.PARALLEL))


def _fsdp1_pairs() -> None:
    for kind in ("fsdp1", "fsdp1-flat", "fsdp1-no-shard"):
        model, second = models.build(kind, 2), models.build(kind, 2, seed=5)
        manager, shadow = ShardedModelEMAManager(second, model, 0.9), EMAManager(model, 0.9)
        wander(model)
        for one in (manager, shadow):
            one.update(model)
        state = manager.state_dict()
        assert set(state) == set(models.make().state_dict())
        for key, average in shadow.state_dict().items():
            assert torch.equal(state[key], average), (kind, key)


def test_a_second_model_under_fsdp1_is_paired_by_name_and_region() -> None:
    ranks.run(2, _fsdp1_pairs)


@pytest.mark.parametrize("kind", BOTH)
def test_the_face_is_the_origins(kind: str) -> None:
    model = models.make()
    model[0].bias.requires_grad_(False)
    manager = made(kind, model)
    assert manager.use_distributed_checkpointing is type(manager).use_distributed_checkpointing is True
    assert len(manager) == len(trained(model))
    assert "0.weight" in manager
    assert "_orig_mod.0.weight" in manager
    assert "0.bias" not in manager
    if isinstance(manager, ShardedModelEMAManager):
        assert all(name in manager for name in trained(model))
        assert not manager.ema_model.training
        assert not any(p.requires_grad for p in manager.ema_model.parameters())
        assert set(manager.state_dict()) == set(model.state_dict())
    else:
        assert list(manager._shadow) == list(trained(model))
        state = manager.state_dict()
        state["0.weight"].zero_()
        assert manager._shadow["0.weight"].any()
        assert not manager._shadow["0.weight"].requires_grad


@pytest.mark.parametrize("kind", BOTH)
def test_misuse_raises_the_origins_exceptions(kind: str) -> None:
    for decay in (-0.1, 1.1):
        with pytest.raises(ValueError, match=r"decay must be in \[0, 1\]"):
            made(kind, models.make(), decay)
    manager = made(kind, models.make())
    state = dict(manager.state_dict())
    with pytest.raises(KeyError if kind == "shadow" else RuntimeError, match="unexpected in the state: extra"):
        manager.load_state_dict({**state, "extra": torch.ones(1)})
    with pytest.raises(KeyError if kind == "shadow" else RuntimeError, match=r"missing in the state: 0.weight"):
        manager.load_state_dict({name: value for name, value in state.items() if name != "0.weight"})


def test_models_that_differ_raise_the_origins_exceptions() -> None:
    with pytest.raises(KeyError, match=r"unexpected in the model: 8\.weight"):
        ShardedModelEMAManager(models.make(), nn.Sequential(*models.make(), nn.Linear(4, 2)))
    wider = models.make()
    wider[6] = nn.Linear(1, 5)
    with pytest.raises(ValueError, match=r"'6.weight' has shape \[5, 1\] in the model and \[4, 1\] in its average"):
        ShardedModelEMAManager(models.make(), wider)


@pytest.mark.parametrize(
    "cfg", [None, {"decay": None}, {"decay": None, "implementation": "shadow"}, SimpleNamespace(decay=None)]
)
def test_no_section_or_no_decay_is_no_average(cfg: Any) -> None:
    assert build_ema(cfg, models.make()) is None


class Node:
    """As Automodel's ConfigNode gives itself."""

    def to_dict(self) -> dict[str, Any]:
        return {"decay": "0.75", "implementation": "auto"}


@pytest.mark.parametrize(
    ("cfg", "decay"),
    [
        ({}, 0.9999),
        ({"decay": 0.75}, 0.75),
        (SimpleNamespace(decay=0.75, implementation="shadow"), 0.75),
        (Node(), 0.75),
    ],
)
def test_sections_of_every_kind_are_read(cfg: Any, decay: float) -> None:
    found = build_ema(cfg, models.make())
    assert isinstance(found, EMAManager)
    assert found.decay == decay


def _auto() -> None:
    for sharding, init_mode, expected in (
        ("fsdp2", "hf_backbones", ShardedModelEMAManager),
        ("fsdp2", "auto", EMAManager),
        ("ddp", "hf_backbones", EMAManager),
    ):
        build = lambda sharding=sharding: models.build(sharding, 2)  # noqa: E731
        assert type(build_ema({"decay": 0.9}, build(), build, init_mode)) is expected


def test_auto_is_a_second_model_for_hf_backbones_under_fsdp2() -> None:
    ranks.run(2, _auto)


@pytest.mark.parametrize(
    ("cfg", "says"),
    [
        ({"decay": 0.9, "warmup": 3}, "unknown option.*warmup"),
        ({"decay": 0.9, "implementation": "fast"}, "Unsupported ema.implementation='fast'"),
        ({"decay": 0.9, "implementation": "sharded_model"}, "requires model.init_mode='hf_backbones'"),
        ({"decay": 2}, "decay must be in"),
        ({"decay": "much"}, "could not convert|not a number"),
        ({"decay": []}, "not a number"),
        (3, "ema is a int"),
    ],
)
def test_sections_that_make_no_sense_are_refused(cfg: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build_ema(cfg, models.make())
    with pytest.raises(ValueError, match="build_ema_model"):
        build_ema({"implementation": "sharded_model"}, models.make(), init_mode="hf_backbones")
