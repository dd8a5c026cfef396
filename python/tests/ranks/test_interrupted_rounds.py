"""Ctrl-C in a round whose verdict was given in the same moment: the others have what they need and go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch.distributed as dist

import shardow
from shardow.base.signals import Held
from shardow.ranks import store_group
from shardow.ranks.waiting import Left

TIMEOUT = 20.0


def interrupted_when_over(held: bool) -> list[Any]:
    """On rank 1: the signal is delivered when the round is good, and the wait for it has not returned."""
    group, rank, wait_for = store_group.store_group(dist.group.WORLD), dist.get_rank(), store_group.wait_for
    group.begin("a call", TIMEOUT)
    answers: list[Any] = []

    def too_late(fn: Callable[[], Any], seconds: float) -> Any:
        store_group.wait_for = wait_for
        wait_for(fn, seconds)
        raise Left(KeyboardInterrupt())

    def rounds() -> None:
        for number in range(2):
            answers.append(group.all_gather(b"%d of %d" % (number, rank), TIMEOUT))

    if rank == 1:
        store_group.wait_for = too_late
    try:
        if held:
            with Held(waits=True):
                rounds()
        else:
            rounds()
    except (KeyboardInterrupt, shardow.Error) as error:
        answers.append(type(error).__name__)
    return [*answers, group.all_gather(b"in step", TIMEOUT)]


@pytest.mark.parametrize("held", [True, False])
def test_where_signals_are_held_the_rank_goes_on_too_and_else_it_ends_the_next_round(held: bool) -> None:
    first, second, in_step = [b"0 of 0", b"0 of 1"], [b"1 of 0", b"1 of 1"], [b"in step", b"in step"]
    zero, one = ranks.run(2, interrupted_when_over, held)
    if held:
        assert zero == [first, second, in_step]
        assert one == [first, second, "KeyboardInterrupt", in_step]
    else:
        assert zero == [first, "PeerFailedError", in_step]
        assert one == ["KeyboardInterrupt", in_step]
