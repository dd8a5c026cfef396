"""Weights that are strided, and tensors that are not averaged.

Whatever they are, averages are those of a model that has its elements one after another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

import shardow


def conv(strided: bool, seed: int = 5) -> nn.Module:
    """Channels last, a transposed matrix, one in the middle of a wider one, and one whose memory has the other sign."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 5, 3), nn.Linear(7, 4, bias=False), nn.Linear(4, 5))
    if strided:
        model.to(memory_format=torch.channels_last)
        model[2].weight.data = model[2].weight.data.t().contiguous().t()
        wide = torch.zeros(5, 9)
        wide[:, 2:6] = model[3].weight.data
        model[3].weight.data = wide[:, 2:6]
        model[3].bias.data = torch._neg_view(model[3].bias.data.neg())
        assert model[3].bias.is_neg()
        assert not any(p.is_contiguous() for p in model.parameters() if p.ndim > 1)
    return model


def strides(model: nn.Module) -> list[tuple[int, ...]]:
    return [p.stride() for p in model.parameters()]


def train(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i)))


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def run(directory: str, wrap: Any, replicas: str) -> None:
    """A strided model beside a contiguous one, through everything that an EMA does."""
    models = [wrap(conv(False)), wrap(conv(True))]
    before = strides(models[1])
    plain, strided = (shardow.EMA(model, decay=0.9, stochastic=True, replicas=replicas) for model in models)
    for step in range(3):
        for model, ema in zip(models, (plain, strided), strict=True):
            train(model, step)
            ema.update()
    same(strided.full_state_dict(complete=True), plain.full_state_dict(complete=True))
    weights = {name: p.detach().clone() for name, p in models[1].named_parameters()}
    with strided.swapped(), plain.swapped():
        assert strides(models[1]) == before
        same(dict(models[1].named_parameters()), dict(models[0].named_parameters()))
        assert not torch.equal(next(models[1].parameters()), next(iter(weights.values())))
    same(dict(models[1].named_parameters()), weights)
    assert strides(models[1]) == before
    assert strided.distance() == pytest.approx(plain.distance())
    strided.save(f"{directory}/a.safetensors")
    strided.export(f"{directory}/b.safetensors", dtype="float32")
    plain.load(f"{directory}/a.safetensors")
    same(strided.full_state_dict(), plain.full_state_dict())
    for model, ema in zip(models, (plain, strided), strict=True):
        train(model, 9)
        ema.update()
    same(strided.full_state_dict(), plain.full_state_dict())
    strided.load(f"{directory}/a.safetensors")
    strided.copy_to(models[1])
    assert strides(models[1]) == before
    full = strided.full_state_dict(complete=True)
    if full:  # on rank 0
        same(dict(shardow.open(f"{directory}/b.safetensors").items()), full)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_weights_are_averaged_as_contiguous_ones(tmp_path: Path, dtype: torch.dtype) -> None:
    run(str(tmp_path), lambda model: model.to(dtype), "split")


def on_ranks(directory: str) -> None:
    for replicas in ("split", "copy"):
        run(directory, DistributedDataParallel, replicas)


def test_strided_weights_are_divided_among_replicas(tmp_path: Path) -> None:
    ranks.run(2, on_ranks, str(tmp_path))


def test_memory_that_becomes_strided_is_followed() -> None:
    models = [nn.Conv2d(4, 6, 3), nn.Conv2d(4, 6, 3)]
    models[1].load_state_dict(models[0].state_dict())
    emas = [shardow.EMA(model, decay=0.5) for model in models]
    for step in range(3):
        for model, ema in zip(models, emas, strict=True):
            train(model, step)
            ema.update()
        models[1].to(memory_format=torch.channels_last if step == 0 else torch.contiguous_format)
    same(emas[1].full_state_dict(), emas[0].full_state_dict())


def test_expanded_weights_are_refused() -> None:
    model = nn.Linear(3, 4, bias=False)
    model.weight.data = torch.ones(1, 3).expand(4, 3)
    with pytest.raises(
        NotImplementedError, match=r"'weight' of shape \(4, 3\) has strides \(0, 1\): some of its elements share memory"
    ):
        shardow.EMA(model)


def test_weights_that_become_expanded_are_refused_when_they_are_averaged() -> None:
    model = nn.Linear(3, 4, bias=False)
    ema = shardow.EMA(model)
    model.weight.data = torch.ones(1, 3).expand(4, 3)
    with pytest.raises(NotImplementedError, match=r"'weight'.*share memory"):
        ema.update()


# ---- what is not averaged


