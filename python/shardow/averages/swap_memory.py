"""What a swap exchanges: the memory of weights and averages, as the model has it and as the engine knows it. Weights
may lie elsewhere when they come back: casts, moves to devices, replaced parameters, load_state_dict(assign=True)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from shardow import _core
from shardow.averages.cuda_streams import Streams, with_memory
from shardow.averages.tracked import Tracked
from shardow.base.checks import invalid, warn
from shardow.model.view import ModelView


class SwapMemory:
    """Local: nothing here waits for other ranks."""

    def __init__(self, engine: _core.Average, streams: Streams, tracked: Sequence[Tracked], view: ModelView) -> None:
        self._engine, self._streams, self._tracked, self._view = engine, streams, tracked, view
        self._find_strided()

    @property
    def swapped(self) -> bool:
        return self._engine.swapped

    @property
    def _average(self) -> _core.Average:
        """The engine, on torch's current streams."""
        self._streams.follow(self._engine)
        return self._engine

    def weights(self) -> Iterator[torch.Tensor]:
        """The memory of the weights, of what is averaged in their place, and of the averages; in a swap also where the
        model shows them by now."""
        for one in self._tracked:
            yield one.local.tensor
            yield one.source
            yield from one.averages
        if self.swapped and not self._view.unchanged():
            yield from self.parameters()

    def parameters(self) -> list[torch.Tensor]:
        return self._view.parameter_objects()

    def finish_reading(self) -> None:
        """Before the weights change: an update in the background has read them by then, in the order of torch's current
        streams.
        """
        self._average.finish_reading()

    def gather(self) -> None:
        """Strided weights into the memory that the engine reads. Others lie there already."""
        for one in self._strided:
            one.gather()

    def scatter(self) -> None:
        """And back, after somebody has written there."""
        for one in self._strided:
            one.scatter()

    def _find_strided(self) -> None:
        self._strided = [one for one in self._tracked if one.stage is not None]

    def bind(self) -> None:
        """The engine reads where the weights lie now."""
        for one in self._tracked:
            one.follow()
        self._find_strided()
        sources = [one.view(one.sources()) for one in self._tracked]
        with_memory(lambda: self._average.bind(sources))

    def _swap_in(self, k: int) -> None:
        """What this rank owns, whole or not at all."""
        self._view.reshard()
        self.gather()
        weights = [one.view(one.weights()) for one in self._tracked]
        with_memory(lambda: self._average.swap_in(weights, k))
        self.scatter()

    def _take_back(self) -> None:
        """What this rank owns, from whatever point the swap has reached."""
        self._average.take_back([one.view(one.weights()) for one in self._tracked])
        self.scatter()

    def _shown(self) -> None:
        """Memory was written: autograd is told, and nothing of the old values may survive in an unsharded copy."""
        self._view.bump_versions()
        self._view.reshard()


class Move(NamedTuple):
    """``weights`` belong into the memory ``now``."""

    name: str
    weights: torch.Tensor
    now: torch.Tensor


def find_moves(view: ModelView, tracked: Sequence[Tracked], strict: bool) -> list[Move]:
    """By name, in the model as it is now, under every name that a tied weight has. Changes nothing. Raises ValueError
    where the model has no place of the same region for a weight any more; not so ``strict``, such are left out."""
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
            f"the model has no place for its weights any more: {lost[0]} ({len(lost)} in all). Nothing was lost: undo "
            "what was done to the "
            "model inside swapped() and call restore(), or restore(strict=False) to leave such parameters as they are"
        )
    return moves


def warn_of_casts(moves: Sequence[Move]) -> None:
    cast = [move for move in moves if move.now.dtype != move.weights.dtype]
    if cast:
        was, now = cast[0].weights.dtype, cast[0].now.dtype
        casts = f"'{cast[0].name}' and {len(cast) - 1} more were {was} and are {now} now"
        warn(f"the model was cast inside swapped(): {casts}, so its weights came back rounded to that", RuntimeWarning)


def warn_of_writes(names: Sequence[str]) -> None:
    if names:
        more = f"'{names[0]}' and {len(names) - 1} more"
        fate = "and what was written may be in the averages now"
        warn(f"{more} were written inside swapped(): the weights are those from before it, {fate}", RuntimeWarning)
