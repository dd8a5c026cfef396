"""Ranks that differ, fail, are late or interrupted: the same error on all, in time, and the steps that were there are
there.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from outcomes import Outcome, outcome
from runs import Run

import shardow

DEADLINE = 3.0


def saved(how: str, out: Path) -> Outcome:
    kind = "ddp" if how in ("weights", "averages") else "fsdp2"
    run, checkpoints = Run(kind), shardow.Checkpoints(out, timeout=DEADLINE)
    if how == "averages":
        run.ema = shardow.EMA(run.model, 0.9, replicas="copy")
    run.train(2)
    run.save(checkpoints)
    parts: dict[str, Any] = {**run.parts(), "step": 3, "state": {"lr": 0.1, "note": "a"}}
    if dist.get_rank() == 1:
        if how == "state":
            parts["state"] = {"lr": 0.2, "note": "a"}
        elif how == "step":
            parts["step"] = 4
        elif how == "parts":
            parts["scheduler"] = None
        elif how == "groups":
            run.optimizer.param_groups[0]["lr"] = 7.0
        elif how == "options of groups":
            run.optimizer.param_groups[0]["weight_decay"] = 7.0
        elif how == "averages":
            run.ema.state_dict()["averages"]["0.weight"].add_(1)
        elif how == "weights":
            run.model.module[0].weight.data += 1
        elif how == "steps of a state":
            run.optimizer.state[run.optimizer.param_groups[0]["params"][0]]["step"] += 1
        elif how == "plain":
            parts["state"] = {"lr": print}
        elif how == "averages on one":
            parts["averages"] = None
    found = outcome(lambda: checkpoints.save(**parts))
    assert checkpoints.latest() == 2
    return found


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("state", "state['lr'] is '0.1' on rank 0 and '0.2' on rank 1"),
        ("step", "step is 3 on rank 0 and 4 on rank 1"),
        ("parts", "scheduler= is"),
        ("groups", "'lr' of group 0 of the optimizer is"),
        ("options of groups", "'weight_decay' of group 0 of the optimizer is"),
        ("averages", "'averages of 0.weight' has other values on rank 0 than on rank 1"),
        ("weights", "'0.weight' has other values on rank 0 than on rank 1"),
        ("steps of a state", "has other values on rank 0 than on rank 1"),
        ("plain", "state.lr is a builtins"),
        ("averages on one", "averages= is ["),
    ],
)
def test_ranks_that_disagree_all_raise_and_say_about_what(how: str, says: str, tmp_path: Path) -> None:
    for kind, message, seconds in ranks.run(2, saved, how, tmp_path):
        assert kind in ("InvalidArgumentError", "PeerFailedError")
        assert says in message
        assert seconds < DEADLINE


def saved_in_another_order(out: Path) -> int | None:
    values = [(f"value {i}", i) for i in range(40)]  # more than travels whole
    state = dict(values if dist.get_rank() == 0 else reversed(values))
    shardow.Checkpoints(out).save(1, torch.nn.Linear(2, 2).requires_grad_(False), state=state)
    return shardow.Checkpoints(out).latest()


def test_the_order_of_values_is_no_difference_between_ranks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert ranks.run(2, saved_in_another_order, tmp_path) == [1, 1]


def restored(how: str, out: Path) -> tuple[Outcome, bool]:
    run, checkpoints = Run("fsdp2"), shardow.Checkpoints(out, timeout=DEADLINE)
    run.train(2)
    run.save(checkpoints)
    run.train(1)
    run.save(checkpoints)
    before = run.model[0].weight.to_local().clone()
    options: dict[str, Any] = {}
    if dist.get_rank() == 1:
        if how == "step":
            options = {"step": 2}
        elif how == "skip":
            options = {"averages": "skip"}
        elif how == "groups":
            options = {"optimizer": torch.optim.AdamW(list(run.model.parameters())[:2])}
    found = outcome(lambda: checkpoints.restore(**{**run.parts(), **options}))
    return found, torch.equal(before, run.model[0].weight.to_local())


@pytest.mark.parametrize(
    ("how", "says"), [("step", "step is None on rank 0 and 2"), ("skip", "averages"), ("groups", "2 groups")]
)
def test_ranks_that_restore_differently_all_raise_and_change_nothing(how: str, says: str, tmp_path: Path) -> None:
    for (kind, message, seconds), same in ranks.run(2, restored, how, tmp_path):
        assert kind in ("InvalidArgumentError", "PeerFailedError"), message
        assert says in message
        assert seconds < DEADLINE
        assert same


def only_rank_0(call: str, out: Path) -> Outcome:
    run, checkpoints = Run("fsdp2"), shardow.Checkpoints(out, timeout=DEADLINE)
    run.save(checkpoints)
    found = "none", "", 0.0
    if dist.get_rank() == 0:
        calls = {
            "save": lambda: run.save(checkpoints),
            "restore": lambda: run.restore(checkpoints),
            "latest": checkpoints.latest,
        }
        found = outcome(calls[call])
    dist.barrier()
    return found


@pytest.mark.parametrize("call", ["save", "restore", "latest"])
def test_a_call_on_rank_0_alone_says_so_within_the_deadline(call: str, tmp_path: Path) -> None:
    kind, message, seconds = ranks.run(2, only_rank_0, call, tmp_path)[0]
    assert kind == "DeadlineError"
    assert "every rank must call it" in message
    assert seconds < DEADLINE + 2


def killed(call: str, out: Path) -> Outcome:
    """Rank 1 dies while rank 0 is in the call."""
    run, checkpoints = Run("fsdp2"), shardow.Checkpoints(out, timeout=DEADLINE)
    run.save(checkpoints)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    run.step = 5
    return outcome(lambda: run.save(checkpoints) if call == "save" else run.restore(checkpoints))


@pytest.mark.parametrize("call", ["save", "restore"])
def test_a_rank_that_dies_is_an_error_in_time_and_the_step_before_is_there(call: str, tmp_path: Path) -> None:
    kind, message, seconds = ranks.run(2, killed, call, tmp_path, may_die=True)[0]
    assert kind in ("DeadlineError", "PeerFailedError"), message
    assert seconds < DEADLINE + 2
    assert shardow.Checkpoints(tmp_path).latest() == 0


def interrupted(out: Path) -> tuple[str, int | None, bool]:
    """Ctrl-C on rank 0, which waits for rank 1."""
    run, checkpoints = Run("fsdp2"), shardow.Checkpoints(out, timeout=30.0)
    run.save(checkpoints)
    said = ""
    began = time.monotonic()
    if dist.get_rank() == 0:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            checkpoints.save(1, **run.parts())
        except KeyboardInterrupt:
            said = "KeyboardInterrupt"
    else:
        time.sleep(1.0)
        said = outcome(lambda: checkpoints.save(1, **run.parts()))[0]
    quick = time.monotonic() - began < 10
    dist.barrier()
    run.step = 2
    run.save(checkpoints)
    return said, checkpoints.latest(), quick


def test_an_interrupted_save_ends_on_all_ranks_and_the_next_one_goes_well(tmp_path: Path) -> None:
    (zero, *first), (one, *second) = ranks.run(2, interrupted, tmp_path)
    assert zero == "KeyboardInterrupt"
    assert one == "PeerFailedError"
    assert first == second == [2, True]


def second_while_first(out: Path) -> tuple[list[int], int | None]:
    """The next save waits for the one under way."""
    run, checkpoints = Run("fsdp2"), shardow.Checkpoints(out, keep=None)
    first = run.save(checkpoints, asynchronous=True)
    run.train(1)
    second = run.save(checkpoints, asynchronous=True)
    assert first.done()
    run.train(1)
    run.save(checkpoints)
    assert second.done()
    run.train(1)
    run.save(checkpoints, asynchronous=True)
    return [int(one.done()) for one in (first, second)], checkpoints.latest()


def test_a_save_waits_for_the_one_under_way_and_so_does_latest(tmp_path: Path) -> None:
    assert ranks.run(2, second_while_first, tmp_path) == [([1, 1], 3)] * 2


def on_a_full_disk(asynchronous: bool, out: Path) -> tuple[Outcome, list[str]]:
    """Rank 1 can't write as much as it has to."""
    run, checkpoints = Run("fsdp2"), shardow.Checkpoints(out, timeout=10.0)
    run.model.register_buffer("large", torch.zeros(100_000))
    run.train(1)
    run.save(checkpoints)
    dist.barrier()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    run.train(1)
    found = outcome(lambda: run.save(checkpoints, asynchronous=True).wait() if asynchronous else run.save(checkpoints))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    assert checkpoints.latest() == 1
    there = sorted(path.name for path in out.iterdir())
    dist.barrier()
    run.save(checkpoints)
    assert checkpoints.latest() == 2
    return found, there


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_that_refuses_one_rank_is_an_error_on_all_and_leaves_nothing(asynchronous: bool, tmp_path: Path) -> None:
    for (kind, message, _), there in ranks.run(2, on_a_full_disk, asynchronous, tmp_path):
        assert kind in ("IoError", "OutOfSpaceError"), message
        assert there == ["step-000000001"]


def failed_in_the_background(out: Path) -> tuple[Outcome, int | None]:
    run, checkpoints = Run("fsdp2"), shardow.Checkpoints(out / "run", timeout=10.0)
    run.save(checkpoints)
    dist.barrier()
    blocked = out / "run" / "step-000000001" / "model.safetensors"
    if dist.get_rank() == 0:
        blocked.mkdir(parents=True)
    dist.barrier()
    run.train(1)
    run.save(checkpoints, asynchronous=True)
    found = outcome(lambda: run.save(checkpoints))
    return found, checkpoints.latest()


def test_an_error_in_the_background_is_raised_by_the_next_save(tmp_path: Path) -> None:
    for (kind, message, _), latest in ranks.run(2, failed_in_the_background, tmp_path):
        assert kind == "InvalidArgumentError", message
        assert "has a directory model.safetensors" in message
        assert latest == 0
