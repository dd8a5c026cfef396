"""compat.dist_ema: DistEMA against its own recursion on a whole model, its files, and what the origin got wrong."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import models
import pytest
import ranks
import sharded
import torch
import torch.distributed as dist
import walks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardow
from shardow.compat import dist_ema
from shardow.compat.dist_ema import DistEMA

OPTIONS: dict[str, dict[str, Any]] = {
    "constant": {"decay": 0.999},
    "warm": {"warmup": True, "power": 2 / 3},
    "warm later": {"decay": 0.99, "warmup": True, "power": 0.75, "min_decay": 0.25, "inv_gamma": 3.0, "update_after_step": 40},
    "late without warm-up": {"decay": 0.9, "update_after_step": 40},
}


class Dense:
    """The origin's recursion, every element on one rank."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.options = {
            "decay": 0.999,
            "warmup": False,
            "power": None,
            "min_decay": 0.0,
            "inv_gamma": 1.0,
            "update_after_step": 0,
            **options,
        }
        self.averages = OrderedDict((name, p.detach().clone().float()) for name, p in model.named_parameters())
        self.steps = 0

    def decay(self) -> float:
        o = self.options
        if not o["warmup"]:
            return float(o["decay"])
        step = max(0, self.steps - o["update_after_step"] - 1)
        return float(max(o["min_decay"], min(1 - (1 + step / o["inv_gamma"]) ** -o["power"], o["decay"])))

    @torch.no_grad()
    def update(self, model: nn.Module, decay: float | None = None) -> None:
        decay = self.decay() if decay is None else decay
        for name, p in model.named_parameters():
            self.averages[name].mul_(decay).add_(p.detach(), alpha=1.0 - decay)
        self.steps += 1


def alone() -> tuple[int, int]:
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor), name


