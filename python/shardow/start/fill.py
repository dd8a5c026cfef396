"""Values for a model whose shards have memory: from a file, from tensors on every rank, or from rank 0's. Each fills
what it can, and reports as load() does."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from shardow import _core
from shardow.base.checks import first_of, invalid
from shardow.base.progress import Progress, shown
from shardow.distributed.gather import LocalShard, extract_region
from shardow.distributed.rank_group import Comparison, RankGroup, Step
from shardow.distributed.store_group import store_group
from shardow.distributed.stream import Client, Fill, Server, Want, behind
from shardow.files import engine, paths
from shardow.files.paths import StrPath
from shardow.merging.face import Merged, Opened
from shardow.sharding.extra_state import FromFile, extra_in
from shardow.sharding.local_state import LocalState, values_in_file
from shardow.sharding.match import Fit, Form, compare, fit, matched, refuse_untied, unexpected
from shardow.sharding.saved_form import saved_form

State = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Job:
    """``what`` is asked, for messages. ``wanted``: names that have no values, or all where all have some; ``without``:
    those of them that have none, and ``essential``: that can't be left so. What else there is keeps its values where
    the source has none.
    """

    what: str
    held: LocalState
    ranks: RankGroup
    wanted: Collection[str]
    essential: Collection[str]
    strict: bool
    without: Collection[str] = ()


class Choice:
    """Tensors that a job takes of a source: ``parts`` are read, and must be all if ``strict``; and the ``report``."""

    def __init__(self, job: Job, source: _core.Checkpoint | Opened, where: str) -> None:
        """Raises for what does not fit, but for what the engine lists, which knows one name of each tensor."""
        held, owners, keys = _matched(job, source.tensors, where)
        named = [(part, owners.get(part.name, [part.name])) for part in held.parts]
        absent = {owner for part, names in named if part.name not in keys for owner in names}
        lacking = dict.fromkeys(name for name in job.wanted if name in absent)
        if not job.strict:
            _refuse_lacking(job, lacking)
        refuse_untied(held, keys, source.tensors, partial(engine.read_part, source.read))
        extra = FromFile(job.held.extra, source)
        _refuse_other_extra(job, extra.values, extra.unexpected)
        saved = values_in_file(source.metadata)
        if job.strict:
            compared = compare(dict.fromkeys(job.held.values), dict.fromkeys(saved))
            compared.refuse(f"{where}: plain values", "the file", hint="strict=False takes the rest")
        plain = {name: saved[name] for name in job.held.values if name in saved}
        surplus = unexpected(held, keys, [key for key in source.tensors if key not in extra.keys])
        parts = [
            LocalShard(keys.get(part.name, part.name), part.flat, part.region)
            for part, names in named
            # The engine lists what is lacking, which is asked for.
            if (absent.isdisjoint(names) if part.name in keys else not lacking.keys().isdisjoint(names))
        ]
        self.parts, self.strict = [*parts, *extra.parts], job.strict and bool(lacking or surplus)
        kept = [part.name for part in job.held.parts if part.name in absent and part.name not in lacking]
        report = {"missing": [*lacking], "unexpected": [*surplus, *extra.unexpected], "kept": kept}
        self.report = _with_others(job, {**extra.values, **plain}, report)


def from_merged(job: Job, source: Merged, **options: Any) -> dict[str, Any]:
    """Each rank reads its own bytes of the inputs. Raises where something does not fit, and changes nothing then."""
    choices: list[Choice] = []
    opened = Opened(source, "load()", job.ranks, then=lambda opened: choices.append(Choice(job, opened, str(source))))
    choice = choices[-1]
    report = engine.read_merged(choice.parts, opened.inputs, job.ranks, strict=choice.strict, **options)
    return {**report, **choice.report, "metadata": {**opened.metadata, **report["metadata"]}}


class FileLoad(engine.Load):
    """A load of a checkpoint; each rank reads its own bytes."""

    def __init__(
        self, path: StrPath, look_at: Callable[[], Step[Job]], finish: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        """``look_at()``: in the first round, ``finish(report)`` in the last; both may raise on one rank for all."""
        self._path, self._look_at, self._finish = path, look_at, finish

    def look(self) -> Sequence[Comparison]:
        paths.to_read(self._path)
        step = self._look_at()
        self._job = step.value
        return step.compared

    def find(self) -> tuple[str, list[str], bytes]:
        return paths.to_read(self._path), [], b""

    def wanted(self, _: bytes, files: list[_core.Checkpoint]) -> list[tuple[list[LocalShard], bool]]:
        self._choice = Choice(self._job, files[0], str(self._path))
        return [(self._choice.parts, self._choice.strict)]

    def has_read(self) -> None:
        self._job.held.put_back()
        if self._finish is not None:
            self._finish(self._choice.report)

    def fill(self, ranks: RankGroup, what: str = "load()", check_only: bool = False, **options: Any) -> dict[str, Any]:
        """Returns the report in the names here. ``check_only``: reads nothing, and finishes nothing. Collective."""
        with engine.several_said(self._path):
            (report,) = self.run(self._path, ranks, what, check_only=check_only, **options)
        return {**report, **self._choice.report}


def _matched(
    job: Job, available: Collection[str], where: str
) -> tuple[LocalState, dict[str, list[str]], dict[str, str]]:
    """Returns (held, owners, keys of ``held``): what the job holds, or the same as save_pretrained() writes it where
    more of the file is called so; then ``owners`` has the names here of each.
    """
    keys = matched(job.held, available, where)
    if len(keys) < len(job.held.names) or len(set(keys.values())) < len(available):
        form = saved_form(job.held.view)
        if form is not None and len(form.owners.keys() & set(available)) > len(keys):
            held = replace(job.held, parts=form.parts(job.held.parts), names={key: (key,) for key in form.owners})
            return held, form.owners, matched(held, available, where)
    return job.held, {}, keys


def from_mapping(job: Job, state: State | None, by_first: bool, progress: Progress | None) -> dict[str, Any]:
    """Every rank takes its slices of what it has, when all have what fits; ``by_first``: rank 0 alone has it, and sends
    every rank its slices, and nothing else. Raises with everything that does not fit; if not strict only with what
    can't be cast or has another shape."""
    ranks, tensors = job.ranks, state or {}
    sent = pickle.loads(ranks.on_first(job.what, lambda: pickle.dumps(_forms(job, tensors)))) if by_first else None

    def compared() -> tuple[dict[str, Any], dict[str, Any], list[Fill]]:
        forms, extra = sent or _forms(job, tensors)
        _refuse_other_extra(job, extra)
        fits = fit(job.held, forms, "the source")
        missing = [name for name in fits.missing if name in job.wanted]
        checked = replace(fits, missing=missing)
        (checked if job.strict else checked.only_different()).refuse(job.what, "the source")
        _refuse_lacking(job, missing)
        whole = [part._replace(region=_core.Region.whole(part.region.shape)) for part in job.held.parts]
        held, keys = replace(job.held, parts=whole), fits.keys
        refuse_untied(held, keys, tensors, lambda p: extract_region(tensors[p.name].detach(), p.region, p.flat))
        kept = [name for name in fits.missing if name not in job.wanted]
        report = {"missing": missing, "unexpected": fits.unexpected, "kept": kept}
        found = [(part, keys[part.name]) for part in job.held.parts if part.name in keys]
        narrower = [min(part.flat.dtype, forms[key].dtype, key=lambda dtype: dtype.itemsize) for part, key in found]
        each = zip(found, narrower, strict=True)
        return extra, report, [Fill(part, Want(key, part.region.encode(), dtype)) for (part, key), dtype in each]

    extra, report, fills = ranks.agree(job.what, compared)

    def copy() -> None:
        for fill in fills:
            extract_region(tensors[fill.want.key].detach(), fill.part.region, fill.part.flat)

    move = _sending(job, tensors, fills, progress) if by_first else copy
    ranks.agree(job.what, move, behind=behind(ranks.timeout))
    return _with_others(job, extra, report)


