"""Values by initialisation: module by module, whole, on the CPU, from one random stream. Each rank keeps its slices, so
that values are the same at any world size."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shardow.base.checks import invalid
from shardow.distributed.gather import LocalShard, extract_region
from shardow.distributed.rank_group import Step, equal_facts
from shardow.sharding.names import join, unwrapped, walk, wrapped_child
from shardow.sharding.storage import mapped
from shardow.start.fill import Job
from shardow.start.recorded import PATTERN, Record, records_of, without_values

Init = Callable[[nn.Module], object]
Own = dict[str, LocalShard]  # a module's parameters and persistent buffers by their keys, tied ones too


def by_init(job: Job, model: nn.Module, init: Init | None, seed: int) -> dict[str, Any]:
    """Fills what is wanted. Modules come in the order of named_modules(), once each, as in a loop over them; of a tied
    tensor the last module's values stay."""

    def fill() -> None:
        if init is None and not job.without:
            raise invalid(f"{job.what}: the model has its values already; give a source, or an initialisation")
        modules = _modules(job, model)
        ways = {} if init is not None else _own_ways(job, model, modules, seed)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            lacking = dict.fromkeys(job.without)
            for name, module, own in modules:
                for done in _init_one(name, module, own, job, init or ways[id(module)]):
                    lacking.pop(done, None)
        if lacking:
            left = ", ".join([*lacking][:20])
            raise invalid(f"{job.what}: {left} got no values; give a function that sets them as source")

    _take_drawn(job, model)
    job.ranks.agree(job.what, fill)
    kept = [part.name for part in job.held.parts if part.name not in job.wanted]
    return {"missing": [], "unexpected": [], "kept": kept}


def _take_drawn(job: Job, model: nn.Module) -> None:
    """Gives every rank the tensors that rank 0's constructors wrote; other numbers are an error. Collective."""
    written = {
        join(name, key): tree_leaves([call.arguments for call in [*record.made, *record.calls]])
        for name, module in walk(model)
        for key, record in records_of(module).items()
    }
    numbers = {name: [value for value in values if isinstance(value, (int, float))] for name, values in written.items()}
    facts = {"what constructors wrote": numbers}
    job.ranks.step(job.what, lambda: Step(None, [equal_facts(job.what, facts, job.ranks)]))
    for value in itertools.chain(*written.values()) if job.ranks.size > 1 else ():
        if isinstance(value, torch.Tensor):
            drawn = job.ranks.broadcast(_bytes(value), [value.nbytes], torch.uint8, value.device)
            value.copy_(drawn.view(value.dtype).view(value.shape))


def _modules(job: Job, model: nn.Module) -> list[tuple[str, nn.Module, Own]]:
    """Those with tensors of their own of which one is wanted."""
    known = {alias: part for part in job.held.parts for alias in job.held.names[part.name]}
    by_module: dict[str, Own] = {}
    for alias, part in known.items():
        module_name, _, key = alias.rpartition(".")
        by_module.setdefault(module_name, {})[key] = part
    found: dict[int, tuple[str, nn.Module, Own]] = {}
    for name, module in walk(model):
        own = by_module.get(name, {})
        if wrapped_child(module) is None and any(part.name in job.wanted for part in own.values()):
            found.setdefault(id(module), (name, module, own))
    return list(found.values())


def _own_ways(job: Job, model: nn.Module, modules: list[tuple[str, nn.Module, Own]], seed: int) -> dict[int, Init]:
    """By module, how it initialises itself: what meta_init() recorded of its constructor. Else ``reset_parameters()``,
    ``_reset_parameters()``, the model's ``_init_weights(module)``, or ``init_weights()``. Raises where there is none of
    these.
    """
    by_model = getattr(unwrapped(model), "_init_weights", None)
    ways: dict[int, Init] = {}
    draw = functools.partial(_draw, seed, {})
    lacking, lost = [], []
    shared: dict[int, str] = {}
    for name, module, own in modules:
        records = {key: record for key, record in records_of(module).items() if key in own}
        wanted = [key for key, part in own.items() if part.name in job.wanted]
        for key in (key for key in wanted if key in records):
            first = shared.setdefault(id(records[key]), own[key].name)
            if problem := records[key].problem or (first != own[key].name and f"it lies in the memory of '{first}'"):
                lost.append(f"'{join(name, key)}' ({problem})")
        known = all(key in records and records[key].has_values for key in wanted)
        reset = getattr(module, "reset_parameters", None) or (None if known else _resetting(module, by_model))
        was_reset = any(record.reset for record in records.values())
        if known and reset is not None and reset.__module__.startswith("torch.") and not was_reset:
            reset = None  # torch's constructors call it, but where they were given values
        if reset is None:  # what is written in part has no values, and is found out as such
            records = {key: record for key, record in records.items() if record.has_values}
        if reset is None and not records:
            lacking.append(f"{name or 'the model'} ({type(module).__name__})")
        ways[id(module)] = functools.partial(_reset_and_replay, reset=reset, records=records, draw=draw)
    if lost:
        raise invalid(f"{job.what}: not kept: {', '.join(lost[:8])}; give a function that fills a module as source")
    if lacking:
        raise invalid(
            f"{job.what}: no reset_parameters() in {', '.join(lacking[:8])}; give a function that initialises a "
            "module as source"
        )
    return ways


