"""The averages in the model's memory, and the weights back: one transaction, numbered.

1. every rank is ready: nothing is swapped in, memory for the exchange is there
2. own parts are exchanged: ``Average.swap_in``, which happens whole or not at all
3. ``Average.share``; replicas send each other the parts that they own
4. the block, or what lies between swap_in() and swap_out()
5. ranks meet and tell how they fared
6. own parts are taken back, replicas send theirs where anybody has shared, memory that moved is followed,
   ``Average.settle``

Signals wait for the end of what ranks do together, but for waits, where the others are told (``base.signals``). They
are told too of one that comes before signals are held; of one in the few lines before that, which is as if it had come
before the call, they learn from this rank's next collective call, or at their deadline.

What stopped it does not matter: the engine's record tells what has happened, step 6 undoes just that, and can be
repeated. Without replicas step 6 comes before 5, and a rank that failed does not wait. With them it needs all ranks:
past the deadline, or where one is gone, the averages stay in the model, which the error says; restore() is step 6 then.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import NamedTuple

import torch

from shardow import _core, errors
from shardow.averages.cuda_streams import Streams, with_memory
from shardow.averages.replicas import Exchange
from shardow.averages.tracked import Tracked
from shardow.base.checks import invalid, warn
from shardow.base.signals import uninterrupted
from shardow.distributed.rank_group import Comparison, RankGroup, Step, naming
from shardow.model import swap_guard
from shardow.model.changes import Move, find_moves, warn_of_casts
from shardow.model.view import ModelView

# ---- how ranks that leave a swap meet: each tells how it fared. A rank that failed leaves a note, which the others
# find when they come; it waits for them, until the deadline, where it needs the parts that they own.

LEAVING = "leaving swapped()"

_GRACE = 1.0  # seconds for those who may be coming, where another has left
_LONGEST = 2000  # characters of an error that travel to other ranks


class Status(NamedTuple):
    """Outcome of a block on one rank. ``shared``: it needs other ranks' parts; ``error``: what ended its block;
    ``refusal``: why its weights can't be put back."""

    shared: bool
    error: str | None = None
    refusal: str | None = None

    @property
    def failure(self) -> str | None:
        return self.error or self.refusal


class Meeting:
    """Where ranks meet at the end of one swap; made by all of them together."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._key = f"swap {ranks.rounds}"  # equal on all ranks, which have just met

    def note(self, failure: str) -> None:
        """Leaves word for ranks that come later; does not wait."""
        self._ranks.note(self._key, f"rank {self._ranks.rank} left swapped() with {failure}")

    def tell(self, status: Status) -> list[Status] | None:
        """Every rank's; None where this rank failed and others are still inside. Raises ConnectionError with the note
        that a rank left, else TimeoutError, where one does not come."""
        if self._ranks.size == 1:
            return [status]
        began = time.monotonic()
        if status.failure and not status.shared:
            self.note(status.failure)
            patience = 0.0
        elif self._ranks.noted(self._key):
            patience = _GRACE
        else:
            # A store that did not answer has cost some of the time.
            patience = max(self._ranks.timeout - (time.monotonic() - began), _GRACE)
        try:
            with naming(LEAVING):
                by_rank = self._ranks.gather(LEAVING, json.dumps(status).encode(), patience)
            return [Status(*json.loads(text)) for text in by_rank]
        except errors.Error as missing:  # or another rank is in another call
            if status.failure:
                self.note(status.failure)
                return None
            note = self._ranks.noted(self._key)
            raise errors.make("peer_failed", note) if note else missing from None

    def raise_for(self, by_rank: Sequence[Status] | None) -> None:
        """On ranks that fared well, where another did not."""
        failed = [
            f"rank {rank} left swapped() with {end.failure}" for rank, end in enumerate(by_rank or ()) if end.failure
        ]
        if by_rank and failed and not by_rank[self._ranks.rank].failure:
            raise errors.make("peer_failed", f"{'; '.join(failed)}. The weights are back on this rank")


def text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_LONGEST]


@contextlib.contextmanager
def noted_in(error: BaseException | None) -> Iterator[None]:
    """Adds what goes wrong besides ``error``, which is raised, to it as a note; raises it where there is no error."""
    try:
        yield
    except Exception as second:
        if error is None:
            raise
        if hasattr(error, "add_note"):
            error.add_note(f"shardow: {second}")
        else:  # before Python 3.11
            warn(f"after {text_of(error)}: {second}", RuntimeWarning)


# ---- the transaction

_RESTORE = "to have the weights back, call restore() of the EMA on every rank that shares the model"

# Runs the check on all ranks or raises on all; returns which average is meant.
Together = Callable[[str, Callable[[], None]], int]


class Block(contextlib.AbstractContextManager[None], contextlib.ContextDecorator):
    """The context manager of swapped(); no generator, since one that is interrupted ends when it is collected, at any
    time.
    """

    def __init__(self, swap: Swap, together: Together) -> None:
        self._swap, self._together = swap, together

    def __enter__(self) -> None:
        self._swap.enter(self._together)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._swap.leave(error)


class _SharedByAny(Comparison):
    """Finds whether any rank needs other ranks' parts."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.shared = shared

    def words(self) -> bytes:
        return b"1" if self.shared else b""

    def sum_up(self, by_rank: list[bytes]) -> bytes:
        return b"1"

    def take(self, total: bytes) -> None:
        self.shared = bool(total)