def _sending(job: Job, state: State, fills: list[Fill], progress: Progress | None) -> Callable[[], None]:
    """Returns what brings rank 0's tensors to all ranks. Collective."""
    ranks = job.ranks
    own = pickle.dumps([fill.want for fill in fills])
    wants = ranks.decide_each(job.what, own, lambda by_rank: [pickle.dumps(by_rank), *[b""] * (ranks.size - 1)])
    device = next((fill.part.flat.device for fill in fills), torch.device("cpu"))
    assert ranks.process_group is not None
    tag = store_group(ranks.process_group).next_tag()

    def send() -> None:
        if ranks.rank == 0:
            all_wants = [pickle.loads(each) for each in pickle.loads(wants)]
            Server(ranks, device, tag).run(state, fills, all_wants, shown(progress, "materialize", ranks.rank))
        else:
            Client(ranks, device, tag).run(fills)

    return send


def _refuse_other_extra(job: Job, found: Collection[str], unexpected: Collection[str] = ()) -> None:
    """Strict: as torch is about extra states, where all is asked for."""
    missing = [] if job.without else [name for name in job.held.extra if name not in found]
    if job.strict:
        extra: Fit[None] = Fit({}, missing, list(unexpected), [])
        extra.refuse(job.what, "the source", hint="strict=False takes the rest")


def _with_others(job: Job, values: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """Returns the report with what is no tensor, of which put_back() sets ``values``."""
    job.held.filled = values
    key = "kept" if job.without else "missing"
    lacking = (name for name in (*job.held.values, *job.held.extra) if name not in values)
    return {**report, key: [*report[key], *lacking]}


def _forms(job: Job, state: State) -> tuple[dict[str, Form], dict[str, Any]]:
    """Returns the forms of a mapping's tensors, and extra states."""
    extra = extra_in(state, job.held.extra)
    forms: dict[str, Form] = {}
    for name in state:
        if name in extra:
            continue
        tensor = state[name]
        if not isinstance(tensor, torch.Tensor) or hasattr(tensor, "__create_chunk_list__"):
            raise invalid(f"the source's '{name}' is a {type(tensor).__name__}; give the tensors of full_state_dict()")
        if tensor.is_meta:
            raise invalid(f"the source's '{name}' is on meta, without values")
        forms[name] = Form(tuple(tensor.shape), tensor.dtype)
    return forms, {name: state[key] for key, name in extra.items()}


def _refuse_lacking(job: Job, lacking: Collection[str]) -> None:
    without = [name for name in lacking if name in job.essential]
    if without:
        why = "they have memory without values since FSDP1 wrapped them, and can't be left so"
        raise invalid(f"{job.what}: missing in the source: {first_of(without)}; {why}")
