"""Finds how a model's tensors have changed since its view was made, and describes it with advice. A swap may have to
bring weights back into other memory: after casts, moves to devices, replaced parameters, load_state_dict(assign=True).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from shardow import _core
from shardow.base.checks import invalid, warn
from shardow.sharding.local import LocalTensor

HINT = (
    "make the EMA after the model has its final form, "
    "or make a new EMA and load the old one's state into it: new.load_state_dict(old.state_dict(), strict=False); "
    "old.detach() ends its updates"
)


#: Properties of a tensor that do not change where its memory moves: (its object in the model, the first name of the
#: tensor in its memory, quoted, its dtype, device and region).
Form = tuple[object, str, torch.dtype, torch.device, _core.Region]


def change(recorded: Mapping[str, Form], current: Mapping[str, Form]) -> str | None:
    """Describes the change of the first tensor whose form is not the recorded one; None where at most addresses have
    changed. Both mappings are by name.
    """
    for name in {**recorded, **current}:
        if name not in current:
            return f"'{name}' is gone from the model; {HINT}"
        if name not in recorded:
            return f"'{name}' has been added since this EMA was made, and has no average; {HINT}"
        (before, *old), (after, *new) = recorded[name], current[name]
        if after is not before:
            return f"'{name}' has been replaced by another object since this EMA was made; {HINT}"
        for what, value, expected in zip(("lies in the memory of", "is", "is on", "holds"), new, old, strict=True):
            if value != expected:
                return f"'{name}' {what} {value}, it was {expected} when this EMA was made; {HINT}"
    return None


class Move(NamedTuple):
    """A swap must bring ``weights`` back into the memory ``target``."""

    name: str
    weights: torch.Tensor
    target: torch.Tensor


def find_moves(model: Iterable[LocalTensor], weights: Iterable[LocalTensor], strict: bool) -> list[Move]:
    """Returns a move for each of ``weights`` that has other memory in ``model`` now, under every name of a tied weight.
    Raises ValueError where the model has no place of the same region for a weight any more; unless ``strict``, such
    weights are left out."""
    places = {name: local for local in model for name in (local.name, *local.aliases)}
    moves, lost = [], []
    for local in weights:
        for name in (local.name, *local.aliases):
            place = places.get(name)
            if place is None or place.region != local.region:
                lost.append(f"'{name}' is gone" if place is None else f"'{name}' is of another shape or sharding")
            elif place.tensor.data_ptr() != local.tensor.data_ptr() or place.tensor.dtype != local.tensor.dtype:
                moves.append(Move(name, local.tensor, place.tensor))
    if lost and strict:
        raise invalid(
            f"the model has no place for its weights any more: {lost[0]} ({len(lost)} in all). Nothing was lost: undo "
            "what was done to the "
            "model inside swapped() and call restore(), or restore(strict=False) to leave such parameters as they are"
        )
    return moves


def warn_of_casts(moves: Sequence[Move]) -> None:
    if cast := [move for move in moves if move.target.dtype != move.weights.dtype]:
        dtype, target = cast[0].weights.dtype, cast[0].target.dtype
        casts = f"'{cast[0].name}' and {len(cast) - 1} more were {dtype} and are {target} now"
        warn(f"the model was cast inside swapped(): {casts}, so its weights came back rounded to that", RuntimeWarning)
