"""swapped() on real ranks: exact both ways, past every copy that torch keeps, whatever happens inside."""

from __future__ import annotations

from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from outcomes import outcome
from own_averages import averages_of
from small import equal

import shardow

Weights = dict[str, torch.Tensor]

SHARED = [
    ("ddp", 2),
    ("fsdp1", 2),
    ("fsdp1-flat", 2),
    ("fsdp1-hybrid", 4),
    ("fsdp2", 2),
    ("fsdp2", 3),
    ("hsdp", 4),
    ("tp+fsdp2", 4),
    ("wrapped", 2),
]


def trained(
    kind: str, dtype: torch.dtype = torch.float32
) -> tuple[torch.nn.Module, shardow.EMA, torch.optim.Optimizer]:
    model = models.build(kind, dist.get_world_size(), dtype)
    ema = shardow.EMA(model, 0.5, timeout=30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        optimizer.zero_grad()
        model(models.batch(generator, dtype)).float().square().sum().backward()
        optimizer.step()
        ema.update()
    return model, ema, optimizer


def local_weights(ema: shardow.EMA) -> Weights:
    """After a failed forward FSDP1 refuses to gather."""
    return {one.name: one.tensor.clone() for one in averages_of(ema).view.parameters}


def output(model: torch.nn.Module, train: bool = False) -> torch.Tensor:
    model.train(train)
    with torch.no_grad():
        answer = model(torch.linspace(-1, 1, 5 * models.INPUTS).view(5, models.INPUTS))
    model.train()
    return answer


def dense_output(kind: str, weights: Weights) -> torch.Tensor:
    twin = models.plain_twin(kind)
    twin.load_state_dict({**twin.state_dict(), **weights})
    return output(twin)


def swap_after_evaluation(kind: str) -> None:
    """The stale-copy trap: a forward under no_grad leaves unsharded weights behind; neither block nor model may see old
    ones.
    """
    model, ema, optimizer = trained(kind)
    before, averages = models.whole_weights(model), ema.full_state_dict(complete=False)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm1d):
            module.reset_running_stats()
    output(model)
    with ema.swapped():
        inside = output(model)
        assert equal(models.whole_weights(model), before) is False
        output(model)
    after = output(model)
    assert equal(models.whole_weights(model), before)
    full = ema.full_state_dict(complete=False)
    if dist.get_rank() == 0:
        assert equal(full, averages)
        torch.testing.assert_close(inside, dense_output(kind, averages), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(after, dense_output(kind, before), atol=1e-6, rtol=1e-6)
    optimizer.zero_grad()
    model(torch.ones(5, models.INPUTS)).sum().backward()
    optimizer.step()
    ema.update()


@pytest.mark.parametrize(("kind", "world"), SHARED)
def test_sees_no_stale_copy_after_evaluation(kind: str, world: int) -> None:
    ranks.run(world, swap_after_evaluation, kind)


class _Broken(RuntimeError):
    pass


def swap_after_failed_forward(kind: str) -> None:
    model, ema, _ = trained(kind)
    before = local_weights(ema)

    def fail(*_: Any) -> None:
        raise _Broken

    inner = next(
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module.out_features in (5, 4)
    )
    for inside in (False, True):
        hook = inner.register_forward_hook(fail)
        try:
            if inside:
                with ema.swapped():
                    output(model)
            else:
                output(model)
        except _Broken:
            pass
        else:
            raise AssertionError("the forward did not fail")
        hook.remove()
        with ema.swapped():
            pass
        assert equal(local_weights(ema), before), inside
    ema.update()


@pytest.mark.parametrize(("kind", "world"), [("fsdp2", 2), ("fsdp1", 2), ("ddp", 2), ("hsdp", 4)])
def test_restores_after_a_forward_that_raised(kind: str, world: int) -> None:
    ranks.run(world, swap_after_failed_forward, kind)


def raise_on_one_rank(kind: str) -> tuple[str, str]:
    model, ema, _ = trained(kind)
    before = models.whole_weights(model)
    caught = ("", "")
    try:
        with ema.swapped():
            if dist.get_rank() == 1:
                raise _Broken("only here")
    except (_Broken, shardow.Error) as error:
        caught = (type(error).__name__, str(error))
    assert equal(models.whole_weights(model), before)
    ema.update()
    return caught


@pytest.mark.parametrize(("kind", "world"), [("fsdp2", 2), ("fsdp1", 2), ("ddp", 2), ("hsdp", 4)])
def test_restores_when_the_body_raises_on_one_rank_and_tells_the_others(kind: str, world: int) -> None:
    for rank, (kind_, message) in enumerate(ranks.run(world, raise_on_one_rank, kind)):
        assert kind_ == ("_Broken" if rank == 1 else "PeerFailedError")
        assert message == "only here" or "rank 1 left swapped() with _Broken: only here" in message


def swap_bfloat16(kind: str) -> None:
    model, ema, _ = trained(kind, torch.bfloat16)
    before, averages = models.whole_weights(model), ema.full_state_dict(complete=False)
    with ema.swapped():
        inside = models.whole_weights(model)
    assert equal(models.whole_weights(model), before)
    if dist.get_rank() == 0:
        assert all((inside[n].float() - averages[n]).abs().max() <= averages[n].abs().max() * 2**-8 for n in averages)
    full = ema.full_state_dict(complete=False)
    assert dist.get_rank() != 0 or equal(full, averages)


@pytest.mark.parametrize(("kind", "world"), [("fsdp2", 3), ("ddp", 2)])
def test_bfloat16_weights_are_exact_both_ways(kind: str, world: int) -> None:
    ranks.run(world, swap_bfloat16, kind)


def sharded_backward_from_before(kind: str) -> str:
    model, ema, _ = trained(kind)
    loss = model(torch.ones(5, models.INPUTS)).sum()
    with ema.swapped():
        pass
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_backward_from_before_the_swap_raises_under_ddp() -> None:
    for message in ranks.run(2, sharded_backward_from_before, "ddp"):
        assert "modified by an inplace operation" in message


def restored_on_one(kind: str) -> list[Any]:
    """Rank 1 restores, as after a Ctrl-C, while rank 0 is leaving; then rank 0 does what it is told."""
    _, ema, _ = trained(kind)
    weights = local_weights(ema)
    ema.swap_in()
    left = outcome(ema.restore if dist.get_rank() else ema.swap_out)[:2]
    restored = ("none", "") if dist.get_rank() else outcome(ema.restore)[:2]
    return [left, restored, equal(local_weights(ema), weights), outcome(ema.distance)[0]]


def test_a_rank_that_restores_waits_for_those_that_were_leaving() -> None:
    zero, one = ranks.run(2, restored_on_one, "ddp")
    assert zero[0][0] == "InvalidArgumentError"
    assert "restore()" in zero[0][1]
    assert one[0] == ("none", "")
    assert zero[1:] == one[1:] == [("none", ""), True, "none"]
