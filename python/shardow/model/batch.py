"""Batch: plain tensors of the host, looked at together; each one's view is made when somebody asks for it. An update needs none."""

from __future__ import annotations

from functools import cached_property

import torch
from torch.utils._python_dispatch import _disable_current_modes

from shardow import _core


class Batch:
    """``recorded``: whole parameters, dense and in order, on the CPU; ``looked``: them. What they were then counts, and their memory is
    kept, whatever they show by the time when a view is made (``p.data = other``)."""

    def __init__(self, recorded: list[torch.Tensor], looked: _core.Looked) -> None:
        self._recorded, self._looked = recorded, looked
        self.regions, self.addresses = looked.regions(), looked.addresses()
        self.dtypes: list[torch.dtype] = looked.dtypes()
        self._storages: list[torch.UntypedStorage] = [*map(torch.Tensor.untyped_storage, recorded)]

    @cached_property
    @torch.inference_mode(False)  # where they would become tensors that nobody may write
    def tensors(self) -> list[torch.Tensor]:
        """Without grad, on the parameters' memory."""
        with _disable_current_modes():  # whatever somebody does with operations of his own when the first one is asked for
            if self._looked.still(self._recorded):
                return [one.detach() for one in self._recorded]
            shapes = {id(region): torch.Size(region.shape) for region in self.regions}
            rows = zip(self._recorded, self._storages, self.addresses, self.dtypes, (shapes[id(one)] for one in self.regions), strict=True)
            return [_view(*row) for row in rows]


def _view(recorded: torch.Tensor, storage: torch.UntypedStorage, address: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    if recorded.data_ptr() == address and recorded.shape == shape and recorded.dtype is dtype and recorded.is_contiguous():
        return recorded.detach()
    first = (address - storage.data_ptr()) // dtype.itemsize if address else 0
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, first, shape, torch.empty(shape, device="meta").stride())
