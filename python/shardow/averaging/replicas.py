"""Exchanges the parts of the weights that replicas own, in bounded buckets of torch collectives.

An optimizer divides its master weights as it likes: a rank may have a tensor whole, its end, or nothing. At
construction ranks tell each other once who averages which stretch of what; together they must have every element on one
rank. A swap then exchanges by that table rather than by equal parts."""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from shardow import _core
from shardow.averaging.tracked import Tracked
from shardow.base.checks import invalid, unsupported
from shardow.base.signals import DeferredSignals, impatient
from shardow.distributed.rank_group import RankGroup
from shardow.distributed.transfers import begun, finish, until
from shardow.sharding.local import LocalTensor

Owners = Mapping[int, tuple[int, int]]  # by member of a replica group: elements [begin, end) of the local memory
Piece = tuple[int, int, int]  # elements [begin, end) of the local memory of tensor number i: (i, begin, end)

EXCHANGED = 32 << 20  # bytes that all members of a group send in one round


@dataclass
class _Step:
    """One collective of ``group``: ``pieces[member]`` are views of the local memory that ``member`` owns; ``buffers``
    has a row for each member, and a last one, which is sent."""

    group: dist.ProcessGroup
    index: int
    pieces: list[list[torch.Tensor]]
    strided: list[tuple[LocalTensor, torch.Tensor]]  # each with its copy in order, which pieces are views of
    buffers: torch.Tensor


class ReplicaExchange:
    """Brings every owner's part into every replica's memory. It is made before ranks agree to begin, and takes all the
    memory that run() needs. Nested replica groups are undone from the innermost: each level's whole is the next level's
    part. Received parts pass through buffers, so that what arrives too late is written nowhere."""

    def __init__(self, tracked: Sequence[Tracked]) -> None:
        self._steps = list(_steps(tracked))

    def run(self, seconds: float, writes: Callable[[], None] = lambda: None) -> None:
        """Exchanges; collective among replicas. ``writes()`` is called before memory that others own is first written.
        Raises ConnectionError or TimeoutError where a replica is gone. Signals are deferred until the end, or for a
        second, since others wait for what this rank sends."""
        deadline = time.monotonic() + seconds
        with DeferredSignals():
            for step in self._steps:
                self._gather(step, deadline, seconds)
                writes()
                self._put(step)

    def _gather(self, step: _Step, deadline: float, seconds: float) -> None:
        others = [rank for rank in dist.get_process_group_ranks(step.group) if rank != dist.get_rank()]
        failure = f"parts of the weights that rank(s) {others} own did not all arrive"
        *received, sent = step.buffers
        for local, flat in step.strided:
            flat.copy_(local.tensor.reshape(-1))
        offset = 0
        for piece in step.pieces[step.index]:
            sent[offset : offset + piece.numel()].copy_(piece)
            offset += piece.numel()
        options = until(AllgatherOptions(), sent, deadline - time.monotonic())
        work = begun(lambda: step.group.allgather([[*map(_bytes, received)]], [_bytes(sent)], options), failure)
        pause = 2e-5
        while work is not None and not work.is_completed() and time.monotonic() < deadline and not impatient():
            time.sleep(pause)
            pause = min(pause * 1.5, 2e-3)
        finish(work, 0.001 if impatient() else deadline - time.monotonic(), failure, seconds)

    def _put(self, step: _Step) -> None:
        for member, pieces in enumerate(step.pieces):
            offset = 0
            for piece in pieces if member != step.index else ():
                piece.copy_(step.buffers[member][offset : offset + piece.numel()])
                offset += piece.numel()
        for local, flat in step.strided:
            local.put(flat)


