"""A swap on two ranks, of which one is interrupted, for every wrapper: the other learns of it in time, the weights come
back on both, and all goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch.distributed as dist
from stopped_swaps import BEFORE, EVERY, TIMEOUT, Rank, Stop, by_a_signal
from swap_seams import run

import shardow

KINDS = [
    ("ddp", "split"),
    ("ddp", "copy"),
    ("hsdp", "split"),
    ("fsdp1", "split"),
    ("fsdp2", "split"),
    ("tp+fsdp2", "split"),
]


def of_model(kind: str, replicas: Any, folder: str) -> Rank:
    model = models.build(kind, dist.get_world_size())
    return Rank(shardow.EMA(model, 0.5, replicas=replicas, timeout=TIMEOUT), model, folder)


def stopped(kind: str, replicas: str, folder: str) -> list[Any]:
    rank = of_model(kind, replicas, folder)
    return [rank.wrong, rank.go_through_all()]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "replicas"), KINDS)
def test_stopped_anywhere_on_one_rank_the_weights_come_back_on_both_and_all_goes_on(
    kind: str, replicas: str, quick_folder: Path
) -> None:
    (wrong0, points), (wrong1, _) = run(2, stopped, kind, replicas, str(quick_folder), timeout=3000 if EVERY else 400)
    assert wrong0 + wrong1 == []
    assert min(points) > 2, points
    assert not EVERY or (points[0] > 200 and min(points[1::2]) > 25), points  # lines of Python's; the engine's steps


def stopped_at_first(kind: str, replicas: str, folder: str) -> list[Any]:
    """Before each line until signals are held, and a few beyond: of which the other rank learned by its deadline
    alone."""
    rank, missed = of_model(kind, replicas, folder), dict[str, list[int]]()
    for name, (way, most) in BEFORE.items():
        points = [*range(0, most, 1 if EVERY else most), *range(most, most + (28 if EVERY else 14))]
        found = {at: rank.go_on_after(way, by_a_signal, Stop(at), victim=at % 2) for at in points}
        missed[name] = [at for at, one in found.items() if one]
    return [rank.wrong, missed]


@pytest.mark.parametrize(("kind", "replicas"), KINDS if EVERY else KINDS[:1])
def test_stopped_at_its_first_lines_a_rank_tells_the_others_or_has_not_begun(
    kind: str, replicas: str, quick_folder: Path
) -> None:
    """Of each call the first few lines alone come before anybody could be told."""
    (wrong0, missed), (wrong1, _) = run(2, stopped_at_first, kind, replicas, str(quick_folder), timeout=280)
    assert wrong0 + wrong1 == []
    for name, (_, most) in BEFORE.items():
        divided = [(wrapper, "split") for wrapper in ("ddp", "hsdp", "tp+fsdp2")]
        local = name == "restore" and (kind, replicas) not in divided
        assert missed[name] == ([] if local else list(range(most)) if EVERY else [0]), name
