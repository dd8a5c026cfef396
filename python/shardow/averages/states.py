"""What an EMA hands to other code, and takes back: sharded states, whole tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from shardow import _core
from shardow.averages import lineage
from shardow.averages import state as _state
from shardow.averages.core import Averages
from shardow.base.checks import one_of
from shardow.base.warnings import warn
from shardow.files.decay_keys import choose
from shardow.model.extra_state import extra_states
from shardow.model.local import oddity, refuse_all_odd

OptionsFrom = Literal["file", "own"]
#: Which of several averages: the decay as it was given, its key in ``decays``, or its schedule.
Decay = float | str | _core.Schedule


class States:
    """State dicts of averages."""

    _core: Averages

    def state_dict(self) -> dict[str, Any]:
        """Sharded averages and plain values, without a copy: {"averages": {name: tensor}, "state": str}; for
        torch.distributed.checkpoint.

        Local.

        With several decays the averages are keyed by decay: {"averages": {"0.999": {...}, ...}}. The tensors are this
        EMA's own memory: what changes them changes it. What other ranks hold a part of is a Piece, whose pickling
        warns: torch.save() on rank 0 would keep rank 0's.
        """
        self._core.swap.refuse("state_dict()")
        core = self._core
        state = lineage.with_record(core.engine.state(), core.lineage, core.engine, core.keys)
        return _state.make(core.tracked, core.keys, state)

    @torch.no_grad()
    def load_state_dict(
        self, state: Mapping[str, Any], strict: bool = True, *, options: OptionsFrom = "file"
    ) -> dict[str, list[str]]:
        """Takes what state_dict() gave: pieces of the same sharding, or full tensors of the global shape. Collective.

        Everything is checked on every rank first, and everything that does not fit is listed; then averages and
        counters are replaced.

        Args:
            strict: False takes what there is: averages that the state lacks stay as they are (those of a new EMA are
                its model's weights), those that are not wanted are left out. So weights that were added or unfrozen are
                taken in by a new EMA: ``new.load_state_dict(old.state_dict(), strict=False)``.
            options: decays, rule, rounding, update_every, start_step and seed from now on: "file": the state's, with a
                warning where this EMA was made with others; "own": those that it was made with. Several averages are
                taken in the order of their decays there.

        Returns:
            {"missing": [name], "unexpected": [name]}.

        Raises:
            ValueError: what does not fit, or another number of averages.
        """

        def check() -> tuple[list[_state.Copy], dict[str, list[str]]]:
            self._core.swap.refuse("load_state_dict()")
            text = _state.engine_state(state)
            keys = self._taken_as(_core.decay_keys_in({_core.STATE_KEY: text}), options, "the state")
            found = _state.check(state, self._core.tracked, keys, strict)
            lineage.check(lineage.record_in(text), len(keys), "the state")
            self._take_options("load_state_dict()", text, options)
            return found

        with self._core.or_as_before():
            self._core.team.same("load_state_dict()", {"strict": bool(strict), "options": str(options)})
            copies, report = self._core.team.agree("load_state_dict()", check)
        for target, value, region in copies:
            _state.copy(target, value, region)
        text = _state.engine_state(state)
        self._core.go_on_from(lineage.taken(self._core.engine, lineage.record_in(text), text, self._core.keys))
        return report

    def _taken_as(self, theirs: list[str], options: OptionsFrom, where: str) -> list[str]:
        """Their key of each average here."""
        one_of("options", options, ("file", "own"))
        return _core.taken_as(theirs, self._core.keys, getattr(_core.OptionsFrom, options), where)

    def _take_options(self, what: str, text: str, options: OptionsFrom) -> None:
        """Counters of a saved state, and its options if ``options`` says so."""
        changed = self._core.engine.differences(text) if options == "file" else []
        self._core.engine.set_state(text, getattr(_core.OptionsFrom, options))
        self._go_on(what, changed)

    def _go_on(self, what: str, changed: Sequence[tuple[str, str, str]]) -> None:
        """With a state that was taken. ``changed``: (name, there, here) of each option that is another one now."""
        self._core.keys = _core.decay_keys(self._core.engine.schedules)
        if changed and self._core.team.rank == 0:
            told = "; ".join(
                f"{name} is {_said(name, there)} there and was {_said(name, here)} here"
                for name, there, here in changed
            )
            now = "What is there is in force now (but the dtype, which stays)"
            warn(f"{what}: {told}. {now}; options='own' keeps what the EMA was made with")

    def full_state_dict(self, decay: Decay | None = None, complete: bool = True) -> dict[str, torch.Tensor]:
        """The model with averaged weights on rank 0, {} elsewhere: fresh, full CPU tensors by name.

        Collective; one tensor at a time travels.

        Args:
            decay: which of several averages.
            complete: with frozen weights, buffers and every tied name, ready for load_state_dict(strict=True) of the
                unwrapped model; False: the averages alone, each once.
        """
        asked = self._core.asked(decay, complete=bool(complete))
        self._core.ready_to_hand_out("full_state_dict()", self._core.others if complete else None, asked)
        k = choose(self._core.keys, decay)
        aliases = (
            {one.name: one.aliases for one in [*self._core.view.parameters, *self._core.view.buffers]}
            if complete
            else {}
        )
        odd = self._odd("full_state_dict()") if complete else {}
        extra = extra_states(self._core.view.model) if complete and self._core.team.rank == 0 else {}
        return {**self._core.gatherer("full_state_dict()", k, complete).whole(aliases), **odd, **copy.deepcopy(extra)}

    def _odd(self, what: str) -> dict[str, torch.Tensor]:
        """On rank 0, copies of what has no elements in memory (sparse, quantised). They can't be put together from
        parts, and no file holds them. Collective."""

        def copies() -> dict[str, torch.Tensor]:
            odd = [one for one in self._core.others() if oddity(one.tensor)]
            refuse_all_odd(one for one in odd if one.sharded and not one.replicas)
            return {name: one.tensor.clone() for one in odd for name in (one.name, *one.aliases)}

        found = self._core.team.agree(what, copies)
        return found if self._core.team.rank == 0 else {}


def _said(name: str, text: str) -> str:
    return _core.Schedule.from_json(text).key() if name.partition("/")[0] == "schedule" else text
