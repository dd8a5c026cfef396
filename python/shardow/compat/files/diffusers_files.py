"""The averages of a list of parameters as a diffusers model's directory: its class tells their names, from a copy on
meta, and writes its own config; the tensors go through shardow's files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardow import errors
from shardow.base.checks import invalid
from shardow.distributed.rank_group import RankGroup, Step, equal_facts
from shardow.files.checkpoint import save
from shardow.model.parts import group_of
from shardow.start.materialize import load
from shardow.start.meta import on_meta

_WEIGHTS = "diffusion_pytorch_model.safetensors"  # as diffusers.utils.SAFETENSORS_WEIGHTS_NAME
_INDEX = _WEIGHTS + ".index.json"
_SHARD = re.compile(r"diffusion_pytorch_model-\d{5}-of-\d{5}\.(safetensors|bin)")


def write(
    path: str | os.PathLike[str],
    model_cls: Any,
    model_config: Mapping[str, Any],
    counters: dict[str, Any],
    shadows: Sequence[torch.Tensor],
) -> None:
    """One file of weights, and config.json. Collective where there are DTensors among ``shadows``: what is whole is
    written from rank 0.
    """
    folder = Path(path)
    ranks = _ranks(shadows)

    def prepare() -> Step[tuple[Any, dict[str, torch.Tensor]]]:
        model = _on_meta(model_cls, model_config)
        state = _named(model, shadows)
        if ranks.rank == 0:
            model.register_to_config(**counters)
        facts = {"path": str(folder.absolute()), "optimization_step": counters["optimization_step"]}
        return Step((model, state), [equal_facts("save_pretrained()", facts, ranks)])

    model, state = ranks.step("save_pretrained()", prepare)
    ranks.agree("save_pretrained()", lambda: folder.mkdir(parents=True, exist_ok=True) if ranks.rank == 0 else None)
    save(state, folder / _WEIGHTS, group=ranks.process_group)

    def finish() -> None:
        if ranks.rank == 0:
            model.save_config(str(folder))
            _remove_shards(folder)

    ranks.agree("save_pretrained()", finish)


def read(
    path: str | os.PathLike[str], model_cls: Any, shadows: list[torch.Tensor] | None
) -> tuple[Mapping[str, Any], Mapping[str, Any], list[torch.Tensor]]:
    """(the file's config, the model's config, averages): new ones, or ``shadows`` filled; of DTensors collective."""
    if shadows is None:
        config = model_cls.load_config(str(path))
        model = model_cls.from_pretrained(str(path))
        return config, model.config, [p.detach() for p in model.parameters()]
    ranks = _ranks(shadows)

    def prepare() -> tuple[Mapping[str, Any], Any, list[tuple[Path, dict[str, torch.Tensor]]]]:
        config = model_cls.load_config(str(path))
        model = _on_meta(model_cls, config)
        _check(model, shadows)
        names = [name for name, _ in model.named_parameters()]
        return config, model, _sources(Path(path), dict(zip(names, shadows, strict=True)))

    config, model, sources = ranks.agree("from_pretrained()", prepare)
    for file, tensors in sources:
        report = load(tensors, file, strict=False, group=ranks.process_group)
        if report["missing"]:
            raise invalid(f"{file} has no '{report['missing'][0]}'; is it another model's?")
    return config, model.config, shadows


def _ranks(shadows: Sequence[torch.Tensor]) -> RankGroup:
    return RankGroup(group_of({str(i): t for i, t in enumerate(shadows)}, None), None)


def _on_meta(model_cls: Any, config: Mapping[str, Any]) -> Any:
    with on_meta(buffers=False):
        return model_cls.from_config(dict(config))


def _check(model: nn.Module, shadows: Sequence[torch.Tensor]) -> None:
    known = dict(model.named_parameters())
    if len(known) != len(shadows):
        raise invalid(f"a {type(model).__name__} of this config has {len(known)} parameters; {len(shadows)} averages")
    for (name, param), shadow in zip(known.items(), shadows, strict=True):
        if shadow.dim() == 1 and param.dim() > 1:
            flat = f"the average of '{name}' is a flat piece of {shadow.numel()} elements, as FSDP1 has them"
            way_out = "save state_dict() on every rank, or copy_to() the model and save that one whole, then restore()"
            raise invalid(f"{flat}, of which no {type(model).__name__} can be saved; {way_out}", RuntimeError)
        if param.shape != shadow.shape:
            there = f"{tuple(param.shape)} in a {type(model).__name__} of this config"
            raise invalid(f"'{name}' is {there}, its average {tuple(shadow.shape)}", RuntimeError)


def _named(model: nn.Module, shadows: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's state_dict() with averages in the dtypes of its parameters, under all of their names."""
    _check(model, shadows)
    by_parameter = {
        id(parameter): shadow.to(parameter.dtype) if shadow.is_floating_point() else shadow
        for parameter, shadow in zip(model.parameters(), shadows, strict=True)
    }
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    return {name: by_parameter.get(id(tensor), tensor) for name, tensor in state.items()}


def _sources(folder: Path, tensors: dict[str, torch.Tensor]) -> list[tuple[Path, dict[str, torch.Tensor]]]:
    """Which of the tensors are in which file."""
    index = folder / _INDEX
    if not index.exists():
        return [(folder / _WEIGHTS, tensors)]
    places = json.loads(index.read_text())["weight_map"]
    lost = next((name for name in tensors if name not in places), None)
    if lost is not None:
        raise invalid(f"{index} has no '{lost}'; is it another model's?")
    files = sorted({places[name] for name in tensors})
    outside = next((file for file in files if Path(file).name != file), None)
    if outside is not None:
        raise errors.make("corrupt", f"{index}: '{outside}' is no plain file name")
    return [(folder / file, {name: t for name, t in tensors.items() if places[name] == file}) for file in files]


def _remove_shards(folder: Path) -> None:
    """Of an earlier save in several files, whose index from_pretrained() would follow."""
    (folder / _INDEX).unlink(missing_ok=True)
    for file in folder.iterdir():
        if _SHARD.fullmatch(file.name):
            file.unlink()
