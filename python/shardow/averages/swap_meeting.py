"""How ranks that leave a swap meet: each tells how it fared. A rank that failed leaves a note, which the others find
when they come; it waits for them, until the deadline, where it needs the parts that they own."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardow import errors
from shardow.base.checks import warn
from shardow.ranks.team import Team

LEAVING = "leaving swapped()"

_GRACE = 1.0  # seconds for those who may be coming, where another has left
_LONGEST = 2000  # characters of an error that travel to other ranks


class Status(NamedTuple):
    """What a rank tells. ``shared``: it needs other ranks' parts; ``error``: what ended its block; ``refusal``: why its
    weights can't be put back."""

    shared: bool
    error: str | None = None
    refusal: str | None = None

    @property
    def failure(self) -> str | None:
        return self.error or self.refusal


class Meeting:
    """Of one swap. Made by all ranks together."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._key = f"swap {team.rounds}"  # equal on all ranks, which have just met

    def note(self, failure: str) -> None:
        """For ranks that come later; waits for nobody."""
        self._team.note(self._key, f"rank {self._team.rank} left swapped() with {failure}")

    def tell(self, status: Status) -> list[Status] | None:
        """Every rank's; None where this rank failed and others are still inside. Raises ConnectionError with the note
        that a rank left, else TimeoutError, where one does not come."""
        if self._team.size == 1:
            return [status]
        began = time.monotonic()
        if status.failure and not status.shared:
            self.note(status.failure)
            patience = 0.0
        elif self._team.noted(self._key):
            patience = _GRACE
        else:
            # A store that did not answer has cost some of the time.
            patience = max(self._team.timeout - (time.monotonic() - began), _GRACE)
        try:
            return [
                Status(*json.loads(one)) for one in self._team.gather(LEAVING, json.dumps(status).encode(), patience)
            ]
        except errors.Error as missing:  # or another rank is in another call
            if status.failure:
                self.note(status.failure)
                return None
            note = self._team.noted(self._key)
            raise errors.make("peer_failed", note) if note else missing from None

    def raise_for(self, by_rank: Sequence[Status] | None) -> None:
        """On ranks that fared well, where another did not."""
        failed = [
            f"rank {rank} left swapped() with {one.failure}" for rank, one in enumerate(by_rank or ()) if one.failure
        ]
        if by_rank and failed and not by_rank[self._team.rank].failure:
            raise errors.make("peer_failed", f"{'; '.join(failed)}. The weights are back on this rank")


def text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_LONGEST]


@contextlib.contextmanager
def noted_in(error: BaseException | None) -> Iterator[None]:
    """What goes wrong besides ``error``, which is raised, is told in a note of it. Without one it is raised itself."""
    try:
        yield
    except Exception as second:
        if error is None:
            raise
        if hasattr(error, "add_note"):
            error.add_note(f"shardow: {second}")
        else:  # before Python 3.11
            warn(f"after {text_of(error)}: {second}", RuntimeWarning)
