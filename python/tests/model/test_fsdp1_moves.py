"""Parameters of FSDP1 that are put elsewhere.

FSDP takes over what is there in its next forward only, so until then nothing may be averaged, saved or swapped.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import models
import pytest
import ranks
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import shardow

KINDS = ("fsdp1", "fsdp1-no-shard", *(("fsdp1-grad-op", "fsdp1-hybrid") if os.environ.get("SHARDOW_ALL") else ()))


def _forward(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(4, models.INPUTS))


def _kept(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Names and places of weights that this rank has something of."""
    return [
        (f"{name}.{key}".replace("_fsdp_wrapped_module.", ""), module, key)
        for name, module in model.named_modules()
        for key, p in module._parameters.items()
        if isinstance(p, nn.Parameter) and p.numel() and not isinstance(module, FullyShardedDataParallel)
    ]


def _put_data(module: nn.Module, key: str, value: float) -> None:
    p = module._parameters[key]
    assert p is not None
    p.data = torch.full_like(p, value)


def _put_parameter(module: nn.Module, key: str, value: float) -> None:
    p = module._parameters[key]
    assert p is not None
    module._parameters[key] = nn.Parameter(torch.full_like(p, value))


def _average(ema: shardow.EMA, name: str) -> torch.Tensor:
    return getattr(ema.state_dict()["averages"][name], "local", ema.state_dict()["averages"][name]).clone()


def _refuses(kind: str, forward: bool, put: Callable[[nn.Module, str, float], None], path: str) -> None:
    model = models.PARALLEL[kind](models.make().eval(), 2)
    if forward:
        _forward(model)
    ema = shardow.EMA(model, 0.5, replicas="copy")
    name, module, key = _kept(model)[-1]
    before = _average(ema, name)
    put(module, key, 7.0)
    way_out = rf"'{name}' .*(forward.*summon_full_params|new EMA)"
    with pytest.raises(shardow.Error, match=way_out):
        ema.update()
    with pytest.raises(shardow.Error, match=rf"'{name}'|another rank|rank \d"):
        ema.swap_in()
    with pytest.raises(shardow.Error, match=r"put elsewhere"):
        shardow.save(model, path)
    assert not os.path.exists(path)
    torch.testing.assert_close(_average(ema, name), before, rtol=0, atol=0)
    assert torch.equal(module._parameters[key].data, torch.full_like(module._parameters[key], 7.0)), (
        "what was put there is gone"
    )
    _forward(model)
    if put is _put_data:
        ema.update()
        torch.testing.assert_close(_average(ema, name), 0.5 * before + 3.5)
    else:
        with pytest.raises(shardow.Error, match=rf"'{name}' has been replaced.*new EMA"):
            ema.update()
        torch.testing.assert_close(_average(shardow.EMA(model, replicas="copy"), name), torch.full_like(before, 7.0))


def _refuses_what_fsdp_forgets(path: str) -> None:
    """The memory of a flat parameter itself, after the first forward: FSDP goes back to its own."""
    model = models.PARALLEL["fsdp1-flat"](models.make().eval(), 2)
    _forward(model)
    ema = shardow.EMA(model, 0.5)
    model.double()
    model.float()
    ema.update()  # the same values: nothing is lost
    flat = model._handle.flat_param
    flat.data = flat.data + 1.0
    with pytest.raises(shardow.Error, match=r"flat parameter of '.*first forward.*summon_full_params"):
        ema.update()
    with pytest.raises(shardow.Error, match=r"flat parameter"):
        shardow.save(model, path)


def _goes_on_elsewhere() -> None:
    """What is not put elsewhere is not refused: training, evaluation, whole weights in between."""
    for kind in KINDS:
        model = models.PARALLEL[kind](models.make(), 2)
        ema = shardow.EMA(model, 0.5)
        for _ in range(2):
            model(torch.ones(4, models.INPUTS)).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            ema.update()
            _forward(model.eval())
            ema.update()
            with FullyShardedDataParallel.summon_full_params(model):
                for p in model.parameters():
                    p.data = p.data + 1.0
            ema.update()
            model.train()


def _all(path: str) -> None:
    for kind in KINDS:
        for forward in (False, True):
            for put in (_put_data, _put_parameter):
                _refuses(kind, forward, put, path)
    _refuses_what_fsdp_forgets(path)
    _goes_on_elsewhere()


@pytest.mark.filterwarnings("ignore:The `NO_SHARD`")
def test_what_fsdp1_has_not_taken_over_yet_is_refused_until_the_next_forward(tmp_path: object) -> None:
    ranks.run(2, _all, f"{tmp_path}/model.safetensors")
