"""Averages into a module, again and again (as a target network): in place where it is sharded alike, else through rank
0.
"""

from __future__ import annotations

import torch
from torch import nn

from shardow import errors
from shardow.averages import state as _state
from shardow.averages.core import Averages
from shardow.averages.tracked import Tracked, divide
from shardow.model.match import compare
from shardow.model.swap_guard import refuse_foreign
from shardow.model.view import ModelView, find
from shardow.ranks.gather import Gatherer


class Copier:
    """Of ``ema``'s averages into ``target``, parameters alone. Made and called on every rank that shares the EMA."""

    def __init__(self, core: Averages, target: nn.Module) -> None:
        self.target = target
        self._averages = core
        self._view: ModelView = find(target, group=core.team.process_group)
        self._tracked = self._as_averaged()
        self._alike_everywhere: bool | None = None

    @torch.no_grad()
    def ready(self) -> None:
        """Raises, before anything changes, where the target is not what it was. Local."""
        self._averages.swap.refuse("copy_to()")
        self._view.reshard()
        if not self._view.unchanged() and not self._view.follow_moves(self._follow):
            raise errors.make("invalid_argument", self._view.explain_change())
        refuse_foreign("copy_to()", lambda: [one.local.tensor for one in self._tracked], writes=True)

    def _follow(self) -> None:
        for one in self._tracked:
            one.follow()

    @torch.no_grad()
    def copy(self) -> None:
        """Collective."""
        team, pairs = self._averages.team, list(zip(self._tracked, self._averages.tracked, strict=True))
        if self._alike_everywhere is None:
            alike = all(there.region == here.region for there, here in pairs)
            self._alike_everywhere = all(answer == b"1" for answer in team.gather("copy_to()", b"%d" % alike))
        if self._alike_everywhere:
            torch._foreach_copy_([there.weights() for there, _ in pairs], [here.averages[0] for _, here in pairs])
            for one in self._tracked:
                one.scatter()
            self._averages.share(self._tracked)
        else:
            _state.copy_streamed(Gatherer("copy_to()", self._averages.parts(), team), self._view, team)
        self._view.bump_versions()
        self._view.reshard()

    def _as_averaged(self) -> list[Tracked]:
        """The target's parameters in the order of the averages. Raises KeyError, a ValueError too, with the names that
        don't fit.
        """
        there = {one.name: one for one in self._view.parameters}
        shapes = {one.name: tuple(one.local.region.shape) for one in self._averages.tracked}
        found = compare(shapes, {name: tuple(one.region.shape) for name, one in there.items()})
        found.refuse("copy_to()", "the module", KeyError, here="in the averages", done="nothing was copied")
        chosen = [there[name] for name in shapes]
        return [Tracked(one, *divide(one, self._averages.options.replicas)) for one in chosen]
