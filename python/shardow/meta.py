"""meta_init(), materialize(): a model is built without memory, sharded, and then each rank gives its own shards memory and values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardow import _fill, _origins
from shardow._held import Held, held_by
from shardow._options import invalid, seconds
from shardow._team import Team
from shardow.torch.names import walk

Init = Callable[[nn.Module], object]
Source = str | Path | Mapping[str, torch.Tensor] | Init | None


@contextlib.contextmanager
def meta_init() -> Iterator[None]:
    """Modules made under it have their parameters and persistent buffers on meta: shapes and dtypes, no memory. Other buffers (rotary tables and the like) get their values, since nothing
    could bring them back.

    It changes torch.nn.Module for the time being, for all threads. An optimizer made from such parameters is bound anew by ``materialize(..., optimizer=)``.
    """
    register_parameter, register_buffer = nn.Module.register_parameter, nn.Module.register_buffer

    def parameter_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register_parameter(module, name, param)
        if param is None:
            return
        if not param.is_meta:
            kept = {key: value for key, value in vars(param).items() if not key.startswith("_")}
            moved = type(param)(param.detach().to("meta"), requires_grad=param.requires_grad)
            vars(moved).update(kept)
            module._parameters[name] = moved
        _origins.remember(module, name)

    def buffer_on_meta(module: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        register_buffer(module, name, tensor, persistent)
        if tensor is not None and persistent:
            module._buffers[name] = tensor.to("meta")

    module_class: Any = nn.Module
    module_class.register_parameter, module_class.register_buffer = parameter_on_meta, buffer_on_meta
    try:
        yield
    finally:
        module_class.register_parameter, module_class.register_buffer = register_parameter, register_buffer


@torch.no_grad()
def materialize(
    model: nn.Module,
    source: Source = None,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | None = None,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    progress: Callable[[int, int], None] | None = None,
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
) -> dict[str, Any]:
    """Gives what is on meta memory, and every parameter and persistent buffer its value. Collective over the ranks that share the model; no rank holds more than its own shards and, of a
    source in memory, a block of 16 MiB.

    Args:
        model: plain, DDP, FSDP1, FSDP2, HSDP or TP; shard it first, on meta.
        source: a .safetensors file or a Hugging Face directory, of which each rank reads its own bytes; a mapping of full tensors, on every rank, or on rank 0 with None on the others, which
            get their own slices from it; or a function that initialises one module, by default its ``reset_parameters()``.
        optimizer: one that was made from the model's parameters before they were sharded or had memory: its groups, their options and its state are kept, its parameters become the model's.
        device: of what is on meta; by default the mesh's, else the CPU.
        strict: every tensor of the model and of the source has its counterpart.
        dtype: of floating parameters that are on meta; by default their own. Values are cast.
        progress: of reading a file, as in load().
        seed: of an initialisation; modules are initialised whole, one after another, in the order of named_modules(), on the CPU: the values are the same at any world size.
        group: as in EMA: the ranks that share a plain model.
        timeout: seconds or timedelta.

    Returns:
        {"missing": [...], "unexpected": [...]} and more, as load().

    Raises:
        as load(). The model is on meta again then, and the optimizer as it was.
    """
    bindings = None if optimizer is None else _origins.bindings(optimizer, model)
    given = _give_memory(model, device, dtype)
    try:
        held = held_by(model, group, saving=False)
        team = Team(held.process_group, seconds(timeout))
        kinds = [kind.decode() for kind in team.gather("materialize()", _kind(source).encode())]
        report = _filled(model, held, source, kinds, team, _fill.Options(strict, progress, seed, group, timeout))
        held.put_back()
    except BaseException:
        _take_memory(model, given)
        raise
    tie = getattr(model, "tie_weights", None)
    if callable(tie):
        tie()
    if optimizer is not None and bindings is not None:
        _origins.bind(optimizer, bindings)
    return report


def _kind(source: object) -> str:
    if source is None:
        return "nothing"
    if isinstance(source, (str, Path)):
        return f"the file {source}"
    if isinstance(source, Mapping):
        return "a mapping"
    if callable(source):
        return "a function"
    raise invalid(f"source is a {type(source).__name__}; give a path, a mapping of tensors or a function of a module")


def _filled(model: nn.Module, held: Held, source: Any, kinds: list[str], team: Team, options: _fill.Options) -> dict[str, Any]:
    if set(kinds) <= {"nothing", "a function"} and len(set(kinds)) == 1:
        return _fill.by_init(held, model, source, team, options)
    if len(set(kinds)) == 1 and kinds[0].startswith("the file"):
        return _fill.from_file(model, source, options)
    if set(kinds) == {"a mapping"}:
        return _fill.from_own_mapping(held, source, team, options)
    if kinds[0] == "a mapping" and set(kinds[1:]) == {"nothing"}:
        return _fill.from_first_rank(held, source, team, options)
    raise invalid(
        f"materialize(): ranks have different sources: {', '.join(kinds)}; the same on all, or a mapping on rank 0 and None elsewhere"
    )


Places = dict[int, list[tuple[nn.Module, str, str]]]  # of one tensor: (module, "_parameters" or "_buffers", key)


def _places(model: nn.Module) -> Places:
    places: Places = {}
    for _, module in walk(model):
        for kind in ("_parameters", "_buffers"):
            for key, tensor in getattr(module, kind).items():
                if tensor is not None and (module, kind, key) not in places.setdefault(id(tensor), []):
                    places[id(tensor)].append((module, kind, key))
    return places


def _give_memory(model: nn.Module, device: torch.device | str | None, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Unset values for what is on meta; what was one tensor stays one. Returns what has memory now."""
    places = _places(model)
    meta = {key: where for key, where in places.items() if getattr(where[0][0], where[0][1])[where[0][2]].is_meta}
    unset = [
        key for where in meta.values() for module, kind, key in where if kind == "_buffers" and key in module._non_persistent_buffers_set
    ]
    if unset:
        raise invalid(
            f"buffers that no file has are on meta, without values: {', '.join(sorted(set(unset)))}; build the model under shardow.meta_init()"
        )

    def give(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        mesh = getattr(tensor, "device_mesh", None)
        where = device or (mesh.device_type if mesh is not None else "cpu")
        return torch.empty_like(tensor, device=where, dtype=dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)

    model._apply(give)
    given = []
    for where in meta.values():
        module, kind, key = where[0]
        one = getattr(module, kind)[key]
        given.append(one)
        for module, kind, key in where[1:]:
            getattr(module, kind)[key] = one
    return given


def _take_memory(model: nn.Module, given: list[torch.Tensor]) -> None:
    """After a failure: what had no memory has none again."""
    places, ours = _places(model), {id(tensor) for tensor in given}
    model._apply(lambda tensor: tensor.to("meta") if id(tensor) in ours else tensor)
    for key, where in places.items():
        if key in ours:
            module, kind, name = where[0]
            for other, other_kind, other_name in where[1:]:
                getattr(other, other_kind)[other_name] = getattr(module, kind)[name]


__all__ = ["materialize", "meta_init"]
