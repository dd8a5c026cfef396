"""Weights whose memory in the model became another while they were swapped out: casts, moves to devices, replaced parameters,
load_state_dict(assign=True). And writes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch

from shardow.averages.tracked import Tracked
from shardow.base.checks import invalid
from shardow.model.view import ModelView


class Move(NamedTuple):
    """``weights`` belong into the memory ``now``."""

    name: str
    weights: torch.Tensor
    now: torch.Tensor

    def make(self) -> None:
        self.now.copy_(self.weights.reshape(self.now.shape))


def find_moves(view: ModelView, tracked: Sequence[Tracked], strict: bool) -> list[Move]:
    """By name, in the model as it is now, under every name that a tied weight has. Changes nothing.

    Raises ValueError where the model has no place of the same region for a weight any more; not so ``strict``, such are left out.
    """
    now = {name: one for one in view.as_it_is_now() for name in (one.name, *one.aliases)}
    moves, lost = [], []
    for one in tracked:
        for name in (one.name, *one.local.aliases):
            there = now.get(name)
            if there is None or there.region != one.local.region:
                lost.append(f"'{name}' is gone" if there is None else f"'{name}' is of another shape or sharding")
            elif there.tensor.data_ptr() != one.local.tensor.data_ptr() or there.tensor.dtype != one.local.tensor.dtype:
                moves.append(Move(name, one.local.tensor, there.tensor))
    if lost and strict:
        raise invalid(
            f"the model has no place for its weights any more: {lost[0]} ({len(lost)} in all). Nothing was lost: undo what was done to the "
            "model inside swapped() and call restore(), or restore(strict=False) to leave such parameters as they are"
        )
    return moves


def warn_of_casts(moves: Sequence[Move]) -> None:
    cast = [move for move in moves if move.now.dtype != move.weights.dtype]
    if cast:
        was, now = cast[0].weights.dtype, cast[0].now.dtype
        warnings.warn(
            f"the model was cast inside swapped(): '{cast[0].name}' and {len(cast) - 1} more were {was} and are {now} now, "
            "so its weights came back rounded to that",
            RuntimeWarning,
            stacklevel=6,
        )


def warn_of_writes(names: Sequence[str]) -> None:
    if names:
        warnings.warn(
            f"'{names[0]}' and {len(names) - 1} more were written inside swapped(): the weights are those from before it, "
            "and what was written may be in the averages now",
            RuntimeWarning,
            stacklevel=6,
        )
