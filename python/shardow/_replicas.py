"""Replicas send each other the parts of the weights that each of them owns, in bounded buckets of torch collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from shardow._tracked import Tracked

_BUCKET = 32 << 20  # bytes a rank sends in one collective


def exchange(tracked: Sequence[Tracked]) -> None:
    """Collective among replicas: afterwards every replica's weights hold every owner's part.

    Nested replica groups are undone from the innermost: each level's whole is the next level's part.
    """
    by_groups: dict[tuple[tuple[int, ...], ...], list[Tracked]] = {}
    for one in tracked:
        if one.local.replicas:
            key = tuple(tuple(dist.get_process_group_ranks(group)) for group, _, _ in one.local.replicas)
            by_groups.setdefault(key, []).append(one)
    for alike in by_groups.values():
        levels = len(alike[0].local.replicas)
        for level in reversed(range(levels)):
            for bucket in _buckets(alike):
                _exchange_level(bucket, level)


def _buckets(tracked: Sequence[Tracked]) -> Iterator[list[Tracked]]:
    """Stretches whose whole local tensors fit the bucket; the same on every replica, since replicas hold the same tensors. One dtype each."""
    bucket: list[Tracked] = []
    size = 0
    for one in tracked:
        bytes_ = one.local.tensor.nbytes
        if bucket and (size + bytes_ > _BUCKET or one.local.tensor.dtype != bucket[0].local.tensor.dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(one)
        size += bytes_
    if bucket:
        yield bucket


def _exchange_level(bucket: Sequence[Tracked], level: int) -> None:
    flats = [one.local.flat() for one in bucket]
    _exchange_flat(bucket, flats, level)
    for one, flat in zip(bucket, flats, strict=True):
        one.local.put(flat)


def _exchange_flat(bucket: Sequence[Tracked], flats: Sequence[torch.Tensor], level: int) -> None:
    group, index, count = bucket[0].local.replicas[level]
    pieces = [_pieces(one, flat, level) for one, flat in zip(bucket, flats, strict=True)]  # [tensor][member]
    if len(bucket) == 1 and bucket[0].local.tensor.nbytes > _BUCKET:
        for member in range(count):  # in place: a bucket would double a large tensor
            dist.broadcast(_bytes(pieces[0][member]), group_src=member, group=group)
        return
    lengths = [sum(piece[member].numel() for piece in pieces) for member in range(count)]
    first = bucket[0].local.tensor
    buffers = [torch.empty(max(lengths), dtype=first.dtype, device=first.device) for _ in range(count)]
    mine = torch.cat([piece[index] for piece in pieces])
    buffers[index][: mine.numel()] = mine
    dist.all_gather([_bytes(buffer) for buffer in buffers], _bytes(buffers[index]).clone(), group=group)
    for member in range(count):
        if member != index:
            at = 0
            for piece in pieces:
                length = piece[member].numel()
                piece[member].copy_(buffers[member][at : at + length])
                at += length


def _pieces(one: Tracked, flat: torch.Tensor, level: int) -> list[torch.Tensor]:
    """What each member of the level's group owns of the local elements, views."""
    region, begin = one.local.region, 0
    for _, index, count in one.local.replicas[:level]:
        begin += sum(region.part(i, count).size for i in range(index))
        region = region.part(index, count)
    views = []
    count = one.local.replicas[level][2]
    for member in range(count):
        size = region.part(member, count).size
        views.append(flat[begin : begin + size])
        begin += size
    return views


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
