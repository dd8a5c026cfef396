"""Compares weights that several ranks hold under one name, by their checksums, before one rank's are taken for all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardow import _core
from shardow.distributed.rank_group import Comparison, RankGroup
from shardow.sharding.local import LocalTensor, oddity

#: Advice where ranks hold different weights.
DIFFERENT_WEIGHTS = (
    "files, exports and swaps take one rank's values for all. Begin with the same weights on all ranks; of ranks that "
    "train apart for a while (LocalSGD), call this when their weights have been averaged; leave a rank's own weights "
    "(local experts) out with params=, and save them under names of their own"
)

_WORDS = 1 << 20  # elements of a temporary on a device
_PRIME = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Common:
    """A tensor that several ranks should hold alike. ``tensor``: this rank's elements of ``name`` in ``region``;
    ``holders``: a text of the ranks that should have the same, which is equal on all of them.
    """

    name: str
    tensor: torch.Tensor
    region: _core.Region
    holders: str


def common_of(local: LocalTensor, tensor: torch.Tensor | None = None) -> Common | None:
    """Returns what to compare of ``local``; None where no other rank holds the same, or where its elements can't be
    read. ``tensor`` is compared in place of the weights.
    """
    if (local.sharded and not local.replicas) or oddity(local.tensor):
        return None
    ranks = ";".join(str(dist.get_process_group_ranks(group)) for group, _, _ in local.replicas)
    return Common(local.name, local.tensor if tensor is None else tensor, local.region, ranks)


def equal_copies(
    what: str, common: Iterable[Common | None], ranks: RankGroup, hint: str = DIFFERENT_WEIGHTS
) -> Comparison:
    """Compares what ranks hold under one name; where it differs every rank raises ValueError. Reads ``common`` once."""
    copies = [copy for copy in common if copy is not None] if ranks.size > 1 else []
    sums = zip(copies, checksums([copy.tensor for copy in copies]), strict=True)
    facts = [
        (f"'{copy.name}'\0{copy.tensor.dtype} {copy.region.encode().hex()}", str(sum_), hint, f"on {copy.holders}")
        for copy, sum_ in sums
    ]
    return _core.EqualFacts(what, facts)


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns a checksum of each tensor's bytes in element order, equal on ranks with the same kind of device."""
    sums = [_checksum(tensor.detach()) for tensor in tensors]
    return [int(value) & (2**64 - 1) for value in sums]  # waits for devices, after all have begun


def _checksum(tensor: torch.Tensor) -> int | torch.Tensor:
    flat = tensor.contiguous().view(-1)
    if flat.is_cpu:
        return _core.crc32(flat.data_ptr(), flat.nbytes)
    data = flat.clone().view(torch.uint8) if flat.storage_offset() * flat.itemsize % 4 else flat.view(torch.uint8)
    words = data.view(torch.int32) if data.numel() % 4 == 0 else data
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for part in words.split(_WORDS):
        places = (2 * torch.arange(part.numel(), device=flat.device) + 1) * (_PRIME - 2**64)
        total = total * 0x100000001B3 + (part.to(torch.int64) * places).sum()
    return total
