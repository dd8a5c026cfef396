"""Stretch: what is averaged in a parameter's place where other ranks have the rest of it, such as masters that an
optimizer divides.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from shardow import _core
from shardow.base.checks import invalid
from shardow.model.local import LocalTensor


class Stretch(NamedTuple):
    """``tensor``'s elements stand for those of a parameter from ``first`` on, in row-major order of the whole
    parameter; ``of="local"``: of what this rank holds of it."""

    tensor: torch.Tensor
    first: int
    of: str = "global"

    def placed(self, local: LocalTensor) -> tuple[_core.Region, int]:
        """(region, begin): the elements, and where they begin in the local memory. Raises ValueError where this rank
        does not hold them.
        """
        size, first = self.tensor.numel(), self.first
        if size == 0:
            return local.region.window(0, 0), 0
        if self.of not in ("global", "local") or first < 0:
            raise invalid(
                f"source= of '{local.name}': ({size} elements, {first}, {self.of!r}); the first is counted 'global' "
                "or 'local'"
            )
        begin, end = (
            (first, first + size)
            if self.of == "local"
            else (local.region.position(first), local.region.position(first + size))
        )
        if end - begin != size or end > local.region.size:
            asked = f"elements [{first}, {first + size}), counted {self.of}"
            raise invalid(f"source= of '{local.name}': {asked}, are not all on this rank, which holds {local.region}")
        return local.region.window(begin, end), begin
