"""A state fills averages: whole tensors, or the same parts, by any names, once all ranks have compared them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from shardow.averages.core import Averages
from shardow.averages.state import HINT, Copy, copies_of
from shardow.distributed.rank_group import RankGroup
from shardow.model.local import LocalTensor
from shardow.model.match import Fit, Form, fit
from shardow.model.parts import Held


@torch.no_grad()
def fill(
    what: str, ranks: RankGroup, look: Callable[[], Held], state: Mapping[str, Any],
    refuse: Callable[[Fit[Form | None]], None],
) -> Fit[Form | None]:  # fmt: skip
    """Fills what ``look()`` finds here with a state's whole tensors, or the same parts. ``refuse()`` raises where the
    comparison does not suit: on every rank, before anything changes. Collective."""

    def check() -> tuple[Held, list[Copy], Fit[Form | None]]:
        held = look()
        found = fit(held, state, "the state")
        copies = copies_of(held.parts, state, found)
        refuse(found)
        return held, copies, found

    held, copies, found = ranks.agree(what, check)
    for copy in copies:
        copy()
    held.put_back()
    return found


@torch.no_grad()
def load_averages(
    core: Averages, averages: Mapping[str, Any], strict: bool = True, others: Iterable[LocalTensor] = ()
) -> None:
    """Takes pieces of the same sharding, DTensors, or full tensors, under any names of theirs. Names of ``others``, and
    unless ``strict`` all other names, are passed over, and what is missing stays; counters stay too. Collective."""
    what = "load_state_dict()"

    def look() -> Held:
        core.swap.refuse(what)
        held = core.held()
        held.others = [name for local in others for name in (local.name, *local.aliases)]
        return held

    def refuse(found: Fit[Any]) -> None:
        (found if strict else found.only_different()).refuse(what, "the state", hint=HINT)

    fill(what, core.ranks, look, averages, refuse)