def _resetting(module: nn.Module, by_model: Init | None) -> Callable[[], object] | None:
    of_model = by_model and functools.partial(by_model, module)
    ways = (getattr(module, "_reset_parameters", None), of_model, getattr(module, "init_weights", None))
    return next((way for way in ways if callable(way)), None)


def _reset_and_replay(
    module: nn.Module, reset: Callable[[], object] | None, records: Mapping[str, Record], draw: Callable[..., None]
) -> None:
    tensors = {**module._parameters, **module._buffers}
    found = [(record, tensor.detach()) for key, record in records.items() if (tensor := tensors.get(key)) is not None]
    # By the constructor, which may have replaced a tensor since.
    was_reset = any(record.reset for record in records.values())
    for record, tensor in found:
        if record.reset or not was_reset:
            record.replay(tensor, record.made)
    if reset is not None:
        draw([record.twins for record, _ in found], reset)
    for record, tensor in found:
        calls = record.calls if record.reset or not was_reset else [*record.made, *record.calls]
        draw([record.twins], functools.partial(record.replay, tensor, calls))


def _draw(seed: int, numbers: dict[object, int], twins: list[object], draw: Callable[[], object]) -> None:
    """Deep copies draw the same random numbers, each time from one seed."""
    known = [twin for twin in twins if twin is not None]
    number = next((numbers[twin] for twin in known if twin in numbers), len(numbers))
    numbers.update(dict.fromkeys(known, number))
    with torch.random.fork_rng(devices=[], enabled=bool(known)):
        if known:
            torch.default_generator.manual_seed(hash((seed, number)))
        draw()


def _init_one(name: str, module: nn.Module, own: Own, job: Job, init: Init) -> list[str]:
    """Returns the names of what has values now."""
    done = []
    with _whole(module, own):
        init(module)
        for key, part in own.items():
            # The module may hold another object by now.
            value = module._buffers[key] if key in module._buffers else module._parameters.get(key)
            if part.name not in job.wanted or (value is not None and without_values(value)):
                continue  # which it computes elsewhere, as some buffers
            if value is None or tuple(value.shape) != tuple(part.region.shape):
                shapes = f"shape {None if value is None else list(value.shape)}, not {list(part.region.shape)}"
                raise invalid(f"{job.what}: the initialisation of '{join(name, key)}' left it with {shapes}")
            extract_region(value.detach(), part.region, part.flat)
            done.append(part.name)
    return done


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


@contextlib.contextmanager
def _whole(module: nn.Module, own: Own) -> Iterator[None]:
    """Inside, a module's own tensors are whole, without values, on the CPU, whatever shards or views of flat shards
    were in their place.
    """
    made: dict[str, torch.Tensor] = {}  # by the part's name: what is tied stays so
    for part in own.values():  # first, since there may be no memory for it
        if part.name not in made:
            made[part.name] = mapped(part.region.shape, part.flat.dtype)
            _bytes(made[part.name]).fill_(PATTERN)
    kept: list[tuple[Any, Any]] = [(tensors, dict(tensors)) for tensors in (module._parameters, module._buffers)]
    # FSDP1 without use_orig_params leaves such attributes.
    attributes = {key: module.__dict__.pop(key) for key in own if key in module.__dict__}
    try:
        for key, part in own.items():
            before, whole = module._parameters.get(key), made[part.name]
            if key in module._buffers:
                module._buffers[key] = whole
            else:
                floating = whole.is_floating_point() or whole.is_complex()
                module._parameters[key] = nn.Parameter(
                    whole, requires_grad=floating and (before is None or before.requires_grad)
                )
        yield
    finally:
        for tensors, were in kept:
            tensors.clear()
            tensors.update(were)
        module.__dict__.update(attributes)