class Swap:
    """One EMA's: the memory of weights and averages, as the model has it and as the engine knows it. ``splits``:
    replicas own parts of each other's weights. The engine alone knows whether and how far anything is swapped;
    ``_why`` explains it."""

    has_teacher = False

    def __init__(
        self, engine: _core.Average, streams: Streams | None, tracked: list[Tracked], view: ModelView,
        ranks: RankGroup, splits: bool,
    ) -> None:  # fmt: skip
        self._engine, self._streams, self._tracked, self._view = engine, streams, tracked, view
        self._ranks, self._splits = ranks, splits
        self._has_masters = any(weight.mastered for weight in tracked)
        self._why: str | None = None  # why the averages are still there though the block is left
        self._meeting = Meeting(ranks)
        self._versions: dict[str, int] = {}
        self._find_strided()

    @property
    def swapped(self) -> bool:
        return self._engine.swapped

    # ---- what others see of it

    def weights(self) -> Iterator[torch.Tensor]:
        """The memory of the weights, of what is averaged in their place, and of the averages; in a swap also where the
        model shows them by now."""
        for weight in self._tracked:
            yield weight.local.tensor
            yield weight.source
            yield from weight.averages
        if self.swapped and not self._view.unchanged():
            yield from self.parameters()

    def parameters(self) -> list[torch.Tensor]:
        return self._view.parameter_objects()

    def finish_reading(self) -> None:
        """Before the weights change: an update in the background has read them by then, in the order of torch's current
        streams.
        """
        self._follow_streams()
        self._engine.finish_reading()

    def refuse(self, what: str) -> None:
        """refuse_swapped(). What follows reads averages or changes weights: an update in the background ends first."""
        self._engine.wait()
        self.refuse_swapped(what)

    def refuse_swapped(self, what: str) -> None:
        """Raises while the averages are in the model, or may be."""
        if not self.swapped:
            return
        if self._why:
            raise invalid(f"{what}: the model's memory still holds averages: {self._why}; {_RESTORE}")
        way_out = (
            "leave the block, or call swap_out(), first. Where no block is open any more, one was interrupted; "
            f"{_RESTORE}"
        )
        raise invalid(f"{what} inside swapped(): the model's memory holds the averages now; {way_out}")

    def ready(self, what: str, writes: bool = False) -> None:
        """The model's memory holds its weights, and the engine knows where. Raises otherwise. ``writes``: they are
        written next. Local."""
        self.refuse(what)
        self._find_weights(what, writes)
        if writes:
            self._view.refuse_written()

    def ready_to_update(self) -> None:
        """ready(), while an update may go on: the engine begins the next one before it tells what that one met, so that
        none is lost.
        """
        self.refuse_swapped("update()")
        self._find_weights("update()")

    def _find_weights(self, what: str, writes: bool = False) -> None:
        swap_guard.refuse_foreign(what, self.weights, self, writes=writes)
        if not self._view.unchanged():
            self.rebind()
            swap_guard.refuse_foreign(what, self.weights, self, writes=writes)

    # ---- the memory

    def rebind(self) -> None:
        """Memory of the model that moved, or is unsharded for a while, is followed. Raises where more than memory has
        changed.
        """
        if not self.follow_moves():
            raise invalid(self._view.explain_change())

    def follow_moves(self) -> bool:
        """The engine reads where the weights lie now. False where more than their memory has changed; nothing has
        then."""
        self.refuse("following the model's memory")
        self._view.reshard()
        return self._view.unchanged() or self._view.follow_moves(self.bind)

    def bind(self) -> None:
        """The engine reads where the weights lie now."""
        for weight in self._tracked:
            weight.follow()
        self._find_strided()
        sources = [weight.view(weight.sources()) for weight in self._tracked]
        self._with_memory(lambda: self._engine.bind(sources))

    def _follow_streams(self) -> None:
        """Has the engine work on torch's current streams, where there are devices."""
        if self._streams is not None:
            self._streams.follow(self._engine)

    def _with_memory(self, call: Callable[[], None]) -> None:
        """Makes a call of the engine for which a device may have too little memory."""
        self._follow_streams()
        if self._streams is None:
            call()
        else:
            with_memory(call)

    def _find_strided(self) -> None:
        self._strided = [weight for weight in self._tracked if weight.stage is not None]

    def gather(self) -> None:
        """Copies strided weights into the memory that the engine reads, where others lie already."""
        for weight in self._strided:
            weight.gather()

    def scatter(self) -> None:
        """Copies strided weights back, after a write to that memory."""
        for weight in self._strided:
            weight.scatter()

    def _views(self) -> list[_core.TensorView]:
        return [weight.view(weight.weights()) for weight in self._tracked]

    def _swap_in(self, k: int) -> None:
        """Swaps in all that this rank owns, or nothing. The bound tensors are the weights, but for masters."""
        self._view.reshard()
        self.gather()
        weights = self._views() if self._has_masters else []
        self._with_memory(lambda: self._engine.swap_in(k, weights))
        self.scatter()

    def _take_back(self) -> None:
        """Takes back all that this rank owns, from any point of the swap, wherever the weights have moved."""
        weights = [] if self._view.unchanged() else self._views()
        self._follow_streams()
        self._engine.take_back(weights)
        self.scatter()

    # ---- the transaction

    def enter(self, together: Together) -> None:
        """Steps 1 to 3. Where it raises the weights are back, or the engine knows how far they are not."""
        uninterrupted(lambda: self._enter(together), lambda _: self._ranks.stopped("swapped()"), self.leave)

    def _enter(self, together: Together) -> None:
        exchange: list[Exchange] = []
        k = together("swapped()", lambda: exchange.extend(self._ready()))
        self._why, self._meeting = None, Meeting(self._ranks)
        try:
            swap_guard.enter(self)
            if self._splits:  # on all ranks or on none, since they wait for each other next
                self._ranks.agree("swapped()", lambda: self._swap_in(k))
            else:
                self._swap_in(k)
        except BaseException as error:  # only own parts were touched
            if self._splits:
                with noted_in(error):
                    self._bring_back(self._moves())
                    self._meeting.note(text_of(error))
            else:  # the others are inside by now, and are told when they leave
                self.leave(error)
            raise
        try:
            for one in exchange:
                one.run(self._ranks.timeout, self._engine.share)
            self._view.written()
            self._versions = self._view.versions()
        except BaseException as error:
            self.leave(error)
            raise

    def leave(self, error: BaseException | None) -> None:
        """Steps 5 and 6. ``error``: what ends the block, and what the caller raises; what else happens becomes a note
        of it.
        """

        def run() -> None:
            with noted_in(error):
                self._leave(None if error is None else text_of(error))

        uninterrupted(run, self.leave)  # what came too early for a wait is what ends the block

    def out(self) -> None:
        """swap_out()."""
        uninterrupted(self._out, lambda stop: self.leave(stop) if self.swapped and not self._why else None)

    def _out(self) -> None:
        if not self.swapped:
            raise invalid("swap_out(): nothing is swapped in; the model holds its weights")
        if self._why:
            self.refuse("swap_out()")
        self._leave(None)

    def restore(self, strict: bool = True) -> None:
        """Step 6 from wherever it is needed. Collective where replicas own parts of the weights."""
        uninterrupted(
            lambda: self._restore(strict), lambda _: self._ranks.stopped("restore()") if self._splits else None
        )

    def _restore(self, strict: bool) -> None:
        if not self._splits:
            self._bring_back(self._moves(strict))
            return
        try:
            moves, exchange = self._meet_to_restore(strict)
            self._bring_back(moves, exchange, "restore()")
        except (TimeoutError, ConnectionError) as missing:
            if not self.swapped or not isinstance(missing, errors.Error):
                raise
            gone = "What a dead rank held of the weights is gone: load the last checkpoint then"
            raise type(missing)(f"{missing}. The model's memory still holds averages. {gone}") from None

    def _meet_to_restore(self, strict: bool, again: bool = True) -> tuple[list[Move], Exchange | None]:
        """Once more after others who were leaving: they learn there that they have to restore too."""
        any_rank = _SharedByAny(self._engine.swap_is_shared)
        try:
            prepared = self._ranks.step("restore()", lambda: Step(self._prepare_return(strict), [any_rank]))
            return prepared if any_rank.shared else (prepared[0], None)
        except ValueError as other:
            if not again or f"calls {LEAVING}" not in str(other):
                raise
        return self._meet_to_restore(strict, again=False)

    def _ready(self) -> list[Exchange]:
        if self.has_teacher:
            raise invalid("swapped(): the averages are the teacher's weights; call the teacher")
        self.ready("swapped()", writes=True)
        return [Exchange(self._tracked)] if self._splits else []

    def _leave(self, error: str | None) -> None:
        if self._splits:
            self._leave_together(error)
            return
        try:
            self._bring_back(self._moves())
        except Exception as refusal:
            self._why = str(refusal)
            self._meeting.tell(Status(False, error, self._why))
            raise
        self._meeting.raise_for(self._meeting.tell(Status(False, error)))

    def _leave_together(self, error: str | None) -> None:
        moves, exchange, refusal = list[Move](), None, None
        try:
            moves, exchange = self._prepare_return(strict=True)
        except Exception as reason:
            refusal = reason
        shared = self._engine.swap_is_shared
        try:
            by_rank = self._meeting.tell(Status(shared, error, None if refusal is None else str(refusal)))
        except errors.Error as missing:
            if shared:
                raise self._still_there(missing) from None
            self._bring_back(moves)
            raise
        if by_rank is None and not shared:  # nobody's parts were touched here
            self._bring_back(moves)
            return
        if by_rank is None or any(one.refusal for one in by_rank):
            others = [f"rank {rank}: {one.refusal}" for rank, one in enumerate(by_rank or ()) if one.refusal]
            why = others[0] if others else "other ranks were still inside swapped()"
            raise self._still_there(refusal or errors.make("peer_failed", why))
        try:
            self._bring_back(moves, exchange if any(one.shared for one in by_rank) else None)
        except Exception as lost:
            if not self.swapped:
                raise
            raise self._still_there(lost) from None
        self._meeting.raise_for(by_rank)

    def _still_there(self, error: Exception) -> Exception:
        self._why = f"{LEAVING}: {error}"
        text = f"{self._why}. The model's memory still holds averages; {_RESTORE}"
        return type(error)(text) if isinstance(error, errors.Error) else errors.make("internal", text)

    def _prepare_return(self, strict: bool) -> tuple[list[Move], Exchange]:
        """All that could fail, and all memory; also on a rank that has its weights, whose parts others need."""
        if not self.swapped:
            self.rebind()
        return self._moves(strict), Exchange(self._tracked)

    def _moves(self, strict: bool = True) -> list[Move]:
        """Where the model keeps the weights now, if not where they were; see find_moves()."""
        if not self.swapped:
            return []
        self._view.reshard()
        if self._view.unchanged():
            return []
        return find_moves(self._view.as_it_is_now(), [weight.local for weight in self._tracked], strict)

    @torch.no_grad()
    def _bring_back(self, moves: Sequence[Move], exchange: Exchange | None = None, what: str = LEAVING) -> None:
        """Step 6, in the memory that was swapped, which this EMA keeps alive; then it is copied to where the model has
        it now. Replicas begin their exchange when all have taken back what they own: who failed there would be waited
        for."""
        if not self.swapped and exchange is None:
            swap_guard.settle(self)
            return
        self._view.reshard()
        versions, self._versions = self._versions, {}
        written = (
            [] if moves else [name for name, now in self._view.versions().items() if versions.get(name, now) != now]
        )
        if exchange is None:
            self._take_back()
        else:
            self._ranks.agree(what, self._take_back)
            exchange.run(self._ranks.timeout)
        for move in moves:
            move.target.copy_(move.weights.reshape(move.target.shape))
        self._view.written()
        self._engine.settle()
        self._why = None
        swap_guard.settle(self)
        if moves:
            warn_of_casts(moves)
        if written:
            more = f"'{written[0]}' and {len(written) - 1} more"
            fate = "and what was written may be in the averages now"
            warn(f"{more} were written inside swapped(): the weights are those from before it, {fate}", RuntimeWarning)
