"""Rounds over a store: each rank brings its words, all learn one verdict. What a round costs does not grow with the
number of ranks, but for one of them where there are words.

Numbered, as the code below, for round r:

1. a rank puts its call and its words behind the verdict of round r - 1 (``compare_set``), which all have read. The
   first one's stay: who has the same has told all. Only who differs, or has much to say, appends its own to ``r/words``
2. it counts itself: a bit in ``r/lane/<n>``, which 31 ranks share; the last of a lane counts that in ``r/lanes``. The
   answers tell who was last of all, and whether anybody has words
3. the last of all gives the verdict. Where there are words it reads them, once, and asks the call what they come to
4. all others wait for the one key ``r/verdict``, at most until their deadline. Who waited in vain looks up the bits:
   either ranks are missing, and the verdict says which, or whoever had to give it is gone, and gives it in its place.
   ``compare_set`` keeps the first
5. a good verdict means that all have come, so what lies behind the round is deleted, by the first ranks that came to
   it. Of a round that was not good, or that a rank has left, nobody knows who wrote what: each of its keys has a rank
   that deletes it once a later one is good. A rank that comes to a round that is over reads its verdict

Where all is well and nobody has words that is at most four operations for each rank: compare_set, add, get or its part
of the last one's, delete.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from shardow import errors
from shardow.base.checks import invalid
from shardow.ranks.store_values import Connection, get, put

MISSING = "did not take part"
SHORT = 512  # bytes of words that may be everybody's
EACH_HIS = b"="  # begins a verdict: every rank's words are there to be read; what follows are those of all others
_LONG = 16 << 10  # from here on under a key of their own
_LANE = 31  # ranks, with two bits each
_LOOK, _LOOK_EACH = 1.0, 1e-3  # seconds, and so many for each rank, after which a verdict is late
_GRACE = 0.4  # seconds: the first one that waited in vain has them to say for whom
_MOST_NAMED = 32
_INLINE = 1024  # bytes of an answer that is a verdict's part


# A verdict in the store: its length, a blank, "-", code and message where the round failed, else something else; then
# whatever the next round put behind it.


def failure(code: str, message: str) -> bytes:
    return f"-{code} {message}".encode(errors="backslashreplace")


def framed(body: bytes) -> bytes:
    return b"%d " % len(body) + body


def body_of(said: bytes) -> bytes:
    """Without what the next round put behind it."""
    length, _, rest = said.partition(b" ")
    return rest[: int(length)]


def is_good(said: bytes) -> bool:
    return not body_of(said).startswith(b"-")


def as_given(said: bytes) -> bytes:
    return framed(body_of(said))


def raise_for(said: bytes) -> None:
    body = body_of(said)
    if body.startswith(b"-"):
        code, _, message = body[1:].decode(errors="backslashreplace").partition(" ")
        raise errors.make(code, message)


@dataclass(frozen=True)
class Words:
    """What a rank brings: ``call`` must be everybody's."""

    call: str
    mine: bytes

    def encode(self) -> bytes:
        call = self.call.encode(errors="replace")
        return b"%d " % len(call) + call + self.mine

    @staticmethod
    def decode(text: bytes) -> Words:
        length, _, rest = text.partition(b" ")
        return Words(rest[: int(length)].decode(), rest[int(length) :])


@dataclass
class Turn:
    """A rank's way through a round, as far as it has come. ``before``: the verdict of the last one, as the store has
    it. ``old``: keys that are of no use once a round was good."""

    number: int
    words: Words
    before: bytes | None
    old: list[str]
    written: list[str] = field(default_factory=list)  # keys of this round, which others may still read
    place: int = 0  # among those of its lane, from 1 on; 0: it has not come
    common: bytes | None = None  # what the first one put behind the last verdict
    everybody: list[bytes] | None = None  # by rank, where they differ, or this one is to say what they come to
    said: bytes | None = None  # the verdict
    is_over: bool = False  # it was good, and what lies behind it is deleted
    answer: bytes = b""  # what a good round gave to all
    letter: bytes = b""  # and to this rank


