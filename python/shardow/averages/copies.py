"""The averages as weights: of another module, and of the model itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardow import _core
from shardow.averages.replicas import Exchange
from shardow.base.checks import unsupported, warn
from shardow.distributed.gather import Gatherer, take
from shardow.files.reading import choose
from shardow.model.extra_state import extra_states, give
from shardow.model.local import oddity, refuse_expanded
from shardow.model.match import compare
from shardow.model.swap_guard import refuse_foreign
from shardow.model.view import find

if TYPE_CHECKING:
    from shardow.averages.core import Averages
    from shardow.distributed.rank_group import Step


@torch.no_grad()
def copy_to(core: Averages, model: nn.Module, decay: object, complete: bool = True) -> None:
    """See EMA.copy_to(). ``complete``: with all else that a complete model has."""
    target = find(model, group=core.view.process_group, odd=True)
    places = {one.name: one for one in [*target.parameters, *target.buffers]}

    def prepare() -> Step[_core.EqualStates]:
        core.swap.ready("copy_to()")
        refuse_foreign("copy_to()", lambda: [one.tensor for one in target.as_it_is_now()], writes=True)
        shapes = {row.name: row.local.region.shape for row in core.tracked}
        found = compare(shapes, {name: place.region.shape for name, place in places.items() if name in shapes})
        found.refuse("copy_to()", "the other model", done="nothing was copied")
        for place in places.values():
            if not oddity(place.tensor):
                refuse_expanded(place.name, place.tensor)
        target.reshard(refuse_written=True)
        return core.handing_out("copy_to()", core.others if complete else None, decay=decay)

    core.ranks.step("copy_to()", prepare)
    parts = core.held(choose(core.keys, decay), complete).parts
    devices = defaultdict(lambda: torch.device("cpu"), {name: place.tensor.device for name, place in places.items()})
    target.reshard()
    # Each full tensor visits every rank once, and each keeps its slice of it.
    for name, full in Gatherer("copy_to()", parts, core.ranks).everywhere(devices.__getitem__):
        if (place := places.get(name)) is not None:
            flat = place.flat()
            take(full, place.region, flat)
            place.put(flat)
    target.written()
    if not complete:
        return
    give(model, extra_states(core.view.model))
    if odd := [f"'{one.name}' {oddity(one.tensor)}" for one in core.others() if oddity(one.tensor)]:
        warn(f"copy_to() leaves the other model's own: {'; '.join(odd[:8])}")


@torch.no_grad()
def feed_back(core: Averages, decay: object) -> None:
    """See EMA.feed_back()."""

    def ready(k: int) -> int:
        core.swap.ready("feed_back()", writes=True)
        apart = [one.name for one in core.tracked if one.mastered and not one.stretched and core.splits]
        if apart:
            raise unsupported(
                f"feed_back(): '{apart[0]}' has a master copy on every replica, of which each averages a part: the "
                "other parts "
                "would keep the weights. Give source= stretches that the replicas divide, or replicas='copy'"
            )
        return k

    k = core.ready_to_swap(decay, "feed_back()", ready)

    def fill() -> None:
        for one in core.tracked:
            for memory in (one.weights(), one.sources()) if one.mastered else (one.weights(),):
                memory.copy_(one.averages[k])

    write(core, fill)


def write(core: Averages, fill: Callable[[], None]) -> None:
    """fill() writes ``weights()`` of what is tracked; afterwards the model has them, on every replica. Collective,
    after an agreement that all are ready."""
    core.view.reshard()
    core.swap.gather()
    fill()
    core.swap.scatter()
    if core.splits:
        Exchange(core.tracked).run(core.ranks.timeout)
    core.view.written()
