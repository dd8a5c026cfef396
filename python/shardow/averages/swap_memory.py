"""What a swap exchanges: the memory of weights and averages, as the model has it and as the engine knows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shardow import _core
from shardow.averages import tracked as _tracked
from shardow.averages.cuda_streams import Streams, with_memory
from shardow.model.view import ModelView


class SwapMemory:
    """Local: nothing here waits for other ranks."""

    def __init__(self, engine: _core.Average, streams: Streams, tracked: Sequence[_tracked.Tracked], view: ModelView) -> None:
        self._engine, self._streams, self._tracked, self._view = engine, streams, tracked, view
        self.strided = _tracked.strided(tracked)  # those that the engine sees through a stage

    @property
    def swapped(self) -> bool:
        return self._engine.swapped

    @property
    def _average(self) -> _core.Average:
        """The engine, on torch's current streams."""
        self._streams.follow(self._engine)
        return self._engine

    def weights(self) -> Iterator[torch.Tensor]:
        """The memory of the weights, of what is averaged in their place, and of the averages."""
        for one in self._tracked:
            yield one.local.tensor
            yield one.source
            yield from one.averages

    def parameters(self) -> list[torch.Tensor]:
        return self._view.parameter_objects()

    def _bind(self) -> None:
        """The engine reads where the weights lie now."""
        for one in self._tracked:
            one.follow()
        self.strided = _tracked.strided(self._tracked)
        sources = _tracked.source_views(self._tracked)
        with_memory(lambda: self._average.bind(sources))

    def _swap_in(self, k: int) -> None:
        """What this rank owns, whole or not at all."""
        self._view.reshard()
        _tracked.gather(self.strided)
        weights = _tracked.weight_views(self._tracked)
        with_memory(lambda: self._average.swap_in(weights, k))
        _tracked.scatter(self.strided)

    def _take_back(self) -> None:
        """What this rank owns, from whatever point the swap has reached."""
        self._average.take_back(_tracked.weight_views(self._tracked))
        _tracked.scatter(self.strided)

    def _shown(self) -> None:
        """Memory was written: autograd is told, and nothing of the old values may survive in an unsharded copy."""
        self._view.bump_versions()
        self._view.reshard()
