"""One rank's failure is everybody's error, within the deadline; nobody hangs, nothing has changed."""

from __future__ import annotations

import copy
import math
import os
import signal
import time

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from outcomes import Outcome, outcome

import shardow
from shardow.sharding.partial_tensor import PartialTensor

DEADLINE = 3.0


def disagree(how: str) -> Outcome:
    model, options = models.make(), {"decay": 0.9}
    if dist.get_rank() == 1:
        if how == "names":
            model[0].register_parameter("extra", torch.nn.Parameter(torch.ones(2)))
        elif how == "shapes":
            model[0] = torch.nn.Linear(models.INPUTS, 9)
        elif how == "decay":
            options = {"decay": 0.8}
        elif how == "bad option":
            options = {"decay": 7.0}
        elif how == "frozen":
            model[3].weight.requires_grad_(False)
    return outcome(lambda: shardow.EMA(model, **options, group=dist.group.WORLD, timeout=DEADLINE))


@pytest.mark.parametrize(
    ("how", "says"),
    [("names", "'0.extra'"), ("shapes", "'0.weight'"), ("decay", "0.8"), ("frozen", "'3.weight'")],
)
def test_ranks_that_disagree_all_raise_and_say_about_what(how: str, says: str) -> None:
    for kind, message, seconds in ranks.run(3, disagree, how):
        assert kind == "InvalidArgumentError"
        assert says in message
        assert "rank 1" in message
        assert seconds < DEADLINE


def test_a_bad_option_on_one_rank_raises_on_all_at_once() -> None:
    (zero, says, seconds), (one, own, _) = ranks.run(2, disagree, "bad option")
    assert (zero, one) == ("PeerFailedError", "InvalidArgumentError")
    assert "decay=7.0" in says
    assert "decay=7.0" in own
    assert seconds < DEADLINE


def only_on_rank_0(call: str) -> Outcome:
    model = models.build("ddp", dist.get_world_size())
    ema = shardow.EMA(model, 0.9, timeout=DEADLINE)
    found = "none", "", 0.0
    if dist.get_rank() == 0:
        found = outcome(lambda: ema.swapped().__enter__() if call == "swapped" else getattr(ema, call)())
    dist.barrier()  # the other one does something else, and is alive
    return found


@pytest.mark.parametrize("call", ["swapped", "full_state_dict", "distance"])
def test_a_collective_called_on_rank_0_alone_says_so_within_the_deadline(call: str) -> None:
    kind, message, seconds = ranks.run(2, only_on_rank_0, call)[0]
    assert kind == "DeadlineError"
    assert "every rank must call it" in message
    assert "[1]" in message
    assert seconds < DEADLINE + 2


def late(call: str) -> tuple[Outcome, Outcome]:
    model = models.build("fsdp2", dist.get_world_size())
    ema = shardow.EMA(model, 0.9, timeout=DEADLINE)
    if dist.get_rank() == 1:
        time.sleep(DEADLINE + 1.5)
    first = outcome(getattr(ema, call))
    dist.barrier()
    return first, outcome(getattr(ema, call))


def test_a_sleeping_rank_gets_the_same_error_and_the_group_works_on() -> None:
    for first, second in ranks.run(3, late, "full_state_dict"):
        assert first[0] == "DeadlineError"
        assert "[1]" in first[1]
        assert second[0] == "none"


def killed(call: str) -> Outcome:
    model = models.build("fsdp2", dist.get_world_size())
    ema = shardow.EMA(model, 0.9, timeout=DEADLINE)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return outcome(lambda: ema.swapped().__enter__() if call == "swapped" else getattr(ema, call)())


@pytest.mark.parametrize("call", ["full_state_dict", "swapped"])
def test_a_killed_rank_is_an_error_on_the_others(call: str) -> None:
    zero, one, two = ranks.run(3, killed, call, may_die=True)
    assert one is None
    for kind, message, seconds in (zero, two):
        assert kind == "DeadlineError"
        assert "[1]" in message
        assert seconds < DEADLINE + 2


