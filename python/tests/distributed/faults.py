"""Verbs of two real ranks, of which the last one has a fault when it is about to be counted in a round, or right after
that. For test_faults_in_rounds.py."""

from __future__ import annotations

import functools
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import torch
import torch.distributed as dist
from outcomes import Outcome

import shardow
from shardow.distributed import store_group

#: "late" by half a second more than the timeout; "another call": than the other rank's, in the first round.
FAULTS = ("late", "stopped", "stopped after", "interrupted", "another call", "killed", "killed after")
_SIGNALS = {"stopped": signal.SIGSTOP, "interrupted": signal.SIGINT, "killed": signal.SIGKILL}
_LANE = re.compile(r"\d+/lane/")
_connected = store_group.connected


class Fault:
    """Happens in this process in its round of that number since the fault was made, from 1 on."""

    def __init__(self, kind: str, number: int, timeout: float) -> None:
        self._kind, self._number, self._timeout = kind, number, timeout
        self._rounds: set[str] = set()
        self.has_happened = kind == "another call" and number == 1

    def counted(self, prefix: str, key: str, count: Callable[[], int]) -> int:
        """Returns count(), which counts this rank in."""
        self._rounds.add(f"{prefix} {key}")
        if len(self._rounds) != self._number or self.has_happened or self._kind == "another call":
            return count()
        self.has_happened = True
        if not self._kind.endswith(" after"):
            self._happen()
        answer = count()
        if self._kind.endswith(" after"):
            self._happen()
        return answer

    def _happen(self) -> None:
        if self._kind == "late":
            time.sleep(self._timeout + 0.5)
        else:
            os.kill(os.getpid(), _SIGNALS[self._kind.removesuffix(" after")])
            time.sleep(0.3 if self._kind == "interrupted" else 0.05)  # the other threads hear it
            if self._kind == "stopped after":
                time.sleep(0.2)  # when it goes on, the answer takes some time yet


class Watched:
    """A store of torch's whose rounds the fault of this process knows."""

    fault: Fault | None = None

    def __init__(self, prefix: str) -> None:
        self._prefix, self._store = prefix, _connected(prefix)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def add(self, key: str, amount: int) -> int:
        count = functools.partial(self._store.add, key, amount)
        fault = Watched.fault
        answer: int = fault.counted(self._prefix, key, count) if amount and fault and _LANE.match(key) else count()
        return answer


def outcome(call: Callable[[], object]) -> Outcome:
    began, kind, message = time.monotonic(), "none", ""
    try:
        call()
    except KeyboardInterrupt:
        kind = "KeyboardInterrupt"
    except shardow.Error as error:
        kind, message = type(error).__name__, str(error)
    return kind, message, time.monotonic() - began


def verbs(kind: str, folder: Path, timeout: float) -> dict[str, Callable[[], object]]:
    model = models.build(kind, dist.get_world_size())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    patient = shardow.EMA(model, 0.9)
    shardow.save(model, folder / "model")
    patient.save(folder / "averages")
    ema = shardow.EMA(model, 0.9, timeout=timeout)
    shardow.Checkpoints(folder / "run").save(0, model, patient, optimizer)
    run = shardow.Checkpoints(folder / "run", timeout=timeout)

    def materialize() -> None:
        with shardow.meta_init():
            empty = models.build(kind, dist.get_world_size())
        shardow.materialize(empty, folder / "model", timeout=timeout)

    def swap_in_and_back() -> None:
        with ema.swapped():
            pass

    return {
        "EMA": lambda: shardow.EMA(model, 0.9, timeout=timeout),
        "full_state_dict": ema.full_state_dict,
        "swapped": swap_in_and_back,
        "save": lambda: shardow.save(model, folder / "again", timeout=timeout),
        "async_save": lambda: shardow.async_save(model, folder / "again", timeout=timeout).wait(),
        "load": lambda: shardow.load(model, folder / "model", timeout=timeout),
        "materialize": materialize,
        "EMA.save": lambda: ema.save(folder / "averages"),
        "EMA.load": lambda: ema.load(folder / "averages"),
        "merge": lambda: shardow.merge([folder / "model"] * 2, folder / "merged", timeout=timeout),
        "Checkpoints.save": lambda: run.save(1, model, ema, optimizer),
        "Checkpoints.restore": lambda: run.restore(model, ema, optimizer),
        "restore": ema.restore,
        "next": ema.distance,
    }


def meet(kind: str, verb: str, fault: str, rounds: list[int], timeout: float, folder: Path) -> list[list[Outcome]]:
    """Returns by round how this rank's calls ended: the one with the fault, restore(), the same ranks' next call, and
    the verb again. Ends after a round that the verb does not have, or a transfer that was cut off, which costs the
    ranks their connections."""
    store_group.connected = Watched
    calls, is_faulty = verbs(kind, folder, timeout), dist.get_rank() == dist.get_world_size() - 1
    group, pids = dist.new_group(), [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    outcomes: list[list[Outcome]] = []
    for number in rounds:
        dist.barrier(group)
        Watched.fault = Fault(fault, number, timeout) if is_faulty else None
        is_other = Watched.fault is not None and Watched.fault.has_happened
        outcomes.append([outcome(calls["next" if is_other else verb])])
        if fault.startswith("stopped") and not is_faulty:
            # By then the stopped rank's own wait for the store is over, too.
            time.sleep(max(0.0, 1.05 * timeout + 1.0 - outcomes[-1][0][2]))
            os.kill(pids[-1], signal.SIGCONT)
        if fault.startswith("killed"):
            return outcomes
        happened = torch.tensor([int(Watched.fault is not None and Watched.fault.has_happened)])
        Watched.fault = None
        dist.all_reduce(happened, group=group)
        outcomes[-1] += [outcome(calls[name]) for name in ("restore", "next", verb)]
        if not happened or outcomes[-1][-1][0] != "none":
            break
    return outcomes
