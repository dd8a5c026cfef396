"""Writes the averages as weights: into another module, or into the model itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardow import _core
from shardow.averaging.replicas import ReplicaExchange
from shardow.base.checks import unsupported, warn
from shardow.distributed.gather import Gatherer, extract_region
from shardow.files.reading import choose
from shardow.sharding.extra_state import extra_states, restore
from shardow.sharding.local import oddity, refuse_expanded
from shardow.sharding.match import compare
from shardow.sharding.swap_guard import refuse_foreign
from shardow.sharding.view import find

if TYPE_CHECKING:
    from shardow.averaging.model_averages import ModelAverages
    from shardow.distributed.rank_group import Step


@torch.no_grad()
def copy_to(averages: ModelAverages, model: nn.Module, decay: object, complete: bool = True) -> None:
    """See EMA.copy_to(). ``complete``: also copies all else that a complete model has."""
    target = find(model, group=averages.view.process_group, odd=True)
    places = {local.name: local for local in [*target.parameters, *target.buffers]}

    def prepare() -> Step[_core.EqualStates]:
        averages.swap.ready("copy_to()")
        refuse_foreign("copy_to()", lambda: [local.tensor for local in target.as_it_is_now()], writes=True)
        shapes = {row.name: row.local.region.shape for row in averages.tracked}
        fit = compare(shapes, {name: place.region.shape for name, place in places.items() if name in shapes})
        fit.refuse("copy_to()", "the other model", done="nothing was copied")
        for place in places.values():
            if not oddity(place.tensor):
                refuse_expanded(place.name, place.tensor)
        target.reshard(refuse_written=True)
        return averages.handing_out("copy_to()", averages.others if complete else None, decay=decay)

    averages.ranks.step("copy_to()", prepare)
    parts = averages.held(choose(averages.keys, decay), complete).parts
    devices = defaultdict(lambda: torch.device("cpu"), {name: place.tensor.device for name, place in places.items()})
    target.reshard()
    # Each full tensor visits every rank once, and each keeps its slice of it.
    for name, full in Gatherer("copy_to()", parts, averages.ranks).everywhere(devices.__getitem__):
        if (place := places.get(name)) is not None:
            flat = place.flat()
            extract_region(full, place.region, flat)
            place.put(flat)
    target.written()
    if not complete:
        return
    restore(model, extra_states(averages.view.model))
    if odd := [f"'{local.name}' {oddity(local.tensor)}" for local in averages.others() if oddity(local.tensor)]:
        warn(f"copy_to() leaves the other model's own: {'; '.join(odd[:8])}")


@torch.no_grad()
def feed_back(averages: ModelAverages, decay: object) -> None:
    """See EMA.feed_back()."""

    def ready(k: int) -> int:
        averages.swap.ready("feed_back()", writes=True)
        apart = [row.name for row in averages.tracked if row.mastered and not row.stretched and averages.splits]
        if apart:
            raise unsupported(
                f"feed_back(): '{apart[0]}' has a master copy on every replica, of which each averages a part: the "
                "other parts "
                "would keep the weights. Give source= stretches that the replicas divide, or replicas='copy'"
            )
        return k

    k = averages.ready_to_swap(decay, "feed_back()", ready)

    def fill() -> None:
        for row in averages.tracked:
            for memory in (row.weights(), row.sources()) if row.mastered else (row.weights(),):
                memory.copy_(row.averages[k])

    write(averages, fill)


def write(averages: ModelAverages, fill: Callable[[], None]) -> None:
    """Writes the model's weights by fill(), which writes ``weights()`` of each tracked tensor; every replica has them
    afterwards. Collective, after an agreement that all are ready."""
    averages.view.reshard()
    averages.swap.gather()
    fill()
    averages.swap.scatter()
    if averages.splits:
        ReplicaExchange(averages.tracked).run(averages.ranks.timeout)
    averages.view.written()
