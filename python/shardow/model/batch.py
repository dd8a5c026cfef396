"""Batch: plain tensors of the host, looked at together; each one's view is made when somebody asks for it. An update needs none."""

from __future__ import annotations

from functools import cached_property

import torch
from torch.utils._python_dispatch import _disable_current_modes

from shardow import _core


class Batch:
    """``recorded``: whole parameters, dense and in order, on the CPU; ``looked``: them. What they were then counts, and their storages are
    kept, whatever they show by the time when a view is made (``p.data = other``). Where a storage has moved by then (``share_memory_()``),
    views are there too."""

    def __init__(self, recorded: list[torch.Tensor], looked: _core.Looked) -> None:
        self._recorded, self._looked = recorded, looked
        self.regions, self.addresses = looked.regions(), looked.addresses()
        self.dtypes: list[torch.dtype] = looked.dtypes()
        self._storages: list[torch.UntypedStorage] = [*map(torch.Tensor.untyped_storage, recorded)]
        begins = [*map(torch.UntypedStorage.data_ptr, self._storages)]
        self._begins = self.addresses if begins == self.addresses else begins

    @cached_property
    @torch.inference_mode(False)  # where they would become tensors that nobody may write
    def tensors(self) -> list[torch.Tensor]:
        """Without grad, on the parameters' memory."""
        with _disable_current_modes():  # whatever somebody does with operations of his own when the first one is asked for
            if self._looked.still(self._recorded):
                return [one.detach() for one in self._recorded]
            shapes = {id(region): torch.empty(region.shape, device="meta") for region in self.regions}
            like = (shapes[id(region)] for region in self.regions)
            rows = zip(self._storages, self._begins, self.addresses, self.dtypes, like, strict=True)
            return [_view(*row) for row in rows]


def _view(storage: torch.UntypedStorage, begin: int, address: int, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    first = (address - begin) // dtype.itemsize
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, first, like.shape, like.stride())
