"""ema-pytorch's EMA of models that ranks share."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import walks
from ema_pytorch_states import SOON
from sharded import by_layers

from shardow.compat.ema_pytorch import EMA

origin = pytest.importorskip("ema_pytorch")


SHARDED: list[dict[str, Any]] = [
    {"ignore_names": {"0.weight"}, "param_or_buffer_names_no_ema": {"3.weight", "1.running_mean"}},
    {"update_model_with_ema_every": 4},
    {
        "update_model_with_ema_every": 4,
        "update_model_with_ema_beta": 0.5,
        "ignore_names": {"0.weight"},
        "param_or_buffer_names_no_ema": {"3.weight"},
    },
]


def _on_ranks(kind: str, some: dict[str, Any]) -> None:
    """The same wandering on a plain model with the origin's EMA, on every rank."""
    plain = walks.model("mlp")
    model = by_layers(kind, copy.deepcopy(plain))
    made = {
        **SOON,
        **some,
        "replicas": "split" if kind == "ddp-split" else "copy",
        "forward_method_names": ("forward",),
        "include_online_model": False,
    }
    ours = EMA(model, **made)
    theirs = origin.EMA(plain, **SOON, **some)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(5))
    for _ in range(30):
        with torch.no_grad():
            for tensor in (*model.parameters(), *plain.parameters()):
                getattr(tensor, "_local_tensor", tensor).mul_(1.03125)
            for tensor in (*model.buffers(), *plain.buffers()):
                tensor.copy_(tensor + 1)
        ours.update()
        theirs.update()
    if kind != "ddp":
        whole = ours.ema_model.ema.full_state_dict(complete=False)
        expected = {k: v for k, v in theirs.ema_model.state_dict().items() if v.is_floating_point()}
        assert not whole or all(torch.equal(whole[key], value) for key, value in expected.items())
        assert not list(ours.ema_model.children())
    full = ours.full_state_dict()
    assert not full or torch.equal(
        full["ema_model.0.bias" if kind != "ddp" else "ema_model.module.0.bias"],
        theirs.ema_model.state_dict()["0.bias"],
    )
    assert bool(full) == (dist.get_rank() == 0 or kind == "ddp")
    resumed = EMA(model, **made)
    resumed.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert int(resumed.step) == 30
    with torch.no_grad():
        for a, b in ((ours.forward_eval(x), theirs.eval()(x)), (model.eval()(x), plain.eval()(x))):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        ours.eval()
        assert torch.equal(resumed.eval()(x), ours(x))
        if kind != "fsdp2":  # FSDP2 wants methods to be registered, as for training
            assert torch.equal(ours.forward(x), ours(x))


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("ddp-split", 2), ("fsdp1", 2), ("fsdp2", 2), ("fsdp2", 4)])
def test_sharded_models_are_averaged_as_the_origin_averages_whole_ones(kind: str, world: int) -> None:
    for some in SHARDED if world == 2 or os.environ.get("SHARDOW_ALL") else SHARDED[:1]:
        ranks.run(world, _on_ranks, kind, some)


def _refuses_copies() -> None:
    model = by_layers("fsdp2", walks.model("mlp"))
    ema = EMA(model)
    with pytest.raises(NotImplementedError, match=r"save state_dict\(\)"):
        copy.deepcopy(ema)
    with pytest.raises(ValueError, match="another model's"):
        ema.update_moving_average(ema.ema_model, walks.model("mlp"))


def test_averages_of_a_sharded_model_stay_with_it() -> None:
    """The origin exits, since FSDP's modules cannot be copied."""
    ranks.run(2, _refuses_copies)
