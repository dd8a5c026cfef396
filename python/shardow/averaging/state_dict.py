"""State dicts of averages: sharded states and whole tensors, handed to other code and loaded back."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch

from shardow import _core
from shardow.averaging import history
from shardow.averaging.model_averages import ModelAverages
from shardow.base.checks import instance, invalid, one_of, warn
from shardow.distributed.gather import Gatherer, LocalShard, extract_region
from shardow.distributed.rank_group import Step, equal_facts
from shardow.files.reading import choose
from shardow.sharding.dtensor import region_of
from shardow.sharding.extra_state import extra_states
from shardow.sharding.local import oddity, refuse_all_odd
from shardow.sharding.match import Fit, compare
from shardow.sharding.partial_tensor import PartialTensor

_LOAD = "load_state_dict()"
HINT = "strict=False takes what there is"
OptionsFrom = Literal["file", "own"]
#: Chooses among several averages: the decay as it was given, its key in ``decays``, or its schedule.
Decay = float | str | _core.Schedule
Copy = Callable[[], object]  # fills a part of the averages


def make(averages: ModelAverages) -> dict[str, Any]:
    """See EMA.state_dict()."""
    dicts = [averages.averages(k) for k in range(len(averages.keys))]
    record = averages.history.to_save(averages.engine, averages.keys)
    state = history.with_record(averages.engine.state(), record)
    return {"averages": dicts[0] if len(dicts) == 1 else dict(zip(averages.keys, dicts, strict=True)), "state": state}


@torch.no_grad()
def load(averages: ModelAverages, state: Mapping[str, Any], strict: bool, options: OptionsFrom) -> dict[str, list[str]]:
    """See EMA.load_state_dict()."""

    def look() -> Step[tuple[list[Copy], dict[str, list[str]]]]:
        averages.swap.refuse(_LOAD)
        text = _engine_state(instance("state", state, Mapping))
        taking = Taking(averages, options)
        keys = taking.keys(_core.decay_keys_in({_core.STATE_KEY: text}), "the state")
        checked = _check(state, [averages.parts(k) for k in range(len(keys))], keys, strict)
        taking.look(history.metadata_of(text), len(keys), "the state")
        begun.enter_context(taking.begun(_LOAD, all_counts=True))  # a state dict has this rank's own counts
        facts = {"strict": bool(strict), "options": str(options)}
        return Step(checked, [equal_facts(_LOAD, facts, averages.ranks)])

    with contextlib.ExitStack() as begun:
        copies, report = averages.ranks.step(_LOAD, look)
        for copy_ in copies:
            copy_()
    return report


def _engine_state(state: Mapping[str, Any]) -> str:
    text = state.get("state")
    if not isinstance(text, str) or not isinstance(state.get("averages"), Mapping):
        names = ", ".join(map(repr, list(state)[:8]))
        raise invalid(f"this is no state of shardow.EMA, which has 'state' and 'averages'; it has {names}")
    return text


def _check(
    state: Mapping[str, Any], parts: Sequence[Sequence[LocalShard]], keys: Sequence[str], strict: bool
) -> tuple[list[Copy], dict[str, list[str]]]:
    """Returns the functions that copy ``state`` into ``parts``, of each average, and the names that are missing and
    unexpected. Raises with everything that does not fit, before anything is copied; unless ``strict``, names may be
    missing."""
    averages = state["averages"]
    by_key = {keys[0]: averages} if len(keys) == 1 else averages
    problems = [
        f"no averages for decay {key} (there are {', '.join(map(str, averages))})"
        for key in keys
        if not isinstance(by_key.get(key), Mapping)
    ]
    if problems:
        raise invalid(f"the state does not fit: {'; '.join(problems)}")
    shapes = {part.name: tuple(part.region.shape) for part in parts[0]}
    fits = [
        compare(shapes, {name: tuple(value.size()) if name in shapes else () for name, value in by_key[key].items()})
        for key in keys
    ]
    checked = zip(parts, keys, fits, strict=True)
    copies = [copy for own, key, fit in checked for copy in copies_of(own, by_key[key], fit)]
    joined = fits[0].joined(fits[1:])
    if not strict:
        other = [name for name, *_ in joined.different]
        joined.missing += other
        joined.unexpected += [joined.keys[name] for name in other]
        replace(joined.only_different(), different=[]).refuse(_LOAD, "the state")
    else:
        joined.refuse(_LOAD, "the state", hint=HINT)
    return copies, {"missing": joined.missing, "unexpected": joined.unexpected}


def copies_of(parts: Iterable[LocalShard], state: Mapping[str, Any], fit: Fit[Any]) -> list[Copy]:
    """Returns functions that copy into ``parts`` the values of ``state`` that fit; values need only slice like a
    tensor. A value that is another part makes an entry of ``fit.elsewhere``."""
    wrong = {name for name, *_ in fit.different}
    copies: list[Copy] = []
    for part in parts:
        if part.name not in fit.keys or part.name in wrong:
            continue
        value = state[fit.keys[part.name]]
        if isinstance(value, PartialTensor):
            region, local = value.region, value.local
        elif hasattr(value, "_local_tensor"):
            region, local = region_of(part.name, value), value._local_tensor
        else:
            copies.append(partial(extract_region, value, part.region, part.flat))
            continue
        if region == part.region:
            copies.append(partial(part.flat.copy_, local.reshape(-1)))
        else:
            fit.elsewhere.append(part.name)
    return copies


class Taking:
    """One rank's part of a load, after which its averages go on from saved ones."""

    def __init__(self, averages: ModelAverages, options: OptionsFrom) -> None:
        self._averages = averages
        self._from = getattr(_core.OptionsFrom, one_of("options", options, get_args(OptionsFrom)))
        self.loading = _core.Loading(averages.engine, self._from)

    def keys(self, saved: Collection[str], where: str) -> list[str]:
        """Returns, for each average, the key among ``saved`` that it is loaded from. ``where`` is for messages."""
        return _core.taken_as([*saved], self._averages.keys, self._from, where)

    def look(self, metadata: Mapping[str, str], files: int, where: str) -> None:
        """Raises for what does not fit. ``metadata``: that of the first of ``files`` files."""
        self._record, self._state = metadata.get(_core.RECORD_KEY), metadata.get(_core.STATE_KEY, "")
        history.check(self._record, files, where)
        self.loading.look(dict(metadata), files, where)

    @contextlib.contextmanager
    def begun(self, what: str, all_counts: bool = False) -> Iterator[None]:
        """Takes the state: of what all ranks counted together this rank's part, or all with ``all_counts``. Warns on
        rank 0 of options that have changed. Where the block, in which all ranks read, raises, counters and options
        become again what they were."""
        averages = self._averages
        self.loading.begin(0 if all_counts else averages.ranks.rank)
        try:
            if self.loading.changed and averages.ranks.rank == 0:
                differences = "; ".join(
                    f"{name} is {_option_text(name, saved)} there and was {_option_text(name, before)} here"
                    for name, saved, before in self.loading.changed
                )
                notice = "What is there is in force now (but the dtype, which stays)"
                warn(f"{what}: {differences}. {notice}; options='own' keeps what the EMA was made with")
            yield
        except BaseException:
            self.loading.give_up()
            raise
        averages.go_on_from(history.after_load(averages.engine, self._record, self._state, averages.keys))


