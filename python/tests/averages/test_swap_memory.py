"""A swap on two ranks, of which one fails in a call that the engine makes of the weights' memory: the weights come back
on both, by restore() where the call says so, and all goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import models
import pytest
import torch.distributed as dist
from stopped_swaps import EVERY, TIMEOUT, WAYS, Rank, Stop
from swap_seams import run

import shardow
from shardow.averaging.swap import Swap

#: By call, how often a block makes it where replicas divide, and elsewhere.
CALLS = {"places": (1, 1), "scatter": (2, 2), "written": (2, 2), "exchange": (2, 0)}
KINDS = [("ddp", "split"), ("fsdp2", "split"), ("ddp", "copy"), ("hsdp", "split"), ("fsdp1", "split")]


def by_a_call(name: str) -> Callable[[Stop], AbstractContextManager[None]]:
    """The ``at``-th call has no memory; what replicas send each other fails when it has been sent, since the ranks'
    connections would not outlive a rank that does not take part."""

    @contextmanager
    def by(stop: Stop) -> Iterator[None]:
        call = getattr(Swap, name)

        def fails(swap: Swap, *args: Any) -> Any:
            stop.seen += 1
            if stop.seen != stop.at + 1:
                return call(swap, *args)
            if name == "exchange":
                call(swap, *args)
            stop.where = f"call {stop.at} of {name}()"
            raise MemoryError(f"bad_alloc in {name}()")

        setattr(Swap, name, fails)
        try:
            yield
        finally:
            setattr(Swap, name, call)

    return by


def stopped(kind: str, replicas: Any, folder: str) -> tuple[list[str], dict[str, int]]:
    model = models.build(kind, dist.get_world_size())
    rank = Rank(shardow.EMA(model, 0.5, replicas=replicas, timeout=TIMEOUT), model, folder)
    points = dict.fromkeys(CALLS, 0)
    for name in CALLS:
        while rank.go_on_after(WAYS["block"], by_a_call(name), Stop(points[name]), victim=points[name] % 2) is not None:
            points[name] += 1
    return rank.wrong, points


@pytest.mark.parametrize(("kind", "replicas"), KINDS if EVERY else KINDS[:2])
def test_stopped_in_any_call_the_weights_come_back_on_both_and_all_goes_on(
    kind: str, replicas: str, quick_folder: Path
) -> None:
    (wrong0, points), (wrong1, _) = run(2, stopped, kind, replicas, str(quick_folder))
    assert wrong0 + wrong1 == []
    divided = kind in ("ddp", "hsdp") and replicas == "split"
    assert points == {name: counts[0 if divided else 1] for name, counts in CALLS.items()}