def follow(name: str, dtype: torch.dtype, options: tuple[str, ...], steps: int) -> None:
    """Every set of options watches one walk of a replicated model."""
    world, rank = alone()
    model = walks.model(name, dtype)  # convolutions are channels_last
    emas = {key: DistEMA(model, world, rank, **OPTIONS[key]) for key in options}
    denses = {key: Dense(model, **OPTIONS[key]) for key in options}
    for step in walks.walk(model, name, steps):
        decay = 0.5 if step == 77 else None
        for key, ema in emas.items():
            assert ema.get_decay() == denses[key].decay()
            ema.update(model, decay)
            denses[key].update(model, decay)
    total = sum(p.numel() for p in model.parameters())
    for key, ema in emas.items():
        assert ema.decay_steps == steps
        assert sum(one.numel() for one in ema.ema_param_list) <= -(-total // world)
        assert [a.numel() for a in ema.ema_param_list] == [last - first + 1 for first, last in ema.index_list]
        found = ema.state_dict(everywhere=True)
        assert_same(found, denses[key].averages)
        given = ema.state_dict(None)
        assert_same(given, found) if rank == 0 else assert_same(given, {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", walks.NAMES)
def test_averages_of_one_rank_are_the_origin_s_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    follow(name, dtype, tuple(OPTIONS), walks.STEPS)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", walks.NAMES)
def test_averages_of_many_ranks_are_the_origin_s_bit_for_bit(name: str, world: int) -> None:
    ranks.run(
        world, follow, name, torch.float32, tuple(OPTIONS) if os.environ.get("SHARDOW_ALL") else ("constant", "warm later"), walks.STEPS
    )


def follow_shared(world: int, kinds: tuple[str, ...], name: str, steps: int) -> None:
    model = sharded.whole(name)
    shared = [sharded.copied(kind, model, world) for kind in kinds]
    setters = [sharded.setter(one, model) for one in shared]
    emas = [DistEMA(one, *alone(), **OPTIONS["warm"]) for one in shared]
    dense = Dense(model, **OPTIONS["warm"])
    for _ in walks.walk(model, name, steps):
        for set_, ema, one in zip(setters, emas, shared, strict=True):
            set_()
            ema.update(one)
        dense.update(model)
    for kind, one, ema in zip(kinds, shared, emas, strict=True):
        found = ema.state_dict(everywhere=True)
        if kind != "fsdp1-flat":
            assert list(found) == [key for key, _ in one.named_parameters()]
        fresh = DistEMA(model, *alone(), **OPTIONS["warm"])
        fresh.load_state_dict(found)
        assert_same(fresh.state_dict(everywhere=True), dense.averages)


@pytest.mark.parametrize(
    ("world", "kinds", "steps"),
    [(2, ("fsdp2", "ddp"), 200), (4, ("hsdp", "fsdp1", "fsdp1-flat", "ddp"), 40)]
    if not os.environ.get("SHARDOW_ALL")
    else [(world, sharded.kinds(world), walks.STEPS) for world in (2, 4)],
)
@pytest.mark.parametrize("name", walks.NAMES)
def test_sharded_models_have_the_same_averages(name: str, world: int, kinds: tuple[str, ...], steps: int) -> None:
    ranks.run(world, follow_shared, world, kinds, name, steps)


def test_the_partition_is_the_origin_s() -> None:
    """n = ceil(P / N) elements a rank, whatever parameter they belong to; also without torch.distributed."""
    model = walks.model("mlp")
    elements = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    for world in (1, 2, 3, 5, 7):
        each = -(-len(elements) // world)
        for rank in range(world):
            ema = DistEMA(model, world, rank)
            assert torch.equal(torch.cat([torch.empty(0), *ema.ema_param_list]), elements[rank * each : (rank + 1) * each])
            named = dict(model.named_parameters())
            for name, (first, last), average in zip(ema.name_list, ema.index_list, ema.ema_param_list, strict=True):
                assert torch.equal(average, named[name].detach().reshape(-1)[first : last + 1])
    with pytest.raises(ValueError, match=r"init_process_group\(\) before"):
        ema.state_dict(None)


def test_options_are_kept_as_attributes_and_in_the_config() -> None:
    model = nn.Linear(2, 2)
    options = {"dtype": "bf16", "decay": 0.9, "warmup": True, "power": 0.5, "min_decay": 0.1, "inv_gamma": 2.0, "update_after_step": 3}
    ema = DistEMA(model, 1, 0, "bf16", 0.9, True, 0.5, 0.1, 2.0, 3)
    ema.set_decay_steps(7)
    assert ema.config == {**options, "decay_steps": 7}
    assert all(getattr(ema, key) == value for key, value in options.items())
    assert ema.torch_dtype == dist_ema.PRECISION_TO_TYPE["bf16"] == torch.bfloat16
    assert ema.model is model
    dist_ema.requires_grad(model, False)
    assert not any(p.requires_grad for p in model.parameters())
    dist_ema.requires_grad(model)
    assert all(p.requires_grad for p in model.parameters())
    with torch.no_grad():
        model.weight.fill_(3)
    ema.build_ema_model()
    assert ema.ema_param_list[0].tolist() == [3] * 4


def test_a_model_whose_tensors_are_replaced_is_followed() -> None:
    model = walks.model("mlp")
    ema, dense = DistEMA(model, 1, 0, decay=0.5), Dense(model)
    for watched in (model, walks.model("mlp"), torch.compile(walks.model("mlp"), backend="eager")):
        with torch.no_grad():
            for p in watched.parameters():
                p.data = p.data + 1
        ema.update(watched)
        for name, p in zip(dense.averages, watched.parameters(), strict=True):
            dense.averages[name].mul_(0.5).add_(p.detach(), alpha=0.5)
    assert_same(ema.state_dict(), dense.averages)


# ---- what the origin got wrong, by the numbers of its list


class Awkward(nn.Module):
    """A number, nothing, many dimensions, strides of its own, statistics."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.number = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.randn(0, 3))
        self.conv = nn.Conv2d(3, 5, (3, 2)).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(4, 3, 2).permute(2, 0, 1))
        self.norm = nn.BatchNorm1d(7)


def made(**options: Any) -> tuple[Awkward, DistEMA]:
    model = Awkward()
    ema = DistEMA(model, *alone(), **{"decay": 0.5, "warmup": True, "power": 0.75, **options})
    for seed in range(1, 5):
        with torch.no_grad():
            for p, new in zip(model.parameters(), Awkward(seed).parameters(), strict=True):
                p.copy_(new)
            model.norm.running_mean.fill_(seed)
        ema.update(model)
    return model, ema


def expected() -> OrderedDict[str, torch.Tensor]:
    model = Awkward()
    dense = Dense(model, decay=0.5, warmup=True, power=0.75)
    for seed in range(1, 5):
        dense.update(Awkward(seed))
    return dense.averages


def _resumes(path: str) -> None:
    model, ema = made()
    whole = ema.state_dict()
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "ema": {"model": whole, "config": ema.config}}, path)
    dist.barrier()
    _resume(path)


def _resume(path: str) -> None:
    for state in (torch.load(path)["ema"], torch.load(path)["ema"]["model"]):
        fresh = DistEMA(Awkward(9), *alone(), decay=0.5, warmup=True, power=0.75)
        fresh.load_state_dict(state)
        assert_same(fresh.state_dict(everywhere=True), expected())
        assert fresh.decay_steps == (4 if "config" in state else 0)


@pytest.mark.parametrize("world", [2, 4])
def test_defects_1_and_4_every_shape_and_stride_is_averaged_saved_and_loaded(world: int, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint.pt")
    ranks.run(world, _resumes, path)
    ranks.run(6 - world, _resume, path)
    _resume(path)


def test_defect_4_what_has_holes_is_refused() -> None:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.randn(8, 8)[::2, ::2])
    with pytest.raises(NotImplementedError, match=r"'weight' of shape \(4, 4\) and strides .* has holes"):
        DistEMA(model, 1, 0)


def test_defect_2_a_warm_up_without_power_is_refused_at_once() -> None:
    for kind in (TypeError, ValueError):
        with pytest.raises(kind, match="warmup=True needs a power: 2 / 3"):
            DistEMA(nn.Linear(2, 2), 1, 0, warmup=True)


class Nine(nn.Module):
    """With 4 ranks: 3, 3, 3 and none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.arange(4.0).view(2, 2)), nn.Parameter(torch.arange(5.0))


def _last_is_empty(path: str) -> None:
    model = Nine()
    ema = DistEMA(model, *alone(), decay=0.5)
    assert bool(ema.name_list) == bool(ema.ema_param_list) == bool(ema.index_list) == (dist.get_rank() < 3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(2)
    ema.update(model)
    ema.save(path)
    ema.load_state_dict(ema.state_dict(everywhere=True))
    ema.load(path)
    found = ema.state_dict(dist.new_group(backend="gloo"))
    assert not found or torch.equal(found["b"], torch.arange(5.0) + 1)


def test_defect_3_a_rank_may_have_nothing(tmp_path: Path) -> None:
    ranks.run(4, _last_is_empty, str(tmp_path / "nine.safetensors"))


def _with_buffers() -> None:
    model, ema = made()
    complete = ema.state_dict(buffers=True)
    if dist.get_rank() == 0:
        fresh = Awkward()
        fresh.load_state_dict(complete)
        assert fresh.norm.running_mean.tolist() == [4] * 7
        assert_same(dict(fresh.named_parameters()), expected())
    ema.load_state_dict(ema.state_dict(everywhere=True, buffers=True))
    wrapped = DistEMA(DistributedDataParallel(model), *alone())
    assert all(key.startswith("module.") for key in wrapped.state_dict(everywhere=True, buffers=True))


def test_defect_5_buffers_are_exported_where_they_are_asked_for() -> None:
    ranks.run(2, _with_buffers)


def test_defect_6_what_does_not_fit_is_listed_before_anything_changes() -> None:
    _, ema = made()
    state, before = ema.state_dict(), [average.clone() for average in ema.ema_param_list]
    missing = OrderedDict((name, tensor + 1) for name, tensor in state.items() if name != "norm.bias")
    for wrong, message in (
        (missing, "missing 'norm.bias'"),
        ({**state, "extra": torch.ones(1)}, "unexpected 'extra'"),
        ({**state, "norm.bias": torch.ones(1)}, r"'norm.bias' has shape \(1,\), expected \(7,\)"),
        ({**state, "norm.bias": 3}, "'norm.bias' is a int, not a whole tensor"),
        ({"model": state, "config": {**ema.config, "decay": 0.9}}, r"saved with decay=0.9 \(here 0.5\)"),
        ({"model": state, "config": {}}, "dtype=None"),
        ({"model": state, "config": {**ema.config, "decay_steps": -1}}, "decay_steps=-1"),
    ):
        with pytest.raises(ValueError, match=message):
            ema.load_state_dict(wrong)
    with pytest.raises(KeyError, match="missing"):
        ema.load_state_dict(missing)
    assert all(torch.equal(a, b) for a, b in zip(ema.ema_param_list, before, strict=True))
    assert ema.decay_steps == 4
    ema.load_state_dict({f"module.{name}": tensor for name, tensor in state.items()})


def _disagree(case: str) -> None:
    world, rank = alone()
    model = nn.Linear(2, 2 + (case == "shapes" and rank))
    world = world + 1 if case == "world" and rank else world
    rank = 0 if case == "rank" else rank
    decay = 0.9 if case == "options" and rank else 0.99
    with pytest.raises(
        (ValueError, ConnectionError), match=r"world_size=3, rank=1|this is rank 1 of the 2|'weight' is \(2, 2\)|ranks disagree"
    ):
        DistEMA(model, world, rank, decay=decay)


@pytest.mark.parametrize("case", ["world", "rank", "shapes", "options"])
def test_defect_7_ranks_that_disagree_are_refused_on_all(case: str) -> None:
    ranks.run(2, _disagree, case)


def test_defect_7_another_model_is_refused_before_anything_changes() -> None:
    ema = DistEMA(walks.model("mlp"), 1, 0)
    before = [average.clone() for average in ema.ema_param_list]
    wider, shorter = walks.model("mlp"), walks.model("mlp")[:-1]
    wider[0] = nn.Linear(6, 38)
    for kind in (KeyError, ValueError):
        with pytest.raises(kind, match=r"'0\.weight' was \(37, 6\)"):
            ema.update(wider)
        with pytest.raises(kind, match=r"'5\.weight' is gone"):
            ema.update(shorter)
        with pytest.raises(kind, match=r"'6\.weight' has no average"):
            ema.update(nn.Sequential(*walks.model("mlp"), nn.Linear(3, 3)))
    assert all(torch.equal(a, b) for a, b in zip(ema.ema_param_list, before, strict=True))


def stalls(dtype: str, world: int, rank: int) -> DistEMA:
    """Weights at 2, averages from 1, a decay at which rounding to nearest moves nothing."""
    model = nn.Linear(90, 90)
    for p in model.parameters():
        nn.init.ones_(p)
    ema = DistEMA(model, world, rank, dtype, 0.9999, seed=3)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(2)
    for _ in range(200):
        ema.update(model)
    return ema


def _same_noise(dtype: str) -> list[torch.Tensor]:
    return list(stalls(dtype, *alone()).state_dict().values())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_defect_8_averages_in_16_bits_do_not_stall_and_are_the_same_on_any_number_of_ranks(dtype: str) -> None:
    ema = stalls(dtype, 1, 0)
    whole = list(ema.state_dict().values())
    assert all(tensor.dtype == ema.torch_dtype for tensor in whole)
    assert abs(float(whole[0].double().mean()) - (2 - 0.9999**200)) < 2e-3
    for there, here in zip(ranks.run(2, _same_noise, dtype)[0], whole, strict=True):
        assert torch.equal(there, here)


def test_noise_goes_on_where_it_was_after_a_resume() -> None:
    ema, resumed = stalls("bf16", 1, 0), stalls("bf16", 1, 0)
    state = {"model": ema.state_dict(), "config": {**ema.config, "decay_steps": 77}}
    for one in (ema, resumed):
        one.load_state_dict(state)
        for _ in range(30):
            one.update(one.model)
    fresh = DistEMA(ema.model, 1, 0, "bf16", 0.9999, seed=3)
    fresh.load_state_dict(state)
    for _ in range(30):
        fresh.update(ema.model)
    assert ema.decay_steps == fresh.decay_steps == 107
    assert_same(ema.state_dict(), fresh.state_dict())
    assert_same(ema.state_dict(), resumed.state_dict())


# ---- files, misuse


def _saves(path: str, kind: str) -> None:
    _, ema = made()
    ema.save(path)
    other = models.PARALLEL[kind](sharded.whole("mlp"), dist.get_world_size())
    DistEMA(other, *alone(), decay=0.75).save(f"{path}.{kind}")


def _loads(path: str, kind: str) -> None:
    ema = DistEMA(Awkward(8), *alone(), decay=0.5, warmup=True, power=0.75)
    ema.load(path)
    assert ema.decay_steps == 4
    assert_same(ema.state_dict(everywhere=True), expected())
    with pytest.raises(ValueError, match="saved with warmup=True"):
        DistEMA(Awkward(8), *alone(), decay=0.5).load(path)
    with pytest.raises(ValueError, match="not a saved DistEMA"):
        ema.load(f"{path}.weights")
    with pytest.raises(ValueError, match=r"norm\.bias"):
        DistEMA(nn.Linear(1, 1), *alone(), decay=0.5, warmup=True, power=0.75).load(path)
    mlp = DistEMA(sharded.whole("mlp"), *alone(), decay=0.75)
    whole = mlp.state_dict(everywhere=True)
    for average in mlp.ema_param_list:
        average.zero_()
    mlp.load(f"{path}.{kind}")
    assert_same(mlp.state_dict(everywhere=True), whole)


@pytest.mark.parametrize(("kind", "before", "after"), [("fsdp2", 2, 4), ("hsdp", 4, 2)])
def test_every_rank_writes_its_own_and_any_number_of_ranks_reads_it(kind: str, before: int, after: int, tmp_path: Path) -> None:
    path = str(tmp_path / "ema.safetensors")
    shardow.save({"a": torch.ones(1)}, f"{path}.weights")
    ranks.run(before, _saves, path, kind)
    ranks.run(after, _loads, path, kind)
    assert_same(OrderedDict((name, shardow.open(path)[name]) for name in expected()), expected())


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((1, 0, "fp8"), KeyError, "dtype='fp8'; it must be one of 'fp32'"),
        ((0, 0), ValueError, "world_size=0"),
        ((2, 2), ValueError, "rank=2; with world_size=2"),
        ((1, 0, "fp32", 1.5), ValueError, "decay=1.5"),
        ((1, 0, "fp32", 0.9, True, 0.5, 0.0, 0.0), ValueError, r"inv_gamma=0.0"),
    ],
)
def test_misuse_is_told(arguments: tuple[Any, ...], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        DistEMA(nn.Linear(2, 2), *arguments)


def test_a_decay_outside_of_its_range_is_told() -> None:
    ema = DistEMA(nn.Linear(2, 2), 1, 0)
    with pytest.raises(ValueError, match="decay=2"):
        ema.update(ema.model, 2)
