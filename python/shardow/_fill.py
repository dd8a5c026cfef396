"""Values for a model whose shards have memory: from a file, from tensors in memory, or from an initialisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardow import _core, checkpoint
from shardow._gather import Part, blocks, take, windows
from shardow._held import Held
from shardow._options import invalid
from shardow._team import Team
from shardow.torch.names import join, walk


@dataclass(frozen=True)
class Options:
    strict: bool
    progress: Callable[[int, int], None] | None
    seed: int
    group: dist.ProcessGroup | None
    timeout: float | timedelta | None


def from_file(model: nn.Module, path: str | Path, options: Options) -> dict[str, Any]:
    return checkpoint.load(model, path, strict=options.strict, progress=options.progress, group=options.group, timeout=options.timeout)


def from_own_mapping(held: Held, state: Mapping[str, torch.Tensor], team: Team, options: Options) -> dict[str, Any]:
    """Every rank takes its slices of what it has."""
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    keys, report = team.agree("materialize()", lambda: _compared(held, shapes, options.strict))
    for part in held.parts:
        if part.name in keys:
            take(_whole(state[keys[part.name]]), part.region, part.flat)
    return report


def from_first_rank(held: Held, state: Mapping[str, torch.Tensor] | None, team: Team, options: Options) -> dict[str, Any]:
    """Rank 0 sends every rank its slices, in the rank's dtype, in blocks, and nothing else."""
    pg = team.process_group
    assert pg is not None
    shapes: list[Any] = [{name: tuple(tensor.shape) for name, tensor in state.items()} if state is not None else None]
    dist.broadcast_object_list(shapes, group_src=0, group=pg)
    keys, report = team.agree("materialize()", lambda: _compared(held, shapes[0], options.strict))
    wanted = [(part.name, part.region.encode(), part.flat.dtype) for part in held.parts if part.name in keys]
    everybody: list[Any] | None = [None] * team.size if team.rank == 0 else None
    dist.gather_object(wanted, everybody, group_dst=0, group=pg)
    parts = [part for part in held.parts if part.name in keys]
    for i, part in enumerate(parts):
        if everybody is None or state is None:
            for block in blocks(part.region, part.flat):
                dist.recv(block, group_src=0, group=pg)
            continue
        full = _whole(state[keys[part.name]])
        take(full, part.region, part.flat)
        for rank in range(1, team.size):
            name, region, dtype = everybody[rank][i]
            assert name == part.name
            for window in windows(_core.Region.decode(region), dtype.itemsize):
                block = torch.empty(window.size, dtype=dtype)
                take(full, window, block)
                dist.send(block.to(part.flat.device), group_dst=rank, group=pg)
    return report


def by_init(held: Held, model: nn.Module, init: Callable[[nn.Module], object] | None, team: Team, options: Options) -> dict[str, Any]:
    """Module by module, whole, on the CPU; each rank keeps its slices. One random stream for all, from the seed."""
    parts = {part.name: part for part in held.parts}
    modules = team.agree("materialize()", lambda: _initialised(model, parts, init is None))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        for name, module in modules:
            _init_one(name, module, parts, init or (lambda one: one.reset_parameters()))  # type: ignore[operator]
    return {"missing": [], "unexpected": []}


def _initialised(model: nn.Module, parts: dict[str, Part], by_reset: bool) -> list[tuple[str, nn.Module]]:
    """Modules with tensors of their own, each once."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, module in walk(model):
        if any(join(name, key) in parts for key in [*module._parameters, *module._buffers]):
            found.setdefault(id(module), (name, module))
    lacking = [
        f"{name or 'the model'} ({type(module).__name__})" for name, module in found.values() if not hasattr(module, "reset_parameters")
    ]
    if by_reset and lacking:
        raise invalid(
            f"materialize(): no reset_parameters() in {', '.join(lacking[:8])}; give a function that initialises a module as source"
        )
    return list(found.values())


def _init_one(name: str, module: nn.Module, parts: dict[str, Part], init: Callable[[nn.Module], object]) -> None:
    own: list[tuple[dict[str, Any], str, Any]] = []
    try:
        kinds: tuple[dict[str, Any], dict[str, Any]] = (module._parameters, module._buffers)
        for tensors in kinds:
            for key, tensor in list(tensors.items()):
                if tensor is None or (tensors is module._buffers and key in module._non_persistent_buffers_set):
                    continue
                own.append((tensors, key, tensor))
                whole = torch.empty(tuple(tensor.shape), dtype=tensor.dtype)
                tensors[key] = nn.Parameter(whole, requires_grad=tensor.requires_grad) if tensors is module._parameters else whole
        init(module)
        for tensors, key, _ in own:
            part = parts.get(join(name, key))  # a further name of a tied tensor has none
            if part is not None:
                take(tensors[key].detach(), part.region, part.flat)
    finally:
        for tensors, key, tensor in own:
            tensors[key] = tensor


def _compared(held: Held, shapes: Mapping[str, tuple[int, ...]], strict: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """({name here: key there}, report); raises with everything that does not fit."""
    keys = {name: key for name, key in checkpoint.matched(held, list(shapes)).items() if key in shapes}
    known = {alias for names in held.names.values() for alias in names}
    missing = [part.name for part in held.parts if part.name not in keys]
    unexpected = [key for key in shapes if key not in keys.values() and key not in known]
    wrong = [
        f"'{part.name}' has shape {list(shapes[keys[part.name]])} in the source and {list(part.region.shape)} here"
        for part in held.parts
        if part.name in keys and list(shapes[keys[part.name]]) != list(part.region.shape)
    ]
    if strict and missing:
        wrong.append(f"missing in the source: {', '.join(missing[:20])}")
    if strict and unexpected:
        wrong.append(f"unexpected in the source: {', '.join(unexpected[:20])}")
    if wrong:
        raise invalid(f"materialize(): the source does not fit: {'; '.join(wrong)}")
    return keys, {"missing": missing, "unexpected": unexpected}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if hasattr(tensor, "device_mesh"):
        raise invalid("the source's tensors must be full ones; it has DTensors")
    return tensor.detach()
