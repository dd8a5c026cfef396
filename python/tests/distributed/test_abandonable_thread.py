"""Waits end at their deadline, or at Ctrl-C, whatever stands still: another rank, or the host of the store."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from outcomes import Outcome, outcome
from store_host import host, stop

import shardow
from shardow.averaging.replicas import ReplicaExchange
from shardow.distributed import abandonable_thread, store_group
from shardow.distributed.gather import Gatherer
from shardow.files import engine

__all__ = ["host"]

DEADLINE = 3.0


def host_stands_still(pid: int, port: int, path: str) -> tuple[list[Outcome], Outcome]:
    """Calls while the store's host is stopped: before they begin, then while two of three ranks wait; and one after it
    goes on.
    """
    own, rank, stopped = store_group._connection, dist.get_rank(), []
    store_group._connection = lambda: dist.TCPStore("127.0.0.1", port, is_master=False)
    try:
        model = models.build("fsdp2", dist.get_world_size())
        ema = shardow.EMA(model, 0.9, timeout=DEADLINE)
        ema.update()
        for call, waits in [(ema.distance, False), (lambda: ema.save(path), False), (ema.full_state_dict, True)]:
            dist.barrier()
            if rank == 0:
                time.sleep(0.5 * waits)
                stop(pid)
            if not waits:
                dist.barrier()
            stopped.append(outcome(call))
            dist.barrier()
            if rank == 0:
                os.kill(pid, signal.SIGCONT)
        dist.barrier()
        return stopped, outcome(lambda: ema.save(path))
    finally:
        store_group._connection = own


def test_the_deadline_holds_where_the_host_of_the_store_stands_still(host: tuple[int, int], tmp_path: Path) -> None:
    for stopped, after in ranks.run(3, host_stands_still, *host, str(tmp_path / "a.safetensors")):
        for kind, message, seconds in stopped:
            assert kind == "DeadlineError"
            assert f"did not answer within {DEADLINE:g} s" in message
            assert "rank == 0" not in message
            assert DEADLINE * 0.5 < seconds < DEADLINE + 2.5
        assert after[0] == "none", after
    assert (tmp_path / "a.safetensors").exists()


def host_stops_inside_a_swap(pid: int, port: int) -> tuple[Outcome, bool]:
    """Replicas whose store's host is stopped while their averages are in the model: how leaving ended, and whether the
    weights are back.
    """
    own, rank = store_group._connection, dist.get_rank()
    store_group._connection = lambda: dist.TCPStore("127.0.0.1", port, is_master=False)
    try:
        model = models.build("ddp", dist.get_world_size())
        ema = shardow.EMA(model, 0.5, timeout=DEADLINE)
        for one in model.parameters():
            one.data.add_(1.0)
        ema.update()
        before = [one.detach().clone() for one in model.parameters()]
        ema.swap_in()
        dist.barrier()
        if rank == 0:
            stop(pid)
        dist.barrier()
        left = outcome(ema.swap_out)
        dist.barrier()
        if rank == 0:
            os.kill(pid, signal.SIGCONT)
        dist.barrier()
        ema.restore()
        return left, all(torch.equal(one, was) for one, was in zip(model.parameters(), before, strict=True))
    finally:
        store_group._connection = own


def test_leaving_a_swap_takes_one_timeout_where_the_host_of_the_store_stands_still(host: tuple[int, int]) -> None:
    for (kind, message, seconds), back in ranks.run(2, host_stops_inside_a_swap, *host):
        assert kind == "DeadlineError"
        assert f"did not answer within {DEADLINE:g} s" in message
        assert seconds < DEADLINE + 2.5
        assert back


def interrupted_after(seconds: float, call: Callable[[], object]) -> tuple[str, float]:
    """What Ctrl-C says, and when."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    began = time.monotonic()
    timer.start()
    with pytest.raises(KeyboardInterrupt) as error:
        call()
    return str(error.value), time.monotonic() - began - seconds


def interrupted(path: str) -> tuple[object, Outcome, str]:
    """Rank 0 is interrupted while it waits for rank 1; then while it saves and waits for the same."""
    model, rank = models.build("fsdp2", dist.get_world_size()), dist.get_rank()
    ema = shardow.EMA(model, 0.9, timeout=100)
    answers: list[object] = []
    for call in (ema.distance, lambda: ema.save(path)):
        if rank == 0:
            answers.append(interrupted_after(0.3, call))
        else:
            time.sleep(2)
            answers.append(outcome(call))
        dist.barrier()
    return (*answers, outcome(ema.distance)[0])  # type: ignore[return-value]


def test_ctrl_c_ends_a_wait_within_a_second_and_says_for_whom_and_the_others_learn_of_it(tmp_path: Path) -> None:
    zero, one = ranks.run(2, interrupted, str(tmp_path / "a.safetensors"))
    for call, (said, late), (kind, message, seconds) in zip(("distance()", "save()"), zero, one, strict=False):
        assert said == f"{call} of EMA 1: waited for rank(s) [1]"
        assert late < 1.5
        assert kind == "PeerFailedError"
        assert message.endswith(f"rank 0 was interrupted in {call} of EMA 1")
        assert seconds < 20
    assert zero[2] == one[2] == "none", "the ranks are in step again"


def interrupted_block() -> float:
    group, rank = store_group.store_group(dist.group.WORLD), dist.get_rank()
    data = np.full(100, 7 + rank, dtype=np.uint8)
    if rank == 1:
        time.sleep(1.5)
        group.send(memoryview(data), 0, 60)  # type: ignore[arg-type]
        return 0.0
    return interrupted_after(0.2, lambda: group.recv(memoryview(data), 1, 60))[1]  # type: ignore[arg-type]


