"""What the fullest of the ranks holds of a tensor, by the way that ranks share a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from shardow import _core
from shardow.base.checks import invalid, one_of, whole

SHARDINGS = ("plain", "ddp", "fsdp1", "fsdp2", "hsdp")


@dataclass(frozen=True)
class Layout:
    """``shards`` ranks hold different parts of a tensor, ``replicas`` the same.

    ``flat``: parts are stretches of elements (FSDP1), else of rows.
    """

    shards: int
    replicas: int
    flat: bool = False

    def local(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the largest part, which is also what FSDP2 gives memory to on every rank: its smaller parts are padded."""
        if self.shards == 1 or not shape:
            return shape
        if self.flat:
            return (-(-math.prod(shape) // self.shards),)
        return (-(-shape[0] // self.shards), *shape[1:])

    def averaged(self, shape: tuple[int, ...]) -> int:
        """Elements of which this rank keeps the average: replicas divide what they hold, as ``EMA(replicas="split")`` does."""
        return _core.Region.whole(list(self.local(shape))).part(0, self.replicas).size


def layout_of(sharding: str, ranks: Any, shards: Any) -> Layout:
    one_of("sharding", sharding, SHARDINGS)
    whole("ranks", ranks, 1)
    if sharding != "hsdp":
        if shards is not None:
            raise invalid(f"shards={shards!r} is for sharding='hsdp'; with {sharding!r} it follows from ranks")
        return Layout(1, ranks) if sharding in ("plain", "ddp") else Layout(ranks, 1, flat=sharding == "fsdp1")
    if shards is None or ranks % whole("shards", shards, 1):
        raise invalid(
            f"sharding='hsdp' on {ranks} ranks needs shards=, how many of them share one copy of the model: a divisor of {ranks}, not "
            f"{shards!r}"
        )
    return Layout(shards, ranks // shards)
