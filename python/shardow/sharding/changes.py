"""What has become of a model's tensors since its view was made, in words, and the way out. Weights may lie elsewhere
when they come back from a swap, after casts, moves to devices, replaced parameters, load_state_dict(assign=True)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from shardow import _core
from shardow.base.checks import invalid, warn
from shardow.sharding.local import LocalTensor

WAY_OUT = (
    "make the EMA after the model has its final form, "
    "or make a new EMA and load the old one's state into it: new.load_state_dict(old.state_dict(), strict=False); "
    "old.detach() ends its updates"
)


#: What stays as it is where memory moves: (a tensor's object in the model, the first name of what lies in its memory,
#: quoted, its dtype, device and region).
Form = tuple[object, str, torch.dtype, torch.device, _core.Region]


def change(recorded: Mapping[str, Form], current: Mapping[str, Form]) -> str | None:
    """Returns what has become of the first tensor that is not as it was recorded; None where nothing but addresses has
    changed. Both by name.
    """
    for name in {**recorded, **current}:
        if name not in current:
            return f"'{name}' is gone from the model; {WAY_OUT}"
        if name not in recorded:
            return f"'{name}' has been added since this EMA was made, and has no average; {WAY_OUT}"
        (before, *old), (after, *new) = recorded[name], current[name]
        if after is not before:
            return f"'{name}' has been replaced by another object since this EMA was made; {WAY_OUT}"
        for what, value, expected in zip(("lies in the memory of", "is", "is on", "holds"), new, old, strict=True):
            if value != expected:
                return f"'{name}' {what} {value}, it was {expected} when this EMA was made; {WAY_OUT}"
    return None


class Move(NamedTuple):
    """``weights`` belong into the memory ``target``."""

    name: str
    weights: torch.Tensor
    target: torch.Tensor


def find_moves(model: Iterable[LocalTensor], weights: Iterable[LocalTensor], strict: bool) -> list[Move]:
    """Returns where ``weights`` lie in ``model``, as that is now, under every name that a tied weight has, if not where
    they were. Raises ValueError where it has no place of the same region for a weight any more; not so ``strict``, such
    are left out."""
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
