"""timm's averages of models that ranks share."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks
import sharded
import torch
import torch.distributed as dist
from timm_averages import ALL, origin, state_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardow.compat import timm as ours
from shardow.compat._impl.swapped_model_proxy import SwappedModelProxy as Proxy


def _shared(kind: str, replicas: str, path: str) -> None:
    plain, model = sharded.pair(kind)
    made = [
        (origin.ModelEma(plain, 0.9), ours.ModelEma(model, 0.9, replicas=replicas)),
        (origin.ModelEmaV2(plain, 0.9), ours.ModelEmaV2(model, 0.9, replicas=replicas)),
        (origin.ModelEmaV3(plain, 0.9), ours.ModelEmaV3(model, 0.9, replicas=replicas)),
        (
            origin.ModelEmaV3(plain, 0.9, exclude_buffers=True),
            ours.ModelEmaV3(model, 0.9, exclude_buffers=True, replicas=replicas),
        ),
    ]
    assert all(isinstance(average[1].module, Proxy) == (kind != "ddp" or replicas == "split") for average in made)
    sharded.train(plain, model, 25, made)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
    for number, (theirs, mine) in enumerate(made):
        full = {name.replace("module.", ""): tensor for name, tensor in mine.full_state_dict().items()}
        expected = {name.removeprefix("module."): tensor for name, tensor in state_of(theirs).items()}
        if dist.get_rank() == 0 or not isinstance(mine.module, Proxy):
            assert set(full) == set(expected)
            for name, tensor in full.items():
                assert torch.equal(tensor, expected[name]) or not tensor.is_floating_point(), (number, name)
        module = theirs.ema if number == 0 else theirs.module
        torch.testing.assert_close(mine.module(x), module(x))
        if dist.get_rank() == 0:
            torch.save(
                {"epoch": 3, "ema_state_dict": {f"module.{name}": tensor for name, tensor in expected.items()}},
                f"{path}/{number}.pt",
            )
            module.load_state_dict(full)
        if isinstance(mine.module, Proxy):
            with mine.module.ema.swapped():
                torch.testing.assert_close(model.eval()(x), module(x))
            model.train()
    dist.barrier()
    resumed = ours.ModelEma(model, 0.9, resume=f"{path}/1.pt", replicas=replicas)
    again = {name.replace("module.", ""): tensor for name, tensor in resumed.full_state_dict().items()}
    for name, tensor in again.items():
        assert torch.equal(tensor, made[1][0].module.state_dict()[name]) or not tensor.is_floating_point(), name
    whole = {f"module.{name}": tensor for name, tensor in made[3][0].module.state_dict().items()}
    made[2][1].load_state_dict(
        {f"module.{name}": tensor for name, tensor in whole.items()} if kind == "ddp" and replicas == "copy" else whole
    )
    torch.testing.assert_close(made[2][1](x), made[3][0](x))
    before = resumed.full_state_dict()
    state = {name: tensor for name, tensor in whole.items() if dist.get_rank() != 1 or not name.endswith("0.weight")}
    with pytest.raises((RuntimeError, ConnectionError), match=r"0\.weight"):
        ours.load_ema_state_dict(resumed.ema, {"ema_state_dict": state})
    with pytest.raises((RuntimeError, ConnectionError), match=r"none of the|rank 1"):
        ours.load_ema_state_dict(
            resumed.ema, {"ema_state_dict": whole if dist.get_rank() != 1 else {"x": torch.ones(1)}}
        )
    after = resumed.full_state_dict()
    assert [name for name in before if not torch.equal(after[name], before[name])] == []


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("kind", "replicas"), [*((kind, "copy") for kind in sharded.KINDS), ("hsdp", "split"), ("ddp", "split")]
)
def test_sharded_averages_are_the_plain_ones(world: int, kind: str, replicas: str, tmp_path: Path) -> None:
    if not ALL and (world, kind, replicas) not in {
        (2, "fsdp2", "copy"), (2, "ddp", "copy"), (4, "ddp", "split"), (4, "fsdp2", "copy"), (2, "fsdp1", "copy"),
        (4, "hsdp", "split"),
    }:  # fmt: skip
        pytest.skip("of the wider matrix: SHARDOW_ALL=1, as make test-all sets it")
    ranks.run(world, _shared, kind, replicas, str(tmp_path))


def _rounded(kind: str) -> dict[str, torch.Tensor]:
    plain, model = sharded.pair(kind, torch.bfloat16)
    with pytest.warns(UserWarning, match="noise"):
        ema = ours.ModelEmaV3(model, 0.999, stochastic_rounding_seed=3, replicas="split")
    for _ in sharded.walk(plain, model, 12):
        ema.update(model)
    return {name: tensor.float() for name, tensor in ema.full_state_dict().items()}


def test_stochastic_rounding_is_the_same_at_any_world_size() -> None:
    first = ranks.run(1, _rounded, "fsdp2")[0]
    assert first["module.0.weight"].numel() == 42
    for world, kind in ((2, "fsdp2"), (4, "fsdp2"), (2, "ddp"), (4, "hsdp")):
        found = ranks.run(world, _rounded, kind)[0]
        assert all(torch.equal(found[name], tensor) for name, tensor in first.items()), (world, kind)


def _complex_weights() -> None:
    class Wave(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))
            self.scale = nn.Parameter(torch.ones(4))

    model = DistributedDataParallel(Wave())
    with pytest.raises(NotImplementedError, match=r"'phase' is torch\.complex64"):
        ours.ModelEmaV2(model, replicas="split")


def test_complex_weights_are_refused_where_ranks_share_averages() -> None:
    ranks.run(2, _complex_weights)
