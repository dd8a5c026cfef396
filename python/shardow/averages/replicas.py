"""Replicas send each other the parts of the weights that each of them owns, in bounded buckets of torch collectives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from shardow.averages.tracked import Tracked
from shardow.base.signals import Held, impatient
from shardow.model.local import LocalTensor
from shardow.ranks.transfers import begun, finish

_BUCKET = 32 << 20  # bytes of what all members send in one collective
_OTHERWISE = "replicas' parts of the weights did not arrive"


@dataclass
class _Step:
    """One collective of ``group``: ``pieces[member]`` are views of the local memory that ``member`` owns."""

    group: dist.ProcessGroup
    index: int
    pieces: list[list[torch.Tensor]]
    strided: list[tuple[LocalTensor, torch.Tensor]]  # with the copy in order that pieces are views of
    buffers: list[torch.Tensor] = field(default_factory=list)

    def lengths(self) -> list[int]:
        return [sum(one.numel() for one in pieces) for pieces in self.pieces]


class Exchange:
    """Afterwards every replica's memory holds every owner's part. Made before ranks agree to begin: takes all the memory that run() needs.

    Nested replica groups are undone from the innermost: each level's whole is the next level's part. What arrives passes through buffers,
    so that what arrives too late is written nowhere.
    """

    def __init__(self, tracked: Sequence[Tracked]) -> None:
        self._steps = list(_steps(tracked))
        memory: dict[tuple[torch.dtype, torch.device, int], torch.Tensor] = {}
        for step in self._steps:
            first, count = step.pieces[0][0], len(step.pieces)
            size = max(step.lengths())
            for at in range(count + 1):  # the last one is sent
                key = (first.dtype, first.device, at)
                if key not in memory or memory[key].numel() < size:
                    memory[key] = torch.empty(size, dtype=first.dtype, device=first.device)
        for step in self._steps:
            first, size = step.pieces[0][0], max(step.lengths())
            step.buffers = [memory[first.dtype, first.device, at][:size] for at in range(len(step.pieces) + 1)]

    def run(self, seconds: float, writes: Callable[[], None] = lambda: None) -> None:
        """Collective among replicas. ``writes()`` is called before memory that others own is first written. Raises ConnectionError and
        TimeoutError where a replica is gone.

        Signals wait for the end, or for a second, since others wait for what this rank sends.
        """
        deadline = time.monotonic() + seconds
        with Held():
            for step in self._steps:
                self._gather(step, deadline)
                writes()
                self._take(step)

    def _gather(self, step: _Step, deadline: float) -> None:
        *received, sent = step.buffers
        for local, flat in step.strided:
            flat.copy_(local.tensor.reshape(-1))
        at = 0
        for piece in step.pieces[step.index]:
            sent[at : at + piece.numel()].copy_(piece)
            at += piece.numel()
        work = begun(lambda: dist.all_gather([_bytes(one) for one in received], _bytes(sent), group=step.group, async_op=True), _OTHERWISE)
        pause = 2e-5
        while work is not None and not work.is_completed() and time.monotonic() < deadline and not impatient():
            time.sleep(pause)
            pause = min(pause * 1.5, 2e-3)
        finish(work, 0.001 if impatient() else deadline - time.monotonic(), _OTHERWISE)

    def _take(self, step: _Step) -> None:
        for member, pieces in enumerate(step.pieces):
            at = 0
            for piece in pieces if member != step.index else ():
                piece.copy_(step.buffers[member][at : at + piece.numel()])
                at += piece.numel()
        for local, flat in step.strided:
            local.put(flat)


def _steps(tracked: Sequence[Tracked]) -> Iterator[_Step]:
    """The same on every replica, since replicas hold the same tensors."""
    by_groups: dict[tuple[tuple[int, ...], ...], list[Tracked]] = {}
    for one in tracked:
        if one.local.replicas:
            key = tuple(tuple(dist.get_process_group_ranks(group)) for group, _, _ in one.local.replicas)
            by_groups.setdefault(key, []).append(one)
    for alike in by_groups.values():
        for level in reversed(range(len(alike[0].local.replicas))):
            for bucket in _buckets(alike):
                yield from _cut(bucket, level)


def _buckets(tracked: Sequence[Tracked]) -> Iterator[list[Tracked]]:
    """Stretches whose whole local tensors fit the bucket, of one dtype and device; a larger tensor is one alone."""
    bucket: list[Tracked] = []
    size = 0
    for one in tracked:
        tensor = one.local.tensor
        if bucket and (size + tensor.nbytes > _BUCKET or (tensor.dtype, tensor.device) != _kind(bucket[0])):
            yield bucket
            bucket, size = [], 0
        bucket.append(one)
        size += tensor.nbytes
    if bucket:
        yield bucket


def _kind(one: Tracked) -> tuple[torch.dtype, torch.device]:
    return one.local.tensor.dtype, one.local.tensor.device


def _cut(bucket: Sequence[Tracked], level: int) -> Iterator[_Step]:
    """One step, or several where the tensor is large."""
    group, index, count = bucket[0].local.replicas[level]
    flats = [one.local.flat() for one in bucket]
    strided = [(one.local, flat) for one, flat in zip(bucket, flats, strict=True) if not one.local.tensor.is_contiguous()]
    pieces = [_pieces(one, flat, level) for one, flat in zip(bucket, flats, strict=True)]  # [tensor][member]
    whole = _Step(group, index, [[piece[member] for piece in pieces] for member in range(count)], strided)
    most = max(_BUCKET // bucket[0].local.tensor.itemsize // count, 1)
    if len(bucket) > 1 or max(whole.lengths()) <= most:
        if max(whole.lengths()):
            yield whole
        return
    for at in range(0, max(whole.lengths()), most):
        yield _Step(group, index, [[piece[at : at + most]] for piece in pieces[0]], strided)


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
