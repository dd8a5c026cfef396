"""Who averages which stretch of what: an optimizer cuts its masters as it likes, and a rank may have a tensor whole,
its end, or nothing. So ranks tell each other once, at construction; together they must have every element on one rank.
A swap then exchanges by that table rather than by equal parts."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from shardow.averages.tracked import Tracked
from shardow.base.checks import invalid, unsupported
from shardow.ranks.team import Team

Piece = tuple[int, int, int]  # elements [begin, end) of the local memory of tensor number i: (i, begin, end)
EXCHANGED = 32 << 20  # bytes that all members of a group send in one round, as the engine's plan has it


def share_out(what: str, tracked: Sequence[Tracked], team: Team) -> None:
    """Each stretched tensor learns which rank has which stretch of it. Collective. Raises ValueError on every rank
    where together they don't have every element once."""
    mine = {
        i: (one.begin, one.begin + one.region.size)
        for i, one in enumerate(tracked)
        if one.stretched and one.region.size
    }
    told = [
        {int(i): ends for i, ends in json.loads(text).items()} for text in team.gather(what, json.dumps(mine).encode())
    ]
    team.agree(what, lambda: _take_in(tracked, told, team))


def _take_in(tracked: Sequence[Tracked], told: Sequence[dict[int, tuple[int, int]]], team: Team) -> None:
    everybody = [0] if team.process_group is None else dist.get_process_group_ranks(team.process_group)
    places: dict[int, dict[int, int]] = {}  # of each replica group, by its id: {rank in the team: index in the group}
    for one in tracked:
        if one.stretched:
            if len(one.local.replicas) > 1:
                way_out = "give whole masters, or one group of replicas"
                raise unsupported(f"source= of '{one.name}' is a stretch, and replicas of it nest; {way_out}")
            one.owners = {}
            for group, _, _ in one.local.replicas:
                ranks = {rank: index for index, rank in enumerate(dist.get_process_group_ranks(group))}
                places.setdefault(id(group), {at: ranks[rank] for at, rank in enumerate(everybody) if rank in ranks})
    for at, parts in enumerate(told):
        for i, (begin, end) in parts.items():
            one = tracked[i]
            index = (
                places[id(one.local.replicas[0][0])].get(at) if one.local.replicas else 0 if at == team.rank else None
            )
            if index is not None:
                one.owners[index] = (begin, end)
    for one in tracked:
        if one.stretched:
            _check_whole(one)


def _check_whole(one: Tracked) -> None:
    at = 0
    for begin, end in sorted(one.owners.values()):
        if begin != at:
            break
        at = end
    else:
        if at == one.local.region.size:
            return
    had = ", ".join(f"[{begin}, {end})" for begin, end in sorted(one.owners.values())[:8]) or "none"
    size = one.local.region.size
    raise invalid(
        f"source= of '{one.name}': of its {size} elements the ranks that hold them have {had}; each must be in one "
        "stretch"
    )


def rounds(tracked: Sequence[Tracked], members: int) -> Iterator[list[list[Piece]]]:
    """What each member of a replica group sends in each round, so that all have all of ``tracked``, of one dtype; no
    list is empty.
    """
    queues: list[deque[Piece]] = [deque() for _ in range(members)]
    for i, one in enumerate(tracked):
        for member, (begin, end) in one.owners.items():
            queues[member].append((i, begin, end))
    each = max(EXCHANGED // tracked[0].local.tensor.itemsize // members, 1)
    while any(queues):
        yield [_taken(queue, each) for queue in queues]


def _taken(queue: deque[Piece], room: int) -> list[Piece]:
    taken: list[Piece] = []
    while queue and room:
        i, begin, end = queue.popleft()
        stop = min(end, begin + room)
        taken.append((i, begin, stop))
        room -= stop - begin
        if stop < end:
            queue.appendleft((i, stop, end))
    return taken or [(0, 0, 0)]
