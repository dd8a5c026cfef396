"""Weights that several ranks hold under one name: found out by checksum where they differ, before one rank's would
stand for all. Each rank joins the checksums of what it shares with the same ranks to one number, under a key of names
and regions: equal keys ask for equal numbers. Tensor by tensor they are compared only to name the first that
differs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardow import _core
from shardow.base.checks import invalid
from shardow.distributed.rank_group import DIFFERENT, Comparison, RankGroup
from shardow.model.local import LocalTensor, oddity

#: The way out.
DIFFERENT_WEIGHTS = (
    "files, exports and swaps take one rank's values for all. Begin with the same weights on all ranks; of ranks that "
    "train apart for a while (LocalSGD), call this when their weights have been averaged; leave a rank's own weights "
    "(local experts) out with params=, and save them under names of their own"
)

_WORDS = 1 << 20  # elements of a temporary on a device
_PRIME = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Common:
    """``tensor``: what this rank holds of ``name`` there; ``holders``: who else should have the same, in words that are
    equal for them.
    """

    name: str
    tensor: torch.Tensor
    region: _core.Region
    holders: str


def common_of(local: LocalTensor, tensor: torch.Tensor | None = None) -> Common | None:
    """None where no other rank holds the same, or where its elements can't be read. ``tensor``: in place of the
    weights.
    """
    if (local.sharded and not local.replicas) or oddity(local.tensor):
        return None
    ranks = ";".join(str(dist.get_process_group_ranks(group)) for group, _, _ in local.replicas)
    return Common(local.name, local.tensor if tensor is None else tensor, local.region, ranks)


class EqualCopies(Comparison):
    """Raises ValueError on every rank where ranks hold other values under one name. Reads ``common`` once, sends a
    number for each set of ranks."""

    def __init__(
        self, what: str, common: Iterable[Common | None], ranks: RankGroup, way_out: str = DIFFERENT_WEIGHTS
    ) -> None:
        self._what, self._ranks, self._way_out = what, ranks, way_out
        self._common = [copy for copy in common if copy is not None] if ranks.size > 1 else []

    def words(self) -> bytes:
        self._sums = checksums([copy.tensor for copy in self._common])
        return json.dumps(_joined(self._common, self._sums)).encode() if self._common else b""

    def sum_up(self, by_rank: list[bytes]) -> bytes:
        return DIFFERENT if _differing([json.loads(text or b"{}") for text in by_rank]) else b""

    def take(self, total: bytes) -> None:
        """Names the first tensor that differs, in another round."""
        if total:
            each = zip(self._common, self._sums, strict=True)
            own_sums = {f"{copy.name}\0{_key([copy])}": sum_ for copy, sum_ in each}
            self._ranks.decide(self._what, json.dumps(own_sums).encode(), self._refuse)

    def _refuse(self, texts: list[bytes]) -> bytes:
        names = _differing([json.loads(text) for text in texts])
        first, (rank, other) = next(iter(names.items()))
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        values = f"'{first.partition(chr(0))[0]}'{more} has other values on rank {rank} than on rank {other}"
        raise invalid(f"{self._what}: {values}; {self._way_out}")


def _joined(common: Sequence[Common], sums: Sequence[int]) -> dict[str, int]:
    """One number for each set of ranks: {key: number}."""
    sets: dict[str, list[int]] = {}
    for at, one in enumerate(common):
        sets.setdefault(one.holders, []).append(at)
    return {
        _key([common[at] for at in held]): int.from_bytes(_digest(json.dumps([sums[at] for at in held])), "little")
        for held in sets.values()
    }


def _key(common: Sequence[Common]) -> str:
    return _digest(
        "\0".join(f"{one.holders} {one.name} {one.tensor.dtype} {one.region.encode().hex()}" for one in common)
    ).hex()


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8]


def _differing(by_rank: Sequence[dict[str, int]]) -> dict[str, tuple[int, int]]:
    """Keys under which two ranks have other numbers, and the first two such ranks."""
    first: dict[str, tuple[int, int]] = {}
    wrong: dict[str, tuple[int, int]] = {}
    for rank, numbers in enumerate(by_rank):
        for key, number in numbers.items():
            known = first.setdefault(key, (rank, number))
            if known[1] != number:
                wrong.setdefault(key, (known[0], rank))
    return wrong


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Of each tensor's bytes, in the order of its elements; equal on ranks with the same kind of device."""
    sums = [_checksum(tensor.detach()) for tensor in tensors]
    return [int(one) & (2**64 - 1) for one in sums]  # waits for devices once all are under way


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
