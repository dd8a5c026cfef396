"""Batch: plain tensors of the host, looked at together; each one's view is made when somebody asks for it. An update
needs none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.utils._python_dispatch import _disable_current_modes

from shardow import _core


@dataclass(frozen=True)
class Columns:
    """What tensors of a batch are, in parallel lists."""

    names: list[str]
    regions: list[_core.Region]
    dtypes: list[torch.dtype]
    addresses: list[int]
    places: list[int]  # in the batch


class Batch:
    """``recorded``: whole parameters, dense and in order, on the CPU; ``looked``: them. What they were then counts, and
    their storages are kept, whatever they show by the time when a view is made (``p.data = other``). Where a storage
    has moved by then (``share_memory_()``), views are there too."""

    def __init__(self, names: list[str], recorded: list[torch.Tensor], looked: _core.Looked) -> None:
        self._recorded, self._looked = recorded, looked
        self.all = Columns(names, looked.regions(), looked.dtypes(), looked.addresses(), list(range(len(names))))
        self._storages: list[torch.UntypedStorage] = [*map(torch.Tensor.untyped_storage, recorded)]
        begins = [*map(torch.UntypedStorage.data_ptr, self._storages)]
        self._begins = self.all.addresses if begins == self.all.addresses else begins

    def some(self, places: list[int]) -> Columns:
        if places == self.all.places:
            return self.all
        names, regions, dtypes, addresses = self.all.names, self.all.regions, self.all.dtypes, self.all.addresses
        return Columns(
            [names[i] for i in places],
            [regions[i] for i in places],
            [dtypes[i] for i in places],
            [addresses[i] for i in places],
            places,
        )

    @cached_property
    @torch.inference_mode(False)  # where they would become tensors that nobody may write
    def tensors(self) -> list[torch.Tensor]:
        """Without grad, on the parameters' memory."""
        with (
            _disable_current_modes()
        ):  # whatever somebody does with operations of his own when the first one is asked for
            if self._looked.still(self._recorded):
                return [one.detach() for one in self._recorded]
            shapes = {id(region): torch.empty(region.shape, device="meta") for region in self.all.regions}
            like = (shapes[id(region)] for region in self.all.regions)
            rows = zip(self._storages, self._begins, self.all.addresses, self.all.dtypes, like, strict=True)
            return [_view(*row) for row in rows]


def _view(
    storage: torch.UntypedStorage, begin: int, address: int, dtype: torch.dtype, like: torch.Tensor
) -> torch.Tensor:
    first = (address - begin) // dtype.itemsize
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, first, like.shape, like.stride())
