"""Full tensors from everybody's pieces, one at a time, on rank 0 alone.

Numbered, as the code below:

1. one rank learns every rank's regions, once; it picks for each tensor the ranks whose regions cover it exactly once,
   and tells them, and rank 0
2. tensor by tensor, the picked ranks send, in blocks of at most 16 MiB; rank 0 places each block
3. rank 0 hands out the whole tensor before it makes the next: no rank ever holds two

Facts (1) travel through the process group's store, data (2) as torch tensors, point to point.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardow import _core
from shardow.base.checks import invalid
from shardow.distributed.rank_group import RankGroup
from shardow.distributed.transfers import begun, carrier, empty, finish

_BLOCK = 16 << 20  # bytes of one message
_Sender = tuple[int, bytes]  # rank, its region


class LocalShard(NamedTuple):
    """What this rank holds of one global tensor: ``flat`` are region.size elements, 1-D."""

    name: str
    flat: torch.Tensor
    region: _core.Region


class Gatherer:
    """Streams full tensors of ``parts`` to rank 0 of ``ranks``. ``parts`` are the same names in the same order on every
    rank. ``what``: the call, for messages. Collective."""

    def __init__(self, what: str, parts: Sequence[LocalShard], ranks: RankGroup) -> None:
        self._what, self._ranks = what, ranks
        self._parts = list(parts)
        self._sends, self._senders = self._plan()

    def stream(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """(name, full CPU tensor) on rank 0, (name, None) elsewhere. Collective: every rank must exhaust it."""
        for i, part in enumerate(self._parts):
            if self._ranks.rank == 0:
                yield part.name, self._receive(i)
            else:
                if self._sends[i]:
                    device = carrier(self._ranks.process_group, part.flat.device)
                    for block in part.flat.split(_BLOCK // part.flat.itemsize):
                        self._move(dist.isend, block.contiguous().to(device), 0, group_dst=0)
                yield part.name, None

    def everywhere(self, device_of: Callable[[str], torch.device]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full tensor) on every rank, on its ``device_of(name)``. Collective as stream()."""
        for part, (name, full) in zip(self._parts, self.stream(), strict=True):
            yield name, self._ranks.broadcast(full, part.region.shape, part.flat.dtype, device_of(name))

    def whole(self, aliases: Mapping[str, Sequence[str]]) -> dict[str, torch.Tensor]:
        """All of stream() on rank 0, each tensor under its name and its ``aliases``; {} elsewhere. Collective."""
        return {key: full for name, full in self.stream() if full is not None for key in (name, *aliases.get(name, ()))}

    def _plan(self) -> tuple[list[bool], list[list[_Sender]]]:
        """(whether this rank sends each tensor; who sends each: rank 0 only)."""

        def orders(by_rank: list[bytes]) -> list[bytes]:
            gathered = [pickle.loads(text) for text in by_rank]
            senders = [_pick(i, part.name, gathered) for i, part in enumerate(self._parts)]
            sends = [[False] * len(senders) for _ in by_rank]
            for i, who in enumerate(senders):
                for rank, _ in who:
                    sends[rank][i] = True
            return [pickle.dumps((own, [] if r else senders)) for r, own in enumerate(sends)]

        own = pickle.dumps([(part.name, part.region.encode()) for part in self._parts])
        sends, senders = pickle.loads(self._ranks.decide_each(self._what, own, orders))
        return sends, senders

    def _move(self, how: Callable[..., dist.Work | None], block: torch.Tensor, peer: int, **options: int) -> None:
        group, timeout = self._ranks.process_group, self._ranks.timeout
        otherwise = f"a block between rank {self._ranks.rank} and rank {peer} did not arrive"
        finish(begun(lambda: how(block, group=group, **options), otherwise), timeout, otherwise)

    def _receive(self, i: int) -> torch.Tensor:
        part = self._parts[i]
        full = empty(part.region.shape, part.flat.dtype)
        device = carrier(self._ranks.process_group, part.flat.device)
        for rank, encoded in self._senders[i]:
            region = _core.Region.decode(encoded)
            if rank == 0:
                place(part.flat.cpu(), region, full)
                continue
            each = _BLOCK // full.itemsize
            for begin in range(0, region.size, each):
                window = region.window(begin, min(begin + each, region.size))
                block = empty([window.size], part.flat.dtype, device)
                self._move(dist.irecv, block, rank, group_src=rank)
                place(block.cpu(), window, full)
        return full


def _pick(i: int, name: str, gathered: Sequence[Sequence[tuple[str, bytes]]]) -> list[_Sender]:
    """Ranks that together hold tensor i exactly once; ranks that hold the same as an earlier one are passed over."""
    picked: dict[bytes, int] = {}
    for rank, parts in enumerate(gathered):
        if i >= len(parts) or parts[i][0] != name:
            there = parts[i][0] if i < len(parts) else "nothing"
            raise invalid(f"rank {rank} has {there!r} where rank 0 has {name!r}; all ranks must hold the same tensors")
        if _core.Region.decode(parts[i][1]).size > 0:
            picked.setdefault(parts[i][1], rank)
    regions = [*map(_core.Region.decode, picked or [gathered[0][i][1]])]
    if not _core.covers_once(regions):
        held = sum(region.size for region in regions)
        raise invalid(f"'{name}' of shape {regions[0].shape}: ranks' regions overlap or leave holes ({held} elements)")
    return [(rank, region) for region, rank in picked.items()]


def place(flat: torch.Tensor, region: _core.Region, full: torch.Tensor) -> None:
    """full[region] = flat."""
    for there, here in _boxes(full, region, flat):
        there.copy_(here)


def extract_region(full: Any, region: _core.Region, flat: torch.Tensor) -> None:
    """flat = full[region], cast to flat's dtype. ``full`` may be anything that slices like a tensor."""
    for there, here in _boxes(full, region, flat):
        here.copy_(there)


def _boxes(full: Any, region: _core.Region, flat: torch.Tensor) -> Iterator[tuple[Any, torch.Tensor]]:
    """The same elements on both sides, for torch to copy: on any device, between dtypes, and moving version counters.
    Without torch, in host memory, ``take()`` and ``place()`` of ``include/shardow/copy.h`` do it."""
    for offsets, sizes, begin in region.boxes():
        window = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        yield full[window], flat[begin : begin + math.prod(sizes)].view(sizes)


def stretch(full: torch.Tensor, region: _core.Region) -> torch.Tensor | None:
    """full[region] as a view, 1-D, where its elements lie one after another."""
    if not region.size or not region.contiguous or not full.is_contiguous():
        return None
    begin, _, length = region.runs()[0]
    return full.view(-1)[begin : begin + length]
