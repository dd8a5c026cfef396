"""materialize() where a rank fails in the middle, comes late, stands still or dies: one typed error on the others, in
time.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from failing import ALL, SLACK, TIMEOUT, Told, check, good_state, is_good, materialize, on_meta, on_rank

import shardow
from shardow.distributed import stream


class Failing(Mapping[str, torch.Tensor]):
    """A mapping that can't be read any more after its first bytes were on the way."""

    def __init__(self) -> None:
        self._state = good_state()
        self.then: Callable[[], object] | None = None

    def __getitem__(self, key: str) -> torch.Tensor:
        if self.then is not None:
            self.then()
        return self._state[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def cannot_read() -> None:
    raise OSError("the disk is gone")


_slept: list[bool] = []


def sleep() -> None:
    """Once."""
    if not _slept:
        _slept.append(True)
        time.sleep(TIMEOUT + 1)


def in_the_middle(rank: int, then: Callable[[], object], again: bool) -> Told:
    """``then`` happens on one rank, after rank 0 has sent the first of many messages."""
    _slept.clear()
    source = Failing() if dist.get_rank() == 0 else None
    with mock.patch.object(stream, "_MESSAGE", 32):
        if rank == 0:
            return materialize(
                source, again, progress=lambda done, total: source is not None and setattr(source, "then", then)
            )
        receive = stream.Client.receive
        later = iter([False, False, False])

        def received(side: stream.Client, data: torch.Tensor, sender: int) -> Any:
            if dist.get_rank() == rank and next(later, True):
                then()
            return receive(side, data, sender)

        with mock.patch.object(stream.Client, "receive", received):
            return materialize(source, again)


def test_a_source_that_fails_in_the_middle() -> None:
    told = ranks.run(3, in_the_middle, 0, cannot_read, True)
    check(told, ["OSError", "PeerFailedError", "PeerFailedError"], "the disk is gone")
    assert all("rank 0 of 3 failed" in message for _, message, _ in told[1:])


def before_the_call(then: Callable[[], object], again: bool) -> Told:
    _slept.clear()
    if dist.get_rank() == 1:
        then()
    return materialize(good_state(), again)


def test_a_rank_that_is_late_gets_the_same_error_and_all_go_on() -> None:
    told = ranks.run(3, before_the_call, sleep, True)
    check(
        told,
        ["DeadlineError"] * 3,
        f"rank(s) [1] did not take part within {TIMEOUT:g} s. Call it on all",
        TIMEOUT + SLACK,
    )


def die() -> None:
    os._exit(1)


@pytest.mark.parametrize("rank", [0, 1] if ALL else [1])
def test_a_rank_that_dies_in_the_middle(rank: int) -> None:
    told = ranks.run(3, in_the_middle, rank, die, False, may_die=True)
    assert told.pop(rank) is None
    check(told, ["PeerFailedError", "PeerFailedError" if rank == 0 else "DeadlineError"], "", TIMEOUT + SLACK)
    for _, message, _ in told:
        assert f"and rank {rank} did not arrive" in message or f"rank(s) [{rank}] did not take part" in message


@pytest.mark.parametrize("rank", [0, 1] if ALL else [0])
def test_a_rank_that_sleeps_in_the_middle(rank: int) -> None:
    told = ranks.run(2, in_the_middle, rank, sleep, False, may_die=True)
    check(
        told,
        ["PeerFailedError" if one == rank else "DeadlineError" for one in range(2)],
        "weights between rank",
        2 * TIMEOUT + SLACK,
    )


def several_silent() -> Told:
    """Ranks 1 and 3 stand still when they have received some of many messages."""
    if dist.get_rank() in (1, 3):
        receive, count = stream.Client.receive, iter(range(10**9))

        def received(side: stream.Client, data: torch.Tensor, sender: int) -> Any:
            if next(count) == 1:
                time.sleep(3 * TIMEOUT + 1)
            return receive(side, data, sender)

        with mock.patch.object(stream, "_MESSAGE", 32), mock.patch.object(stream.Client, "receive", received):
            return materialize(on_rank(0, good_state()), again=False)
    with mock.patch.object(stream, "_MESSAGE", 32):
        return materialize(on_rank(0, good_state()), again=False)


def test_several_silent_ranks_cost_the_others_one_timeout_and_are_named() -> None:
    told = ranks.run(4, several_silent, may_die=True)
    check([told[0], told[2]], ["DeadlineError"] * 2, f"within {TIMEOUT:g} s", TIMEOUT + SLACK)
    assert "weights between rank 0 and rank 1 did not arrive" in told[0][1] or "rank 0 and rank 3" in told[0][1]
    assert "rank(s) [1, 3] did not take part" in told[2][1]


def bytes_sent(fails: bool) -> int:
    sent, send, (model, _) = [0], stream.Server.send, on_meta()
    source = Failing() if dist.get_rank() == 0 else None

    def counted(side: stream.Server, data: torch.Tensor, rank: int) -> Any:
        sent[0] += data.nbytes
        return send(side, data, rank)

    def progress(done: int, total: int) -> None:
        if source is not None and fails:
            source.then = cannot_read

    raises = pytest.raises((OSError, ConnectionError)) if fails else contextlib.nullcontext()
    with mock.patch.object(stream, "_MESSAGE", 32), mock.patch.object(stream.Server, "send", counted), raises:
        shardow.materialize(model, source, progress=progress)
    return sent[0]


def test_source_that_fails_sends_as_many_bytes_as_ranks_wait_for() -> None:
    good, failed = (ranks.run(2, bytes_sent, fails)[0] for fails in (False, True))
    assert good == failed > 0


def slow_to_receive() -> bool:
    """Rank 1 takes the first of many messages slowly, each well within the timeout, eight of them not."""
    receive, count = stream.Client.receive, iter(range(10**9))

    def received(side: stream.Client, data: torch.Tensor, sender: int) -> Any:
        if next(count) < 12:
            time.sleep(TIMEOUT / 6)
        return receive(side, data, sender)

    model, optimizer = on_meta()
    with mock.patch.object(stream, "_MESSAGE", 32), mock.patch.object(stream.Client, "receive", received):
        shardow.materialize(model, on_rank(0, good_state()), optimizer, timeout=TIMEOUT)
    is_good(model, optimizer)
    return True


def test_rank_that_is_slow_but_takes_every_message_is_not_lost() -> None:
    assert ranks.run(2, slow_to_receive) == [True, True]


def test_a_rank_that_died() -> None:
    told = ranks.run(2, before_the_call, die, False, may_die=True)
    check(told[:1], ["DeadlineError"], "rank(s) [1] did not take part", TIMEOUT + SLACK)


def where_rank_0_keeps_the_store() -> Told:
    """As torch does without a launcher."""
    meeting, world, rank = dist.distributed_c10d._get_default_store(), dist.get_world_size(), dist.get_rank()
    if rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        meeting.set("port", str(port))
    else:
        store = dist.TCPStore("127.0.0.1", int(meeting.get("port")), is_master=False)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    meeting.set(f"there/{rank}", "")
    meeting.wait([f"there/{one}" for one in range(world)])
    if rank == 0:
        die()
    return materialize(good_state(), again=False)


def test_a_rank_that_dies_with_the_store() -> None:
    told = ranks.run(3, where_rank_0_keeps_the_store, may_die=True)
    check(told[1:], ["PeerFailedError"] * 2, "the store of the process group is gone", TIMEOUT + SLACK)
