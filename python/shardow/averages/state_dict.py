"""State dicts of averages: sharded states and whole tensors, handed to other code and taken back."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, get_args

import torch

from shardow import _core
from shardow.averages import lineage
from shardow.averages import state as _state
from shardow.averages.core import Averages
from shardow.base.checks import instance, one_of, warn
from shardow.distributed.gather import Gatherer
from shardow.distributed.rank_group import Step, equal_facts
from shardow.files.reading import choose
from shardow.model.extra_state import extra_states
from shardow.model.local import oddity, refuse_all_odd

OptionsFrom = Literal["file", "own"]
#: Chooses among several averages: the decay as it was given, its key in ``decays``, or its schedule.
Decay = float | str | _core.Schedule


def make(averages: Averages) -> dict[str, Any]:
    """See EMA.state_dict()."""
    each = [averages.averages(k) for k in range(len(averages.keys))]
    record = averages.lineage.to_save(averages.engine, averages.keys)
    state = lineage.with_record(averages.engine.state(), record)
    return {"averages": each[0] if len(each) == 1 else dict(zip(averages.keys, each, strict=True)), "state": state}


@torch.no_grad()
def load(averages: Averages, state: Mapping[str, Any], strict: bool, options: OptionsFrom) -> dict[str, list[str]]:
    """See EMA.load_state_dict()."""

    def check() -> Step[tuple[list[_state.Copy], dict[str, list[str]]]]:
        averages.swap.refuse("load_state_dict()")
        text = _state.engine_state(instance("state", state, Mapping))
        taking = Taking(averages, options)
        keys = taking.keys(_core.decay_keys_in({_core.STATE_KEY: text}), "the state")
        parts = [averages.parts(k) for k in range(len(keys))]
        checked = _state.check("load_state_dict()", state, parts, keys, strict)
        taking.look(lineage.metadata_of(text), len(keys), "the state")
        begun.enter_context(taking.begun("load_state_dict()", all_counts=True))  # they are this rank's own
        facts = {"strict": bool(strict), "options": str(options)}
        return Step(checked, [equal_facts("load_state_dict()", facts, averages.ranks)])

    with contextlib.ExitStack() as begun:
        copies, report = averages.ranks.step("load_state_dict()", check)
        for copy_ in copies:
            copy_()
    return report


class Taking:
    """Averages that go on from saved ones: what one rank does in a load."""

    def __init__(self, averages: Averages, options: OptionsFrom) -> None:
        self._averages = averages
        self._from = getattr(_core.OptionsFrom, one_of("options", options, get_args(OptionsFrom)))
        self.loading = _core.Loading(averages.engine, self._from)

    def keys(self, saved: Collection[str], where: str) -> list[str]:
        """Returns, for each average, the key among ``saved`` that it is loaded from. ``where`` is for messages."""
        return _core.taken_as([*saved], self._averages.keys, self._from, where)

    def look(self, metadata: Mapping[str, str], files: int, where: str) -> None:
        """Raises for what does not fit. ``metadata``: of the first of so many files."""
        self._record, self._state = metadata.get(_core.RECORD_KEY), metadata.get(_core.STATE_KEY, "")
        lineage.check(self._record, files, where)
        self.loading.look(dict(metadata), files, where)

    @contextlib.contextmanager
    def begun(self, what: str, all_counts: bool = False) -> Iterator[None]:
        """Takes the state, of what all ranks counted together this rank's part, or ``all_counts``. Warns on rank 0 of
        options that are others now. Where the block, in which all read, raises, counters and options are what they
        were."""
        averages = self._averages
        self.loading.begin(0 if all_counts else averages.ranks.rank)
        try:
            if self.loading.changed and averages.ranks.rank == 0:
                differences = "; ".join(
                    f"{name} is {_option_text(name, saved)} there and was {_option_text(name, before)} here"
                    for name, saved, before in self.loading.changed
                )
                now = "What is there is in force now (but the dtype, which stays)"
                warn(f"{what}: {differences}. {now}; options='own' keeps what the EMA was made with")
            yield
        except BaseException:
            self.loading.give_up()
            raise
        averages.go_on_from(lineage.taken(averages.engine, self._record, self._state, averages.keys))


def _option_text(name: str, text: str) -> str:
    return _core.Schedule.from_json(text).key() if name.partition("/")[0] == "schedule" else text


def gather(averages: Averages, decay: Decay | None, complete: bool) -> dict[str, torch.Tensor]:
    """See EMA.full_state_dict()."""
    what = "full_state_dict()"

    def prepare() -> Step[dict[str, torch.Tensor]]:
        others = averages.others if complete else None
        compared = averages.handing_out(what, others, decay=decay, complete=bool(complete)).compared
        return Step(_without_elements(averages) if complete else {}, compared)

    odd = averages.ranks.step(what, prepare)
    k = choose(averages.keys, decay)
    if not complete:
        return Gatherer(what, averages.parts(k), averages.ranks).whole({})
    held = averages.held(k, complete=True)
    whole = Gatherer(what, held.parts, averages.ranks).whole(held.names)
    return {**whole, **odd, **copy.deepcopy(extra_states(averages.view.model))} if averages.ranks.rank == 0 else {}


def _without_elements(averages: Averages) -> dict[str, torch.Tensor]:
    """Returns on rank 0 copies of what has no elements in memory (sparse, quantised): such tensors can't be put
    together from parts, and no file holds them. Raises where each rank has a part of one."""
    odd = [local for local in averages.others() if oddity(local.tensor)]
    refuse_all_odd(local for local in odd if local.sharded and not local.replicas)
    first = averages.ranks.rank == 0
    return {name: local.tensor.clone() for local in odd if first for name in (local.name, *local.aliases)}
