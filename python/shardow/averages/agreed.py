"""What ranks agree on before their averages are used together: the base of EMA."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from shardow import _core
from shardow.averages import counters
from shardow.averages.cuda_streams import Streams
from shardow.averages.options import Options
from shardow.averages.swap import Swap
from shardow.averages.tracked import Tracked
from shardow.averages.unfrozen import Unfrozen
from shardow.base.checks import invalid
from shardow.model.equal import DIFFERENT_WEIGHTS, Common, check_equal, common_of
from shardow.model.local import LocalTensor
from shardow.model.view import ModelView
from shardow.ranks.team import Team

T = TypeVar("T")


class Agreed:
    """Averages of a model that ranks share, and the checks before a collective call."""

    _view: ModelView
    _team: Team
    _options: Options
    _keys: list[str]
    _tracked: list[Tracked]
    _engine: _core.Average
    _streams: Streams
    _swap: Swap
    _unfrozen: Unfrozen

    @property
    def _average(self) -> _core.Average:
        """The engine, on torch's current streams."""
        self._streams.follow(self._engine)
        return self._engine

    def _not_swapped(self, what: str) -> None:
        """Raises where the averages are in the model."""
        self._swap.refuse(what)

    def _rebind(self) -> None:
        """A changed parameter is an error; one that is merely unsharded for a while, or whose memory moved, is not."""
        self._swap.rebind()

    def _splits(self) -> bool:
        return self._options.replicas == "split" and any(one.local.replicas for one in self._tracked)

    def _together(self, what: str, fn: Callable[[], T]) -> T:
        """fn() on every rank before the averages of all are used, or an error on all: also where some have made fewer updates."""

        def check() -> T:
            self._raise_non_finite()
            return fn()

        result = self._team.agree(what, check)
        self._agreed_state(what)
        return result

    def _raise_non_finite(self) -> None:
        """nonfinite="raise" with several ranks: one that raised alone, in update(), would leave the others waiting."""
        met = self._average.non_finite() if self._options.nonfinite == "raise" and self._team.size > 1 else None
        if met is not None:
            self._average.forget_non_finite()
            step, elements, name = met
            raise invalid(
                f"at step {step}, {elements} weights on rank {self._team.rank} were NaN or Inf, first in '{name}' (nonfinite='raise'); "
                "their averages were held"
            )

    def _ready_to_swap(self, what: str, fn: Callable[[], None]) -> None:
        """_together(), and replicas hold the same weights: they are about to overwrite each other's."""

        def find() -> list[Common | None]:
            self._raise_non_finite()
            fn()
            return [common_of(one.local) for one in self._tracked_weights()] if self._splits() else []

        check_equal(what, find, self._team, f'{DIFFERENT_WEIGHTS}. With replicas="copy" each rank averages, and swaps, its own')
        self._agreed_state(what)

    def _agreed_state(self, what: str) -> str:
        state = counters.agreed(what, self._average.state(), self._team)
        self._unfrozen.look(everywhere=True)
        return state

    def _ready_to_hand_out(
        self, what: str, others: Callable[[], Iterable[LocalTensor]] | None = None, check: Callable[[], None] = lambda: None
    ) -> str:
        """Before one rank's bytes stand for all that hold the same: raises on every rank where those differ.

        ``others``: what of the model is handed out too, wherever it lies now. Returns the state of all ranks.
        """

        def find() -> list[Common | None]:
            self._raise_non_finite()
            self._not_swapped(what)
            check()
            if others is None:
                return list(self._common())
            self._swap.refuse_foreign(what)
            self._rebind()
            weights = set(self._view.parameters)
            return [*self._common(), *(common_of(one) for one in others() if one in weights)]

        check_equal(what, find, self._team, DIFFERENT_WEIGHTS)
        return self._agreed_state(what)

    def _tracked_weights(self) -> list[Tracked]:
        """Without buffers, of which each rank has its own: batch statistics."""
        weights = set(self._view.parameters)
        return [one for one in self._tracked if one.local in weights]

    def _common(self) -> Iterator[Common | None]:
        """What other ranks should have too: averages, or where ranks divide them the weights that they follow."""
        for one in self._tracked_weights():
            if self._options.replicas == "split" and one.local.replicas:
                yield common_weight(one)
            else:
                for average in one.averages:
                    yield common_of(one.local, average)


def common_weight(one: Tracked) -> Common | None:
    return common_of(one.local, one.source if one.mastered else one.local.tensor)