def odd_model() -> nn.Module:
    """A weight among what has no elements of its own, and what has them in any order."""
    model = nn.Linear(3, 2)
    model.two = nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3) * 2), requires_grad=False)
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_buffer("expanded", torch.arange(3.0).expand(4, 3))  # which no memory can be copied into
    model.register_buffer("image", torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    model.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
    return model


def test_what_has_no_memory_is_in_nobodys_swap() -> None:
    other, ema = shardow.EMA(nn.Linear(3, 2), decay=0.5), shardow.EMA(odd_model(), decay=0.5)
    with other.swapped():
        assert ema.full_state_dict()["sparse"].layout is torch.sparse_coo


def test_what_is_not_averaged_may_be_what_it_likes(tmp_path: Path) -> None:
    model = odd_model()
    ema = shardow.EMA(model, decay=0.5)
    with torch.no_grad():
        model.weight.mul_(3)
    ema.update()
    with ema.swapped():
        state = {name: value.clone() for name, value in model.state_dict().items()}
    full = ema.full_state_dict(complete=True)
    assert set(full) == set(model.state_dict())
    assert full["sparse"].layout is torch.sparse_coo
    assert torch.equal(full["sparse"].to_dense(), torch.eye(3))
    assert type(full["two"]) is TwoTensor
    for name in ("weight", "bias", "expanded", "image", "turned"):
        assert torch.equal(full[name], state[name]), name
    other = odd_model()
    other.expanded = other.expanded.clone()  # torch itself loads nothing into expanded memory
    other.load_state_dict(full)
    ema.save(tmp_path / "a.safetensors")
    ema.load(tmp_path / "a.safetensors")
    other = odd_model()
    with pytest.raises(NotImplementedError, match=r"'expanded'.*some of its elements share memory"):
        ema.copy_to(other)
    other.expanded = other.expanded.clone()
    with pytest.warns(
        UserWarning, match=r"copy_to\(\) leaves the other model's own: 'two' is a TwoTensor.*'sparse' of shape"
    ):
        ema.copy_to(other)
    assert torch.equal(other.weight, full["weight"])
    with pytest.raises(NotImplementedError, match=r"'two' is a TwoTensor.*no memory of its own"):
        ema.export(tmp_path / "b.safetensors", dtype="float32")
    assert not (tmp_path / "b.safetensors").exists()


def test_memory_that_elements_share_is_not_loaded_into(tmp_path: Path) -> None:
    model = odd_model()
    del model.two, model.sparse
    shardow.save(model, tmp_path / "a.safetensors")
    with pytest.raises(NotImplementedError, match=r"'expanded'.*some of its elements share memory"):
        shardow.load(model, tmp_path / "a.safetensors")
    assert set(shardow.full_state_dict(model)) == set(model.state_dict())
    model.expanded = model.expanded.clone()
    shardow.load(model, tmp_path / "a.safetensors")


def test_strided_buffers_are_exported(tmp_path: Path) -> None:
    model = odd_model()
    del model.two, model.sparse
    shardow.EMA(model, decay=0.5).export(tmp_path / "b.safetensors", dtype="float32")
    same(dict(shardow.open(tmp_path / "b.safetensors").items()), model.state_dict())


def test_strides_are_kept_by_materialize() -> None:
    with shardow.meta_init():
        model = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    shardow.materialize(model, conv_state := nn.Conv2d(4, 6, 3).state_dict())
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    same(dict(model.named_parameters()), conv_state)


# ---- weights that are unfrozen or added later


def half_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("by", ["update", "swapped"])
def test_unfrozen_weights_are_said_once(by: str, recwarn: pytest.WarningsRecorder) -> None:
    model = half_frozen()
    ema = shardow.EMA(model)
    ema.update()
    with ema.swapped():
        pass
    assert not recwarn.list
    model[0].bias.requires_grad_(True)
    with pytest.warns(UserWarning, match=r"^0\.bias: frozen when this EMA was made, trained now.*strict=False"):
        ema.update() if by == "update" else ema.swapped().__enter__()
    if by == "update":
        ema.update()
        assert not recwarn.list


def test_a_new_ema_takes_in_unfrozen_and_added_weights() -> None:
    model = half_frozen()
    old = shardow.EMA(model, decay=0.5)
    with torch.no_grad():
        model[1].weight.add_(1)
    old.update()
    model[0].requires_grad_(True)
    model.append(nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match=r"'2\.weight' has been added.*load_state_dict\(old\.state_dict\(\), strict=False\)"
    ):
        old.update()
    new = shardow.EMA(model, decay=0.5)
    with pytest.raises(ValueError, match=r"missing in the state: 0\.weight"):
        new.load_state_dict(old.state_dict())
    report = new.load_state_dict(old.state_dict(), strict=False)
    assert report == {"missing": ["0.weight", "0.bias", "2.weight", "2.bias"], "unexpected": []}
    assert new.stats()["step"] == 1
    found = new.full_state_dict(complete=False)
    with pytest.warns(UserWarning, match=r"0\.weight, 0\.bias: frozen"):
        was = old.full_state_dict(complete=False)
    assert torch.equal(found["1.weight"], was["1.weight"])
    assert torch.equal(found["0.weight"], model[0].weight)
    back = shardow.EMA(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), decay=0.5)
    report = back.load_state_dict(new.state_dict(), strict=False)
    assert report == {"missing": [], "unexpected": ["2.weight", "2.bias"]}
    with pytest.raises(ValueError, match=r"'0\.weight' has shape \[4, 3\] in the state and \[5, 3\] here"):
        shardow.EMA(nn.Sequential(nn.Linear(3, 5)), decay=0.5).load_state_dict(new.state_dict())


def test_strided_weights_first_seen_in_inference_mode_are_averaged_afterwards() -> None:
    model = conv(False)
    ema = shardow.EMA(model, 0.5)
    model[2].weight.data = model[2].weight.data.t().contiguous().t()
    with torch.inference_mode():
        ema.update()
    train(model, 1)
    ema.update()
    with ema.swapped():
        pass
    assert ema.step == 2
