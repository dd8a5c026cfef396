"""torch.optim.swa_utils of models that ranks share."""

from __future__ import annotations

import pytest
import ranks
import sharded
import torch
import torch.distributed as dist
from swa_models import ALL, CASES
from torch import nn
from torch.optim import swa_utils as origin

from shardow.compat import swa_utils as ours
from shardow.compat._impl.swapped_model_proxy import SwappedModelProxy


def _shared(kind: str, replicas: str) -> None:
    plain, model = sharded.pair(kind)
    made = [
        (origin.AveragedModel(plain, **case(origin)), ours.AveragedModel(model, **case(ours), replicas=replicas))
        for case in CASES[1:]
    ]
    sharded.train(plain, model, 12, made, "update_parameters")
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
    for number, (theirs, mine) in enumerate(made):
        assert isinstance(mine.module, SwappedModelProxy) == (kind != "ddp" or replicas == "split")
        full, expected = mine.full_state_dict(), theirs.state_dict()
        if dist.get_rank() == 0:
            full = {name.replace("module.module.", "module."): tensor for name, tensor in full.items()}
            assert set(full) == set(expected)
            wrong = [
                name
                for name, tensor in full.items()
                if tensor.is_floating_point() and not torch.equal(tensor, expected[name])
            ]
            assert not wrong, (number, wrong)
            assert int(full["n_averaged"]) == 12
            origin.AveragedModel(plain).load_state_dict(full)
        torch.testing.assert_close(mine(x), theirs(x))
    theirs, mine = made[-1][0], made[2][1]
    if isinstance(mine.module, SwappedModelProxy):
        state = theirs.state_dict()
        state["n_averaged"] = torch.tensor(77)
        mine.load_state_dict({name.replace("module.", "module.module."): tensor for name, tensor in state.items()})
        torch.testing.assert_close(mine(x), theirs(x))
        assert int(mine.n_averaged) == 77
        mine.load_state_dict(made[3][1].state_dict())
        torch.testing.assert_close(mine(x), made[3][0](x))
        lacking = {name: tensor for name, tensor in state.items() if dist.get_rank() != 1 or name != "n_averaged"}
        with pytest.raises((RuntimeError, ConnectionError), match="n_averaged"):
            mine.load_state_dict(lacking)
        torch.testing.assert_close(mine(x), made[3][0](x))
        with pytest.raises(RuntimeError, match="this is another"):
            mine.update_parameters(plain)
    _statistics(plain, model, kind, replicas)


def _statistics(plain: nn.Module, model: nn.Module, kind: str, replicas: str) -> None:
    """update_bn() of the averages leaves the trained model as it was."""
    theirs, mine = origin.AveragedModel(plain), ours.AveragedModel(model, replicas=replicas)
    for _ in sharded.walk(plain, model, 3):
        theirs.update_parameters(plain)
        mine.update_parameters(model)
    next(module for module in model.modules() if isinstance(module, nn.BatchNorm1d)).eval()
    before = [
        *(buffer.clone() for buffer in model.buffers()),
        *(torch.tensor(module.training) for module in model.modules()),
    ]
    loader = [(torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)), None) for seed in range(3)]
    origin.update_bn(loader, theirs)
    ours.update_bn(loader, mine)
    after = [*model.buffers(), *(torch.tensor(module.training) for module in model.modules())]
    assert all(map(torch.equal, before, after))
    full = mine.full_state_dict()
    if full:
        full = {name.replace("module.module.", "module."): tensor for name, tensor in full.items()}
        torch.testing.assert_close(full["module.7.running_mean"], theirs.state_dict()["module.7.running_mean"])
        torch.testing.assert_close(full["module.7.running_var"], theirs.state_dict()["module.7.running_var"])
    x = loader[0][0]
    torch.testing.assert_close(mine.eval()(x), theirs.eval()(x))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("kind", "replicas"), [*((kind, "copy") for kind in sharded.KINDS), ("hsdp", "split"), ("ddp", "split")]
)
def test_sharded_averages_are_the_plain_ones(world: int, kind: str, replicas: str) -> None:
    if not ALL and (world, kind, replicas) not in {
        (2, "fsdp2", "copy"), (2, "ddp", "copy"), (4, "ddp", "split"), (4, "fsdp2", "copy"), (2, "fsdp1", "copy"),
        (4, "hsdp", "split"),
    }:  # fmt: skip
        pytest.skip("of the wider matrix: SHARDOW_ALL=1, as make test-all sets it")
    ranks.run(world, _shared, kind, replicas)
