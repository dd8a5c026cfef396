"""Swaps the averages into the model's memory, and the weights back. The engine runs the transaction, whose steps
src/average/swap.cc numbers; its record is all that is known of a swap. This module does what the engine asks of the
memory: it finds the model's weights, copies strided ones, and exchanges weights between replicas. It also refuses calls
that must not run meanwhile.

Signals are deferred until the collective ends. A rank interrupted in a wait notifies its peers (``base.signals``), as
does one whose signal comes before signals are deferred. A signal in the few lines before that counts as one before the
call: peers learn of it from this rank's next collective call, or at their deadline.

Where replicas divide the weights, the swap out needs all replicas. Past the deadline, or where a replica is gone,
the averages stay in the model, and the error says so; restore() is the way back then."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TypeVar

import torch

from shardow import _core, errors
from shardow.averaging.cuda_streams import Streams, with_memory
from shardow.averaging.replicas import ReplicaExchange
from shardow.averaging.tracked import Source, Tracked, follow_source
from shardow.base.checks import invalid, warn
from shardow.base.signals import uninterrupted
from shardow.distributed.rank_group import RankGroup
from shardow.sharding import swap_guard
from shardow.sharding.changes import Move, find_moves, warn_of_casts
from shardow.sharding.view import ModelView

T = TypeVar("T")
#: Makes a step of all ranks, or raises on all; its function takes the index of the average.
RunStep = Callable[[str, Callable[[int], _core.PreparedSwap]], _core.PreparedSwap]

_LONGEST = 2000  # characters of an error that travel to other ranks
_RESTORE = "to have the weights back, call restore() of the EMA on every rank that shares the model"


class Block(contextlib.AbstractContextManager[None], contextlib.ContextDecorator):
    """The context manager of swapped(). It is no generator: an interrupted generator ends when it is collected, at any
    time."""

    def __init__(self, swap: Swap, run_step: RunStep) -> None:
        self._swap, self._run_step = swap, run_step

    def __enter__(self) -> None:
        self._swap.enter(self._run_step)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._swap.leave(error)


class Swap:
    """The swap of one EMA: the memory of weights and averages, as the model has it and as the engine knows it.
    ``splits``: replicas own parts of each other's weights. The engine alone knows whether, how far and why anything is
    swapped."""

    has_teacher = False
    #: Calls follow_sources() with the tensors of `source=` where their owner has moved them.
    find_sources: Callable[[Callable[[Mapping[str, Source]], None]], None] | None = None

    def __init__(
        self, engine: _core.Average, streams: Streams | None, tracked: list[Tracked], view: ModelView,
        ranks: RankGroup, splits: bool,
    ) -> None:  # fmt: skip
        self._engine, self._streams, self._tracked, self._view = engine, streams, tracked, view
        self._ranks, self._splits = ranks, splits
        self._swap_ranks = _core.SwapRanks(ranks.group, splits, ranks.timeout, ranks.whose)
        self._has_masters = any(weight.mastered for weight in tracked)
        self._exchange: ReplicaExchange | None = None  # the next exchange, with its memory
        self._moves: list[Move] = []  # to the places that the weights have by now
        self._versions: dict[str, int] = {}  # of the parameters, right after the swap in
        self._written: list[str] = []  # names of parameters written since then
        self._find_strided()

    @property
    def swapped(self) -> bool:
        return self._engine.swapped

    # ---- what others see of it

    def weights(self) -> Iterator[torch.Tensor]:
        """Yields the memory of the weights, of the tensors averaged in their place, and of the averages; in a swap also
        where the model shows them by now."""
        for weight in self._tracked:
            yield weight.local.tensor
            yield weight.source
            yield from weight.averages
        if self.swapped and not self._view.unchanged():
            yield from self.parameters()

    def parameters(self) -> list[torch.Tensor]:
        return self._view.parameter_objects()

    def finish_reading(self) -> None:
        """Ensures that an update in the background has read the weights before they change, in the order of torch's
        current streams."""
        self._follow_streams()
        self._engine.finish_reading()

    def refuse(self, what: str) -> None:
        """Raises as refuse_swapped(), after an update in the background has ended: the caller reads averages or changes
        weights."""
        self._engine.wait()
        self.refuse_swapped(what)

    def refuse_swapped(self, what: str) -> None:
        """Raises while the averages are in the model, or may be."""
        if not self.swapped:
            return
        if why := self._engine.why_swapped:
            raise invalid(f"{what}: the model's memory still holds averages: {why}; {_RESTORE}")
        remedy = (
            "leave the block, or call swap_out(), first. Where no block is open any more, one was interrupted; "
            f"{_RESTORE}"
        )
        raise invalid(f"{what} inside swapped(): the model's memory holds the averages now; {remedy}")

    def ready(self, what: str, writes: bool = False) -> None:
        """Ensures that the model's memory holds its weights, and that the engine knows where; raises otherwise.
        ``writes``: they are written next. Local."""
        self.refuse(what)
        self._find_weights(what, writes)
        if writes:
            self._view.reshard(refuse_written=True)

    def ready_to_update(self) -> None:
        """Does what ready() does while an update may go on: the engine begins the next one before it reports what that
        one met, so that none is lost."""
        self.refuse_swapped("update()")
        self._find_weights("update()")

    def _find_weights(self, what: str, writes: bool = False) -> None:
        if self.find_sources is not None:
            self.find_sources(self.follow_sources)
        swap_guard.refuse_foreign(what, self.weights, self, writes=writes)
        if not self._view.unchanged():
            self.rebind()
            swap_guard.refuse_foreign(what, self.weights, self, writes=writes)

    # ---- the memory

    def rebind(self) -> None:
        """Follows memory of the model that moved, or is unsharded for a while. Raises where more than memory has
        changed."""
        if (why := self.follow_moves()) is not None:
            raise invalid(why)

    def follow_moves(self) -> str | None:
        """Has the engine read where the weights lie now. Returns what else has changed of them; then nothing changes
        here."""
        self.refuse("following the model's memory")
        self._view.reshard()
        return None if self._view.unchanged() else self._view.follow_moves(self.bind)

    def follow_sources(self, sources: Mapping[str, Source]) -> None:
        """Takes sources whose memory has moved: the same elements of the same tensors. Local."""
        self.refuse("following source=")
        for weight in self._tracked:
            if weight.mastered:
                follow_source(weight, sources.get(weight.name), "split" if self._splits else "copy")
        self.bind()

    def bind(self) -> None:
        """Has the engine read where the weights lie now."""
        for weight in self._tracked:
            weight.follow()
        self._find_strided()
        sources = [weight.view(weight.sources()) for weight in self._tracked]
        self._with_memory(lambda: self._engine.bind(sources))

    def _follow_streams(self) -> None:
        """Has the engine work on torch's current streams, where there are devices."""
        if self._streams is not None:
            self._streams.follow(self._engine)

    def _with_memory(self, call: Callable[[], T]) -> T:
        """Makes a call of the engine for which a device may have too little memory."""
        self._follow_streams()
        return call() if self._streams is None else with_memory(call)

    def _find_strided(self) -> None:
        self._strided = [weight for weight in self._tracked if weight.stage is not None]

    def gather(self) -> None:
        """Copies strided weights into the memory that the engine reads, where others lie already."""
        for weight in self._strided:
            weight.gather()

    def _views(self) -> list[_core.TensorView]:
        return [weight.view(weight.weights()) for weight in self._tracked]

    # ---- what the engine asks of the memory in a swap

    def places(self, strict: bool) -> list[_core.TensorView]:
        """Prepares the swap out: does all that could fail, and takes all memory; also on a rank that has its weights,
        whose parts others need. The swap is undone in the memory that was swapped, which this EMA keeps alive."""
        self._moves = []
        if not self.swapped:
            self.rebind()
        self._view.reshard()
        unchanged = self._view.unchanged()
        if not unchanged:
            model = self._view.as_it_is_now()
            self._moves = find_moves(model, [weight.local for weight in self._tracked], strict)
        if not self._moves and self._versions:
            versions = self._view.versions()
            self._written = [name for name, then in self._versions.items() if versions.get(name, then) != then]
        if self._splits:
            self._exchange = ReplicaExchange(self._tracked)
        return [] if unchanged else self._views()

    def exchange(self, writes: Callable[[], None], seconds: float) -> None:
        """Exchanges with the replicas the parts that they own."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.run(seconds, writes)

    def scatter(self) -> None:
        """Copies strided weights back, after a write to that memory."""
        for weight in self._strided:
            weight.scatter()

    @torch.no_grad()
    def written(self) -> None:
        """Puts the weights, which are all back in their memory, where the model has its weights now."""
        for move in self._moves:
            move.target.copy_(move.weights.reshape(move.target.shape))
        self._versions = {}
        self._view.written()

    # ---- the transaction

    def enter(self, run_step: RunStep) -> None:
        """Swaps in. Where it raises, the weights are back, or the engine knows how far they are not."""
        uninterrupted(lambda: self._enter(run_step), lambda _: self._ranks.stopped("swapped()"), self.leave)

    def _enter(self, run_step: RunStep) -> None:
        prepared = run_step("swapped()", self._prepare)
        try:
            swap_guard.enter(self)
            self._follow_streams()
            self._engine.swap_in(prepared, self, self._swap_ranks)
            self._versions = self._view.versions()
        except BaseException as error:
            self.leave(error, enters=True)
            raise

    def _prepare(self, k: int) -> _core.PreparedSwap:
        """Prepares the swap in of average ``k``. The bound tensors are the weights, except for master weights."""
        if self.has_teacher:
            raise invalid("swapped(): the averages are the teacher's weights; call the teacher")
        self.ready("swapped()", writes=True)
        self._moves, self._written = [], []
        self._exchange = ReplicaExchange(self._tracked) if self._splits else None
        self._view.reshard()
        self.gather()
        weights = self._views() if self._has_masters else []
        return self._with_memory(lambda: self._engine.prepare_swap(k, weights))

    def leave(self, error: BaseException | None, enters: bool = False) -> None:
        """Swaps out. ``error``: the exception that ends the block, or the way in, and that the caller raises; a further
        one becomes a note of it."""

        def run() -> None:
            text = "" if error is None else f"{type(error).__name__}: {error}"[:_LONGEST]
            try:
                self._leave("leaving swapped()", text, enters)
            except Exception as second:
                if error is None:
                    raise
                if hasattr(error, "add_note"):
                    error.add_note(f"shardow: {second}")
                else:  # before Python 3.11
                    warn(f"after {text}: {second}", RuntimeWarning)

        uninterrupted(run, self.leave)  # a signal before signals are deferred ends the block

    def out(self) -> None:
        """See EMA.swap_out()."""
        uninterrupted(self._out, self._stop_out)

    def _stop_out(self, stop: BaseException) -> None:
        if self.swapped and not self._engine.why_swapped:
            self.leave(stop)

    def _out(self) -> None:
        if not self.swapped:
            raise invalid("swap_out(): nothing is swapped in; the model holds its weights")
        if self._engine.why_swapped:
            self.refuse("swap_out()")
        self._leave("leaving swapped()")

    def restore(self, strict: bool = True) -> None:
        """See EMA.restore(). Collective where replicas own parts of the weights."""
        uninterrupted(lambda: self._leave("restore()", restores=True, strict=bool(strict)), self._stop_restore)

    def _stop_restore(self, _: BaseException) -> None:
        if self._splits:
            self._ranks.stopped("restore()")

    def _leave(
        self, call: str, error: str = "", enters: bool = False, restores: bool = False, strict: bool = True
    ) -> None:
        was_swapped = self.swapped
        try:
            self._follow_streams()
            self._engine.swap_out(self, self._swap_ranks, call, error, enters, restores, strict)
        except errors.Error as left:
            if self._splits and self.swapped:
                gone = restores and isinstance(left, (TimeoutError, ConnectionError))
                lost = "what a dead rank held of the weights is gone: load the last checkpoint then"
                left.message += f". The model's memory still holds averages; {lost if gone else _RESTORE}"
            raise
        finally:
            if not self.swapped:
                swap_guard.settle(self)
                if was_swapped:
                    self._warn()

    def _warn(self) -> None:
        """Warns of weights that were cast or written in the block."""
        warn_of_casts(self._moves)
        if self._written:
            name, *others = self._written
            which = f"'{name}' and {len(others)} more were" if others else f"'{name}' was"
            fate = "and what was written may be in the averages now"
            warn(f"{which} written inside swapped(): the weights are those from before it, {fate}", RuntimeWarning)
