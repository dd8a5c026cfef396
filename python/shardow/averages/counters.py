"""The state of an average as all its ranks have it: what must be equal is compared, what each rank counts for itself is summed."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping
from typing import Any

from shardow.ranks.team import Team

_OWN = re.compile(r'("held_non_finite":)(\d+)')  # the elements of a rank's own part


def agreed(what: str, state: str, team: Team, facts: Mapping[str, Any]) -> str:
    """``state``, a rank's own, with what each rank counts for itself summed over the ranks. Raises ValueError on every rank where ranks
    have made other updates, or differ in options or ``facts``. Collective."""
    if team.size == 1:
        return state
    numbers: dict[str, Any] = {**facts, **json.loads(_OWN.sub(r"\g<1>0", state))}
    digest = hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).digest()[:16]
    everybody = [_unpacked(one) for one in team.gather(what, struct.pack("<qq", numbers["updates"], _held(state)) + digest)]
    team.check_updates(what, [updates for updates, _, _ in everybody])
    if len({digest for _, _, digest in everybody}) > 1:
        team.same(what, numbers)
    return _OWN.sub(rf"\g<1>{sum(held for _, held, _ in everybody)}", state)


def own_part(state: str, rank: int) -> str:
    """Of a state that agreed() gave, what a rank goes on from: rank 0 keeps the sums."""
    return state if rank == 0 else _OWN.sub(r"\g<1>0", state)


def _held(state: str) -> int:
    found = _OWN.search(state)
    return int(found[2]) if found else 0


def _unpacked(facts: bytes) -> tuple[int, int, bytes]:
    return (*struct.unpack_from("<qq", facts), facts[16:])