def replaced_on_one_rank() -> tuple[Outcome, bool]:
    model = models.build("ddp", dist.get_world_size())
    ema = shardow.EMA(model, 0.9, timeout=DEADLINE)
    before = models.whole_weights(model)
    if dist.get_rank() == 1:
        model.module[0].weight = torch.nn.Parameter(model.module[0].weight.detach().clone())
    found = outcome(lambda: ema.swapped().__enter__())
    after = models.whole_weights(model)
    return found, all(torch.equal(before[n], after[n]) for n in before)


def test_a_parameter_replaced_on_one_rank_stops_the_swap_on_all() -> None:
    (zero, unchanged0), (one, unchanged1) = ranks.run(2, replaced_on_one_rank)
    assert zero[0] == "PeerFailedError"
    assert one[0] == "InvalidArgumentError"
    assert "'0.weight'" in zero[1]
    assert "'0.weight'" in one[1]
    assert unchanged0
    assert unchanged1


def foreign_state(how: str) -> tuple[Outcome, bool]:
    model = models.build("fsdp2", dist.get_world_size())
    ema = shardow.EMA(model, 0.9, timeout=DEADLINE)
    state = copy.deepcopy(ema.state_dict())
    before = copy.deepcopy(state["averages"])
    for tensor in state["averages"].values():
        (tensor.local if isinstance(tensor, PartialTensor) else tensor).add_(1)
    if how == "another sharding":
        piece = state["averages"]["0.weight"]
        rank, size = dist.get_rank(), 7 * models.INPUTS
        half = shardow._core.Region.whole([7, models.INPUTS]).window(rank * size // 2, (rank + 1) * size // 2)
        state["averages"]["0.weight"] = PartialTensor(torch.zeros(half.size, dtype=piece.local.dtype), half)
    elif dist.get_rank() == 0:
        state["averages"]["0.weight"] = torch.zeros(3, 3)
        del state["averages"]["3.bias"]
        state["averages"]["new"] = torch.zeros(1)
    found = outcome(lambda: ema.load_state_dict(state))
    now = ema.state_dict()["averages"]
    local = lambda t: t.local if isinstance(t, PartialTensor) else t  # noqa: E731
    return found, all(torch.equal(local(before[n]), local(now[n])) for n in before)


def test_a_foreign_state_lists_everything_and_changes_nothing_on_any_rank() -> None:
    results = ranks.run(2, foreign_state, "wrong names")
    for (kind, message, _), unchanged in results:
        assert kind in ("InvalidArgumentError", "PeerFailedError")
        assert all(
            text in message
            for text in (
                "missing in the state: 3.bias",
                "unexpected in the state: new",
                "'0.weight' has shape [3, 3] in the state and [7, 6] here",
            )
        )
        assert unchanged


def test_a_state_of_another_sharding_says_how_to_load_it() -> None:
    for (kind, message, _), unchanged in ranks.run(2, foreign_state, "another sharding"):
        assert kind == "InvalidArgumentError"
        assert "torch.distributed.checkpoint" in message
        assert unchanged


def _not_finite_on_one() -> list[str]:
    """What each of three calls says; the averages are held, and go on."""
    model = models.build("fsdp2", dist.get_world_size())
    ema = shardow.EMA(model, 0.5, nonfinite="raise")
    before = ema.full_state_dict(complete=False)
    rank = dist.get_rank()
    if rank == 1:
        model[0].weight._local_tensor[0, 0] = math.nan
        with pytest.warns(RuntimeWarning, match="the next collective call raises on every rank"):
            ema.update()
    else:
        ema.update()
    said = []
    for call in (ema.distance, ema.full_state_dict):
        try:
            call()
            said.append("")
        except (ValueError, ConnectionError) as error:
            said.append(str(error))
    after = ema.full_state_dict(complete=False)
    assert rank or all(torch.equal(after[name], before[name]) for name in before)
    return said


def test_what_is_not_finite_on_one_rank_raises_on_all_at_the_next_agreement() -> None:
    for first, second in ranks.run(2, _not_finite_on_one):
        assert "'0.weight'" in first
        assert second == ""
