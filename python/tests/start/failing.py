"""What ranks are told where materialize() or wrap() fails, and that a good call works afterwards."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

import test_meta
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardow

TIMEOUT = 2.0
SLACK = 3.0  # of a busy machine
ALL = bool(os.environ.get("SHARDOW_ALL"))
Told = tuple[str, str, float]  # (exception's type, message, seconds)


def good_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return test_meta.Model().state_dict()


def on_meta() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Sharded without memory, with tied weights, a table, a counter, and an optimizer that knew the parameters
    before."""
    with shardow.meta_init():
        model = test_meta.Model()
    optimizer = torch.optim.AdamW(
        [{"params": list(model.layers.parameters())}, {"params": [model.embed.weight], "lr": 0.5}]
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in [*model.layers, model]:
        fully_shard(unit, mesh=mesh)
    return model, optimizer


def told_by(call: Callable[[], object], unchanged: Callable[[], object]) -> Told:
    """What the call raised; ``unchanged`` is asked before and after it."""
    before, began = unchanged(), time.monotonic()
    try:
        call()
    except Exception as error:
        told = type(error).__name__, str(error), time.monotonic() - began
    else:
        told = "none", "", time.monotonic() - began
    assert unchanged() == before, told
    return told


def standing(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[object]:
    """Which tensors are on meta, which are one, whose values there are, and the optimizer's objects."""
    everything = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    values = {
        name: getattr(tensor, "_local_tensor", tensor).tolist() for name, tensor in everything if not tensor.is_meta
    }
    bound = [[id(param) for param in group["params"]] for group in optimizer.param_groups]
    return [
        {name for name, tensor in everything if tensor.is_meta},
        model.head.weight is model.embed.weight,
        values,
        bound,
    ]


def is_good(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = {
        name: getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)()
        for name, tensor in model.state_dict().items()
    }
    assert all(torch.equal(state[name], tensor) for name, tensor in good_state().items())
    assert model.head.weight is model.embed.weight
    assert [id(p) for g in optimizer.param_groups for p in g["params"]] == [
        id(p) for p in [*model.layers.parameters(), model.embed.weight]
    ]


def materialize(source: Any, again: bool = True, foreign: torch.optim.Optimizer | None = None, **options: Any) -> Told:
    """A call that fails, and then, ``again``, a good one."""
    model, optimizer = on_meta()
    call = functools.partial(shardow.materialize, model, source, foreign or optimizer, timeout=TIMEOUT, **options)
    told = told_by(call, functools.partial(standing, model, optimizer))
    if again:
        shardow.materialize(model, on_rank(0, good_state()), optimizer, timeout=60)
        is_good(model, optimizer)
    return told


def check(told: list[Told], kinds: list[str], says: str, most: float = TIMEOUT) -> None:
    """``most``: seconds; less than the timeout means that nobody waited for it."""
    assert [kind for kind, _, _ in told] == kinds, told
    for kind, message, seconds in told:
        assert says in message, (kind, message)
        assert "Traceback" not in message
        assert seconds < most, (kind, message)


def on_rank(rank: int, there: Any, elsewhere: Any = None) -> Any:
    return there if dist.get_rank() == rank else elsewhere