def test_ctrl_c_ends_the_wait_for_a_block() -> None:
    assert ranks.run(2, interrupted_block)[0] < 1.0


def test_what_is_left_behind_is_in_nobodys_way() -> None:
    ending = threading.Event()
    for _ in range(6):
        assert isinstance(abandonable_thread.failure_of(ending.wait, 0.01), TimeoutError)
    assert abandonable_thread.failure_of(lambda: 5, 60) is None
    assert isinstance(abandonable_thread.failure_of(lambda: {}["a"], 60), KeyError)
    ending.set()


def late(seconds: float) -> list[object]:
    """Rank 1 comes late to what ranks tell each other of their pieces, when all have begun: rank 0 is interrupted, then
    waits in vain.
    """
    rank, plan = dist.get_rank(), Gatherer._plan
    model, target = models.build("fsdp2", dist.get_world_size()), models.build("fsdp2", dist.get_world_size())
    ema = shardow.EMA(model, 0.9, timeout=seconds)
    answers: list[object] = []

    def planned(self: Gatherer) -> object:
        time.sleep(seconds + 1.5)
        return plan(self)

    Gatherer._plan = planned if rank == 1 else plan  # type: ignore[method-assign, assignment]
    try:
        for call in (ema.full_state_dict, lambda: ema.copy_to(target)):
            answers.append(interrupted_after(0.5, call) if rank == 0 else outcome(call))
            dist.barrier()
        answers.append(outcome(ema.full_state_dict))
        dist.barrier()
    finally:
        Gatherer._plan = plan  # type: ignore[method-assign]
    return [*answers, outcome(ema.full_state_dict)[0], outcome(lambda: ema.copy_to(target))[0]]


def test_the_description_of_pieces_is_waited_for_as_everything_else() -> None:
    zero, one = ranks.run(2, late, 2.0)
    for call, (said, late_by), (kind, message, _) in zip(("full_state_dict()", "copy_to()"), zero, one, strict=False):
        assert said == f"{call} of EMA 1: waited for rank(s) [1]"
        assert late_by < 1.0
        assert kind == "PeerFailedError"
        assert f"rank 0 was interrupted in {call}" in message
    for kind, message, seconds in (zero[2], one[2]):
        assert kind == "DeadlineError"
        assert "full_state_dict()" in message
        assert "[1] did not take part within 2 s" in message
        assert seconds < 5.0
    assert zero[3:] == one[3:] == ["none", "none"]


def save_patiently(path: Path, timeout: float) -> None:
    model = torch.nn.Linear(2, 2)
    world = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    shardow.save(model, path, timeout=timeout, group=world)
    shardow.async_save(model, path, timeout=timeout, group=world).wait(timeout)
    shardow.load(model, path, timeout=timeout, group=world)
    ema = shardow.EMA(model, timeout=timeout, group=world)
    with ema.swapped():
        pass
    ema.full_state_dict()
    shardow.merge([path], path.with_name("merged.safetensors"), timeout=timeout, group=world)


@pytest.mark.parametrize("timeout", [float("inf"), 1e10, 1e300])
def test_timeout_beyond_what_a_clock_holds_is_a_long_one(timeout: float, tmp_path: Path) -> None:
    save_patiently(tmp_path / "a.safetensors", timeout)


def test_ranks_wait_for_any_timeout(tmp_path: Path) -> None:
    ranks.run(2, save_patiently, tmp_path / "a.safetensors", float("inf"))


def leave(*_: object, **__: object) -> None:
    os._exit(1)


def meets_a_rank_that_is_gone(folder: Path, verb: str) -> Outcome:
    """Rank 1 ends within the engine's part of a call."""
    model = models.make()
    ema = shardow.EMA(model, group=dist.group.WORLD, timeout=1.5)
    path = folder / "averages.safetensors"
    ema.save(path)
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: ema.save(path), "load": lambda: ema.load(path), "swap": ema.swap_in,
    }  # fmt: skip
    if dist.get_rank() == 1:
        home: Any
        home, name = {
            "save": (engine.SaveCall, "_metadata"), "load": (engine.Load, "choose"),
            "swap": (ReplicaExchange, "_gather"),
        }[verb]  # fmt: skip
        setattr(home, name, leave)
    return outcome(calls[verb])


@pytest.mark.parametrize(("verb", "says"), [
    ("save", r"save\(\) to .*averages.safetensors: rank\(s\) \[1\]"),
    ("load", r"load\(\) of .*averages.safetensors: rank\(s\) \[1\]"),
    ("swap", r"rank\(s\) \[1\] own did not all arrive( within 1.5 s|: )"),
])  # fmt: skip
def test_rank_that_is_gone_is_reported_with_the_call(verb: str, says: str, tmp_path: Path) -> None:
    kind, message, _ = ranks.run(2, meets_a_rank_that_is_gone, tmp_path, verb, may_die=True)[0]
    assert kind in ("DeadlineError", "PeerFailedError")
    assert re.search(says, message), message


def test_child_of_fork_waits_with_threads_of_its_own() -> None:
    assert abandonable_thread.failure_of(lambda: 1, 5.0) is None  # its thread stays for the next wait
    if (child := os.fork()) == 0:
        try:
            os._exit(0 if abandonable_thread.failure_of(lambda: 2, 5.0) is None else 1)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