def _steps(tracked: Sequence[Tracked]) -> Iterator[_Step]:
    """Yields the collectives of an exchange, equal on every replica, since replicas hold the same tensors."""
    kinds: dict[Any, list[Tracked]] = {}
    for row in tracked:
        if row.local.replicas:
            replicas = tuple(tuple(dist.get_process_group_ranks(group)) for group, _, _ in row.local.replicas)
            kinds.setdefault((replicas, row.local.tensor.dtype, row.local.tensor.device), []).append(row)
    for rows in kinds.values():
        flats = [row.local.flat() for row in rows]
        levels = rows[0].local.replicas
        for level in reversed(range(len(levels))):
            group, index, size = levels[level]
            turns = list(rounds([_owners(row, level) for row in rows], size, flats[0].itemsize))
            lengths = [max(sum(end - begin for _, begin, end in pieces) for pieces in members) for members in turns]
            memory = flats[0].new_empty((size + 1) * max(lengths, default=0))
            for members, length in zip(turns, lengths, strict=True):
                strided = {i for pieces in members for i, _, _ in pieces if not rows[i].local.is_in_order()}
                views = [[flats[i][begin:end] for i, begin, end in pieces] for pieces in members]
                buffers = memory[: (size + 1) * length].view(size + 1, length)
                yield _Step(group, index, views, [(rows[i].local, flats[i]) for i in sorted(strided)], buffers)


def _owners(row: Tracked, level: int) -> Owners:
    """Returns which replica of a level owns which elements of a tensor. A level divides what the levels before left to
    it."""
    if row.stretched:
        return row.owners
    *outer, (_, _, size) = row.local.replicas[: level + 1]
    region, begin = _core.owned(row.local.region, [(index, count) for _, index, count in outer])
    owners = {}
    for member in range(size):
        end = begin + region.part(member, size).size
        owners[member], begin = (begin, end), end
    return owners


def rounds(tensors: Sequence[Owners], members: int, itemsize: int) -> Iterator[list[list[Piece]]]:
    """Yields the pieces that each member of a replica group sends in each round, so that all have all of ``tensors``,
    of one dtype; no list is empty. Small pieces share a round, since its latency is that of a hundred of them."""
    queues: list[deque[Piece]] = [deque() for _ in range(members)]
    for i, owners in enumerate(tensors):
        for member, (begin, end) in owners.items():
            if begin < end:
                queues[member].append((i, begin, end))
    most = max(EXCHANGED // itemsize // members, 1)
    while any(queues):
        yield [_next_pieces(queue, most) for queue in queues]


def _next_pieces(queue: deque[Piece], room: int) -> list[Piece]:
    pieces: list[Piece] = []
    while queue and room:
        i, begin, end = queue.popleft()
        stop = min(end, begin + room)
        pieces.append((i, begin, stop))
        room -= stop - begin
        if stop < end:
            queue.appendleft((i, stop, end))
    return pieces or [(0, 0, 0)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


# ---- stretches of masters


def share_out(what: str, tracked: Sequence[Tracked], ranks: RankGroup) -> None:
    """Records in each stretched tensor which rank has which stretch of it. Collective. Raises ValueError on every rank
    where together they don't have every element once."""
    own = [
        (i, row.begin, row.begin + row.region.size)
        for i, row in enumerate(tracked)
        if row.stretched and row.region.size
    ]
    job_ranks = [0] if ranks.process_group is None else dist.get_process_group_ranks(ranks.process_group)
    stretches = defaultdict[int, dict[int, tuple[int, int]]](dict)  # of each tensor, by rank of the job
    for rank, text in zip(job_ranks, ranks.gather(what, json.dumps(own).encode()), strict=True):
        for i, begin, end in json.loads(text):
            stretches[i][rank] = begin, end
    ranks.agree(what, lambda: _assign_owners(tracked, stretches, job_ranks[ranks.rank]))


def _assign_owners(
    tracked: Sequence[Tracked], stretches: defaultdict[int, dict[int, tuple[int, int]]], own_rank: int
) -> None:
    for i, row in enumerate(tracked):
        if not row.stretched:
            continue
        if len(row.local.replicas) > 1:
            remedy = "give whole masters, or one group of replicas"
            raise unsupported(f"source= of '{row.name}' is a stretch, and replicas of it nest; {remedy}")
        members = [own_rank] if not row.local.replicas else dist.get_process_group_ranks(row.local.replicas[0][0])
        row.owners = {members.index(rank): ends for rank, ends in stretches[i].items() if rank in members}
        _check_whole(row)


def _check_whole(row: Tracked) -> None:
    covered = 0
    for begin, end in sorted(row.owners.values()):
        if begin != covered:
            break
        covered = end
    else:
        if covered == row.local.region.size:
            return
    had = ", ".join(f"[{begin}, {end})" for begin, end in sorted(row.owners.values())[:8]) or "none"
    size = row.local.region.size
    raise invalid(f"source= of '{row.name}': ranks have {had} of its {size} elements; each is in one stretch")
