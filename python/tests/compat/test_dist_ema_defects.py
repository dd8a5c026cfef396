"""DistEMA: what the origin got wrong, by the numbers of its list."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
import walks
from dist_emas import Awkward, alone, assert_same, expected, made
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardow.compat.dist_ema import DistEMA


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


def test_defect_4_what_has_holes_is_averaged_row_by_row() -> None:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.zeros(8, 8)[::2, ::2])
    ema = DistEMA(model, 2, 0, decay=0.5)
    model.weight.data.copy_(torch.arange(16.0).view(4, 4))
    ema.update(model)
    assert ema.ema_param_list[0].tolist() == [number / 2 for number in range(10)]


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


def test_a_rank_without_a_part_of_it_misses_a_tensor_too() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last), nn.Linear(20, 20))  # type: ignore[call-overload]
    averages = DistEMA(model, 2, 1)
    assert "0.weight" not in averages.name_list
    with pytest.raises(KeyError, match=r"missing in the state: 0\.weight"):
        averages.load_state_dict({name: p for name, p in model.state_dict().items() if name != "0.weight"})


def test_defect_5_buffers_are_exported_where_they_are_asked_for() -> None:
    ranks.run(2, _with_buffers)


def test_defect_6_what_does_not_fit_is_listed_before_anything_changes() -> None:
    _, ema = made()
    state, before = ema.state_dict(), [average.clone() for average in ema.ema_param_list]
    missing = OrderedDict((name, tensor + 1) for name, tensor in state.items() if name != "norm.bias")
    for wrong, message in (
        (missing, "missing in the state: norm.bias"),
        ({**state, "extra": torch.ones(1)}, "unexpected in the state: extra"),
        ({**state, "norm.bias": torch.ones(1)}, r"'norm.bias' has shape \[1\] in the state and \[7\] here"),
        ({**state, "norm.bias": 3}, "'norm.bias' is no tensor in the state"),
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
        (ValueError, ConnectionError),
        match=r"world_size=3, rank=1|this is rank 1 of the 2|'weight' is \(2, 2\)|ranks disagree",
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
        with pytest.raises(kind, match=r"'0\.weight' has shape \[38, 6\] in the model and \[37, 6\] in the averages"):
            ema.update(wider)
        with pytest.raises(kind, match=r"missing in the model: 5\.weight"):
            ema.update(shorter)
        with pytest.raises(kind, match=r"unexpected in the model: 6\.weight"):
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
