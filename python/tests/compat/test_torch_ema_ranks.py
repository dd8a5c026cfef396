"""torch-ema's averages of sharded parameters."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import ranks
import torch
import walks
from sharded import by_layers

from shardow.compat.torch_ema import ExponentialMovingAverage

origin = pytest.importorskip("torch_ema")


def _on_ranks(kind: str) -> None:
    """Elementwise as the origin on the local tensors, through evaluations that leave unsharded copies behind."""
    model = by_layers(kind, walks.model("mlp"))
    local = [getattr(p, "_local_tensor", p) for p in model.parameters()]
    ours, theirs = ExponentialMovingAverage(model.parameters(), 0.9), origin.ExponentialMovingAverage(local, 0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(5))
    for step in range(20):
        if step % 5 == 0:  # an evaluation in every odd place
            model.eval()
            with torch.no_grad(), ours.average_parameters(model.parameters()):
                averaged = model(x)
            with torch.no_grad():
                assert step == 0 or not torch.equal(averaged, model(x))  # nothing of the averages is left
            model.train()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ours.update(model.parameters() if step % 2 else None)
        theirs.update(local)
    assert all(
        torch.equal(getattr(a, "_local_tensor", a), b)
        for a, b in zip(ours.shadow_params, theirs.shadow_params, strict=True)
    )
    state = _through_a_file_of_shards(ours.state_dict())
    resumed = ExponentialMovingAverage(model.parameters(), 0.1)
    resumed.load_state_dict(state)
    ours.update()
    resumed.update()
    assert all(
        torch.equal(getattr(a, "_local_tensor", a), getattr(b, "_local_tensor", b))
        for a, b in zip(ours.shadow_params, resumed.shadow_params, strict=True)
    )


def _after_a_forward_that_raised() -> None:
    model = by_layers("fsdp2", walks.model("mlp")).eval()
    ema = ExponentialMovingAverage(model.parameters(), 0.5)
    x = torch.ones(4, 6)
    with torch.no_grad():
        for p in model.parameters():
            p._local_tensor.mul_(1.5)
        before = model(x)
        for wrong in (torch.ones(4, 5), x):
            with contextlib.suppress(RuntimeError), ema.average_parameters(model.parameters()):
                assert not torch.equal(before, model(wrong))
            assert torch.equal(before, model(x))


def test_weights_come_back_after_a_forward_that_raised() -> None:
    ranks.run(2, _after_a_forward_that_raised)


def _through_a_file_of_shards(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("fsdp2", 2), ("fsdp2", 4), ("fsdp1", 2), ("fsdp1-flat", 2)])
def test_shards_are_averaged_as_they_are(kind: str, world: int) -> None:
    ranks.run(world, _on_ranks, kind)


def _whole_into_shards() -> None:
    plain = walks.model("mlp")
    theirs = origin.ExponentialMovingAverage(plain.parameters(), 0.9)
    for _ in walks.walk(plain, "mlp", 5):
        theirs.update()
    model = by_layers("fsdp2", walks.model("mlp"))
    ours = ExponentialMovingAverage(model.parameters(), 0.5)
    ours.load_state_dict(theirs.state_dict())
    pairs: Any = zip(ours.shadow_params, theirs.shadow_params, strict=True)
    assert all(torch.equal(a.full_tensor(), b) for a, b in pairs)


def test_sharded_parameters_take_their_part_of_a_whole_state() -> None:
    ranks.run(2, _whole_into_shards)
