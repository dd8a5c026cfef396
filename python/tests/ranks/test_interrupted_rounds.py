"""Ctrl-C in a round whose verdict was given in the same moment: the others have what they need and go on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch.distributed as dist

import shardow
from shardow.base.signals import Held
from shardow.ranks import rounds, store_group, store_values
from shardow.ranks.waiting import Left

TIMEOUT = 20.0


def interrupt_when_over() -> None:
    """The next wait: a signal comes when it is over, and has not returned."""
    wait_for = store_group.wait_for

    def too_late(fn: Callable[[], Any], seconds: float) -> Any:
        store_group.wait_for = wait_for
        wait_for(fn, seconds)
        raise Left(KeyboardInterrupt())

    store_group.wait_for = too_late


def interrupted_when_over(held: bool) -> list[Any]:
    """On rank 1: the signal is delivered when the round is good, and the wait for it has not returned."""
    group, rank = store_group.store_group(dist.group.WORLD), dist.get_rank()
    group.begin("a call", TIMEOUT)
    answers: list[Any] = []

    def rounds() -> None:
        for number in range(2):
            answers.append(group.all_gather(b"%d of %d" % (number, rank), TIMEOUT))

    if rank == 1:
        interrupt_when_over()
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
    if not held:
        assert zero == [first, "PeerFailedError", in_step]
        assert one == ["KeyboardInterrupt", in_step]
    elif one == [first, "KeyboardInterrupt", in_step]:
        # It had to wait for rank 0 in the next round, and was interrupted in it.
        assert zero == [first, "PeerFailedError", in_step]
    else:
        assert zero == [first, second, in_step]
        assert one == [first, second, "KeyboardInterrupt", in_step]


def interrupted_before_the_other_reads() -> list[Any]:
    """As above; rank 0 has the verdict, and reads everybody's words when rank 1 has seen to its interruption."""
    group, everybody = store_group.store_group(dist.group.WORLD), rounds.Rounds.everybody
    gate = store_group._connection()

    def read_late(*args: Any) -> list[bytes]:
        rounds.Rounds.everybody = everybody  # type: ignore[method-assign]
        gate.wait(["seen to"])
        return everybody(*args)

    if dist.get_rank() == 0:
        rounds.Rounds.everybody = read_late  # type: ignore[method-assign]
        return [group.all_gather(b"zero", TIMEOUT), *_until_in_step(group)]
    # Rank 0 is first: this rank gives the verdict, and has written the words.
    while not gate.check([f"{group._prefix}/0/lane/0"]):
        time.sleep(0.01)
    interrupt_when_over()
    with pytest.raises(KeyboardInterrupt):
        group.all_gather(b"one", TIMEOUT)
    gate.set("seen to", "")
    return _until_in_step(group)


def _until_in_step(group: store_group.StoreGroup) -> list[Any]:
    with contextlib.suppress(shardow.Error):
        return [group.all_gather(b"in step", TIMEOUT)]
    return [group.all_gather(b"in step", TIMEOUT)]


def test_words_stay_until_the_others_have_read_them() -> None:
    zero, one = ranks.run(2, interrupted_before_the_other_reads)
    assert zero == [[b"zero", b"one"], [b"in step", b"in step"]]
    assert one == [[b"in step", b"in step"]]


def left_without_a_verdict() -> list[Any]:
    """Rank 1 has told its words when its store does not answer any more, so that it leaves; rank 0 comes then, and
    finds all it needs.
    """
    group, wait_long = store_group.store_group(dist.group.WORLD), rounds.Rounds._wait_long
    gate, inside, answers = store_group._connection(), store_group._connection(), []

    def silent(*args: Any) -> Any:
        rounds.Rounds._wait_long = wait_long  # type: ignore[method-assign]
        inside.wait(["rank 0 has it"])
        raise store_values.Abandoned

    if dist.get_rank() == 0:
        gate.wait(["rank 1 has left"])
    else:
        rounds.Rounds._wait_long = silent  # type: ignore[method-assign]
    for number in range(3):
        group.begin("a call", TIMEOUT)
        try:
            answers.append(
                group.all_gather(
                    b"%d of %d" % (number, dist.get_rank()), TIMEOUT if dist.get_rank() == 0 or number else 0.1
                )
            )
        except shardow.Error as error:
            answers.append(str(error))
        if number == 0:
            gate.set(["rank 0 has it", "rank 1 has left"][dist.get_rank()], "")
            gate.wait(["rank 0 has it"])
    return answers


def test_who_leaves_a_round_that_was_good_for_the_others_ends_the_next_one() -> None:
    zero, one = ranks.run(2, left_without_a_verdict)
    ended, in_step = "rank 1 has left: it waited in vain for the store of the process group", [b"2 of 0", b"2 of 1"]
    assert zero == [[b"0 of 0", b"0 of 1"], ended, in_step]
    assert one == [one[0], ended, in_step]
    assert "did not answer within" in one[0]