class Rounds:
    """Rank ``rank``'s end of the rounds of ``names``, the ranks as messages name them. Without state: a turn has it
    all, so that one which was left to itself disturbs none."""

    def __init__(self, rank: int, names: Sequence[int]) -> None:
        self._rank, self._names, self._size = rank, names, len(names)
        self._lanes = -(-self._size // _LANE)
        self._lane, self._bit = rank % self._lanes, rank // self._lanes
        self._look = _LOOK + _LOOK_EACH * self._size

    def come(self, store: Connection, turn: Turn, seconds: float, timeout: float, weighs: bool) -> None:
        """(1) to (4): ends with turn.said, or where the call ``weighs`` everybody's words, with those. ``timeout``:
        what was asked for, for messages."""
        if turn.before is None:
            turn.before = self.verdict_of(store, turn.number - 1)
            # Decides for the others: this rank goes on from its beginning, and they do not.
            if turn.number > 0 and is_good(turn.before):
                turn.said = self.decide(store, turn.number, self._left())
                return
        has_words = self._tell(store, turn, turn.before)
        was_last, any_words = self._count(store, turn, has_words)
        if not was_last:
            turn.said = self._wait_long(store, turn, seconds)
            if turn.said is None:
                missing = self._waited_for(store, turn)
                any_words = not missing and bool(store.check([f"{turn.number}/words"]))
                if missing and turn.said is None:
                    silent = f"rank(s) {self._named(missing)} {MISSING} within {timeout:g} s"
                    turn.said = self.decide(store, turn.number, failure("timeout", silent))
        if turn.said is None:
            self._sum_up(store, turn, any_words, weighs)

    def _tell(self, store: Connection, turn: Turn, before: bytes) -> bool:
        """(1): whether this rank's words go beside what all have."""
        text = turn.words.encode()
        if len(text) <= SHORT:
            found = bytes(store.compare_set(f"{turn.number - 1}/verdict", before, before + text))
            turn.common = found[len(before) :]
            if turn.common == text:
                return False
        if len(text) > _LONG:
            put(store, f"{turn.number}/{self._rank}/words", text, turn.written)
            text = b""
        store.append(f"{turn.number}/words", b"%d %d " % (self._rank, len(text)) + text)
        return True

    def _count(self, store: Connection, turn: Turn, has_words: bool) -> tuple[bool, bool]:
        """(2): whether this rank is the last of all; then, whether anybody has words."""
        bits = int(store.add(f"{turn.number}/lane/{self._lane}", (1 + (has_words << _LANE)) << self._bit))
        turn.place = (bits & ((1 << _LANE) - 1)).bit_count()
        if turn.place < self._members():
            return False, False
        if self._lanes == 1:
            return True, bits >> _LANE > 0
        lanes = int(store.add(f"{turn.number}/lanes", 1 + ((bits >> _LANE > 0) << 32)))
        return lanes % (1 << 32) == self._lanes, lanes >> 32 > 0

    def _waited_for(self, store: Connection, turn: Turn) -> list[int]:
        """(4), in vain: those who are missing."""
        if int(store.add(f"{turn.number}/asked", 1)) == 1:
            turn.written.append(f"{turn.number}/asked")
        else:
            turn.said = self._wait(store, turn.number, _GRACE)
            if turn.said is not None:
                return []
        return self.missing(store, turn.number)

    def _wait_long(self, store: Connection, turn: Turn, seconds: float) -> bytes | None:
        """(4): the first one of all looks now and then whether all have come: whoever was last may have died before it
        gave the verdict.
        """
        if self._lane > 0 or turn.place != 1:
            return self._wait(store, turn.number, seconds)
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > self._look:
            said = self._wait(store, turn.number, self._look)
            if said is not None:
                return said
            if not self.missing(store, turn.number):
                return self._wait(store, turn.number, min(left, _GRACE))
        return self._wait(store, turn.number, max(left, 0.001))

    def _wait(self, store: Connection, number: int, seconds: float) -> bytes | None:
        """For a verdict; None where it does not come."""
        try:
            return store.get(f"{number}/verdict", seconds)
        except dist.DistStoreError:
            return None

    def _members(self) -> int:
        """Of this rank's lane."""
        return self._size // self._lanes + (self._lane < self._size % self._lanes)

    def missing(self, store: Connection, number: int) -> list[int]:
        """Of a round that has no verdict. To look makes no key: what is not there is as what is compared."""
        bits = [int(store.compare_set(f"{number}/lane/{lane}", "0", "0")) for lane in range(self._lanes)]
        return [rank for rank in range(self._size) if not bits[rank % self._lanes] >> (rank // self._lanes) & 1]

    def _sum_up(self, store: Connection, turn: Turn, any_words: bool, weighs: bool) -> None:
        """(3), but for what the call makes of words."""
        if any_words or (weighs and turn.words.mine):
            try:
                turn.everybody = self.everybody(store, turn, any_words)
            except errors.Error as error:
                turn.said = self.decide(store, turn.number, failure(error.code, str(error)))
                return
        if not weighs or turn.everybody is None:
            self.tell_all(store, turn, EACH_HIS if any_words else b"+", ())

    def everybody(self, store: Connection, turn: Turn, any_words: bool) -> list[bytes]:
        """All ranks' words. Raises where their calls differ."""
        texts: dict[int, bytes] = self._words(store, turn.number) if any_words else {}
        if len(texts) < self._size and turn.common is None:
            turn.common = store.get(f"{turn.number - 1}/verdict")[len(turn.before or b"") :]
        common = Words.decode(turn.common) if turn.common else turn.words
        told = [Words.decode(texts[rank]) if rank in texts else common for rank in range(self._size)]
        for rank, one in enumerate(told):
            if one.call != told[0].call:
                differ = f"rank {self._names[rank]} calls {one.call} where rank {self._names[0]} calls {told[0].call}"
                raise invalid(f"{differ}; every rank must make the same collective calls in the same order")
        return [one.mine for one in told]

    def _words(self, store: Connection, number: int) -> dict[int, bytes]:
        left, apart = store.get(f"{number}/words"), []
        texts: dict[int, bytes] = {}
        while left:
            rank, length, left = left.split(b" ", 2)
            texts[int(rank)], left = left[: int(length)], left[int(length) :]
            if length == b"0":
                apart.append(int(rank))
        texts.update(zip(apart, get(store, [f"{number}/{rank}/words" for rank in apart]), strict=True))
        return texts

    def decide(self, store: Connection, number: int, body: bytes) -> bytes:
        """``body``, or the verdict that was given before."""
        return bytes(store.compare_set(f"{number}/verdict", b"", framed(body)))

    def verdict_of(self, store: Connection, number: int) -> bytes:
        """Of a round that this rank has left; bad, where it has none yet."""
        if number < 0:
            return b""
        return as_given(self.decide(store, number, self._left()))

    def _left(self) -> bytes:
        return failure(
            "timeout", f"rank {self._names[self._rank]} has left: it waited in vain for the store of the process group"
        )

    def tell_all(self, store: Connection, turn: Turn, body: bytes, letters: Sequence[bytes]) -> None:
        """(3): the verdict of who was last. What does not fit into it is there before it."""
        if len(body) > _INLINE and body.startswith(b"+"):
            put(store, f"{turn.number}/answer", body[1:], turn.written)
            body = b"@"
        if any(letters):
            body = b"#" + body
            for rank, letter in enumerate(letters):
                put(store, f"{turn.number}/for/{rank}", letter, turn.written)
        if body == EACH_HIS:
            body += turn.common or b""
        if turn.everybody is not None:
            turn.written.append(f"{turn.number}/words")
        turn.said = self.decide(store, turn.number, body)

    def end(self, store: Connection, turn: Turn) -> None:
        """(4), (5): what a verdict gives this rank; nothing without one."""
        if turn.said is None:
            return
        if is_good(turn.said):
            self._take_answer(store, turn, body_of(turn.said))
            for key in turn.old + self._behind(turn):
                store.delete_key(key)
            # A rank that was interrupted may end it once more: what is written stays until all have read it.
            turn.is_over = True

    def left_by(self, turn: Turn) -> list[str]:
        """(5): what this rank is to delete, by and by, of a round that was not good for it, and of those before."""
        if turn.is_over:
            return turn.written
        of_all = [f"{turn.number}/{what}" for what in ("words", "answer", "lanes", "asked")] + [
            f"{turn.number - 2}/verdict"
        ]
        mine = [f"{turn.number}/for/{self._rank}", f"{turn.number}/{self._rank}/words"]
        lane = [f"{turn.number}/lane/{self._rank}"] if self._rank < self._lanes else []
        return list(dict.fromkeys([*turn.old, *turn.written, *mine, *lane, *(of_all if self._rank == 0 else ())]))

    def _take_answer(self, store: Connection, turn: Turn, body: bytes) -> None:
        if body.startswith(b"#"):
            turn.letter, body = get(store, [f"{turn.number}/for/{self._rank}"])[0], body[1:]
        if body.startswith(EACH_HIS):
            turn.common = body[1:]
            turn.everybody = turn.everybody or self.everybody(store, turn, True)
        else:
            turn.answer = get(store, [f"{turn.number}/answer"])[0] if body == b"@" else body[1:]

    def _behind(self, turn: Turn) -> list[str]:
        """(5): keys that this rank deletes when the round is over. The last verdict is not among them: a slow rank may
        not have read yet what the first one put behind it (1)."""
        keys = [f"{turn.number}/lane/{self._lane}"] if turn.place == 1 else []
        if self._lane == 0 and turn.place == min(2, self._members()) and turn.number > 0:
            keys.append(f"{turn.number - 2}/verdict")
        if self._lane == 0 and turn.place == 3 and self._lanes > 1:
            keys.append(f"{turn.number}/lanes")
        return keys

    def _named(self, ranks: Sequence[int]) -> str:
        more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
        return f"{[self._names[rank] for rank in ranks[:_MOST_NAMED]]}{more}"
