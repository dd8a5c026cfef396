"""Weights that were frozen when the averages were made: they have none, also when they are trained later."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from shardow.base.warnings import warn

_AT_ONCE = 8  # looked at in an update, whose time must not grow with what is frozen


class Unfrozen:
    """Says, once, that some of them are trained now."""

    def __init__(self, frozen: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._frozen = list(frozen)
        self._next = itertools.cycle(self._frozen)

    def look(self, everywhere: bool = False) -> None:
        """``everywhere``: at all of them, else at the next few."""
        if not self._frozen:
            return
        if any(p.requires_grad for _, p in (self._frozen if everywhere else itertools.islice(self._next, _AT_ONCE))):
            self._say([name for name, p in self._frozen if p.requires_grad])

    def _say(self, names: list[str]) -> None:
        self._frozen = []
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        warn(
            f"{', '.join(names[:8])}{more}: frozen when this EMA was made, trained now, and not averaged: exports and swapped() have the "
            "weights as they "
            "are. To average them, make a new EMA and load the old one's state into it: new.load_state_dict(old.state_dict(), strict=False)"
        )
