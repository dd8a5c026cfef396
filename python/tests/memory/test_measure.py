"""memory.measure() leaves everything as it was."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from test_plan import SHAPE, shared
from test_switches import Model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardow.memory import measure, plan


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"model": Model().to("meta")}, "some of it is on meta"),
        ({"model": 3}, "model is a int"),
        ({"model": Model(), "batch": SHAPE}, "give a tensor where batch has the shape"),
        ({"model": Model(), "ema": 3}, "ema is a int"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        measure(**arguments)


class Refusing(nn.Module):
    """Takes batches of eight, once everything before it has run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) != 8:
            raise RuntimeError("eight")
        return x


def test_measuring_leaves_everything_as_it_was_also_where_forward_fails() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4), Refusing())
    model[3].eval()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for size in (8, 7):
        x = torch.randn(size, 4)
        before = [tensor.clone() for tensor in [*tensors, torch.get_rng_state()]]
        with contextlib.nullcontext() if size == 8 else pytest.raises(RuntimeError, match="eight"):
            found = measure(model, optimizer, x, ema=averaged)
        assert all(map(torch.equal, [*tensors, torch.get_rng_state()], before))
        assert [module.training for module in model.modules()] == [True, True, True, True, False, True]
    assert found["averages"] == found["weights"] + 8  # with its count


def steps_with_and_without(kind: str) -> bool:
    """Two steps of training, measured in between, or not; also after a forward that raised."""
    ends = []
    for measuring in (False, True):
        model = shared(kind, dropout=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            torch.manual_seed(step + 10 * dist.get_rank())
            if measuring:
                measure(model, optimizer, torch.randn(SHAPE))
                with pytest.raises(RuntimeError):
                    measure(model, optimizer, torch.randn(2, 8, 5))
                torch.manual_seed(step + 10 * dist.get_rank())
            model(torch.randn(SHAPE)).square().mean().backward()
            if measuring:
                measure(model, optimizer, torch.randn(SHAPE))
            optimizer.step()
            optimizer.zero_grad()
        ends.append([p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()])
    return all(map(torch.equal, *ends))


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_training_goes_on_as_if_nothing_had_been_measured(kind: str) -> None:
    assert ranks.run(2, steps_with_and_without, kind) == [True, True]


def test_a_model_that_is_wrapped_or_sharded() -> None:
    assert ranks.run(1, wrapped) == [True]


def wrapped() -> bool:
    whole = plan(Model(), 2, "ddp", batch=SHAPE)
    with pytest.raises(ValueError, match="before it is sharded"):
        plan(shared("fsdp2"))
    return (
        plan(DistributedDataParallel(Model()), 2, "ddp", batch=SHAPE)
        == whole
        == plan(torch.compile(Model()), 2, "ddp", batch=SHAPE)
    )
