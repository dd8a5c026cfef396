"""wrap() where something fails: no rank gives up its weights before all agree; where they are lost all the same the
error says so.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import ranks
import test_meta
import torch
import torch.distributed as dist
from failing import TIMEOUT, Told, check, good_state, is_good, on_rank, standing, told_by
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import shardow
from shardow.distributed import stream


def wrap(how: str) -> tuple[Told, bool]:
    """Rank 0 alone has a problem, or another model. Then a good call, whose weights are rank 0's."""
    torch.manual_seed(7 + dist.get_rank())
    model, mesh = test_meta.Model(), init_device_mesh("cpu", (dist.get_world_size(),))
    optimizer = torch.optim.AdamW(
        [{"params": list(model.layers.parameters())}, {"params": [model.embed.weight], "lr": 0.5}]
    )
    options: dict[str, Any] = {}
    used = optimizer
    if how == "no such unit":
        options = {"units": on_rank(0, ["Nothing"])}
    elif how == "units differ":
        options = {"units": lambda name, module: name == on_rank(0, "layers.0", "layers.1")}
    elif how == "a container":
        options = {"units": ["ModuleList"]}
    elif how == "foreign optimizer":
        used = on_rank(0, torch.optim.SGD(nn.Linear(2, 2).parameters()), optimizer)
    elif how == "sources differ":
        options = {"source": on_rank(0, None, "a.safetensors")}
    elif how == "no source":
        options = {"source": on_rank(0, 3)}
    tested = model
    if how in ("on meta", "another shape") and dist.get_rank() == 0:
        with torch.device("meta" if how == "on meta" else "cpu"):
            tested = test_meta.Model()
        if how == "another shape":
            tested.layers[1] = nn.Linear(4, 4, bias=False)
        used = torch.optim.AdamW(tested.parameters())
    call = functools.partial(shardow.wrap, tested, mesh, used, timeout=TIMEOUT, **options)
    told = told_by(call, functools.partial(standing, tested, used))
    sharded = any(isinstance(module, FSDPModule) for module in tested.modules())
    shardow.wrap(model, mesh, optimizer, timeout=60)
    is_good(model, optimizer)
    return told, sharded


WRAP = {
    "no such unit": "units=['Nothing']", "units differ": "units is ['layers.0'] on rank 0 and ['layers.1'] on rank 1",
    "a container": "ModuleList has no forward()", "foreign optimizer": "optimizer group 0",
    "sources differ": "ranks have different sources: nothing, the file", "no source": "source is a int",
    "on meta": "have no values on rank 0", "another shape": "'layers.1.bias' is missing on rank 0",
}  # fmt: skip


@pytest.mark.parametrize("how", WRAP)
def test_wrap_gives_up_no_weights_before_all_ranks_agree(how: str) -> None:
    found = ranks.run(3, wrap, how)
    alike = how in ("units differ", "a container", "sources differ", "another shape")
    check(
        [told for told, _ in found],
        ["InvalidArgumentError"] + ["InvalidArgumentError" if alike else "PeerFailedError"] * 2,
        WRAP[how],
    )
    assert not any(sharded for _, sharded in found)


def wrap_that_ends_without_weights() -> tuple[Told, bool]:
    """Rank 1's stream fails."""
    torch.manual_seed(7)
    model, mesh = test_meta.Model(), init_device_mesh("cpu", (dist.get_world_size(),))
    optimizer = torch.optim.AdamW(
        [{"params": list(model.layers.parameters())}, {"params": [model.embed.weight], "lr": 0.5}]
    )
    with mock.patch.object(stream, "_target", side_effect=on_rank(1, MemoryError("no memory"), stream._target)):
        told = told_by(
            lambda: shardow.wrap(model, mesh, optimizer, timeout=TIMEOUT),
            lambda: [[tuple(p.shape) for p in g["params"]] + [g["lr"]] for g in optimizer.param_groups],
        )
    # The optimizer keeps no weights either, and its place for each.
    assert all(p.is_meta for g in optimizer.param_groups for p in g["params"])
    on_meta = all(tensor.is_meta for tensor in model.parameters())
    shardow.materialize(model, on_rank(0, good_state()), optimizer, timeout=60)
    is_good(model, optimizer)
    return told, on_meta


def test_wrap_says_that_the_weights_are_gone_and_materialize_brings_them() -> None:
    found = ranks.run(3, wrap_that_ends_without_weights)
    check([told for told, _ in found], ["PeerFailedError", "MemoryError", "PeerFailedError"], "no memory")
    assert all("the model is sharded now, and has no weights" in found[rank][0][1] for rank in (0, 2))
    assert all(on_meta for _, on_meta in found)