def _option_text(name: str, text: str) -> str:
    return _core.Schedule.from_json(text).key() if name.partition("/")[0] == "schedule" else text


def gather(averages: ModelAverages, decay: Decay | None, complete: bool) -> dict[str, torch.Tensor]:
    """See EMA.full_state_dict()."""
    what = "full_state_dict()"

    def prepare() -> Step[dict[str, torch.Tensor]]:
        others = averages.others if complete else None
        compared = averages.handing_out(what, others, decay=decay, complete=bool(complete)).compared
        return Step(_without_elements(averages) if complete else {}, compared)

    odd = averages.ranks.step(what, prepare)
    held = averages.held(choose(averages.keys, decay), complete)
    whole = Gatherer(what, held.parts, averages.ranks).whole(held.names if complete else {})
    extra = copy.deepcopy(extra_states(averages.view.model)) if complete and averages.ranks.rank == 0 else {}
    return {**whole, **odd, **extra}


def _without_elements(averages: ModelAverages) -> dict[str, torch.Tensor]:
    """Returns on rank 0 copies of tensors without elements in memory (sparse, quantised): these can't be put together
    from parts, and no file holds them. Raises where each rank has a part of one."""
    odd = [local for local in averages.others() if oddity(local.tensor)]
    refuse_all_odd(local for local in odd if local.sharded and not local.replicas)
    first = averages.ranks.rank == 0
    return {name: local.tensor.clone() for local in odd if first for name in (local.name, *local.aliases)}
