"""States of optimizers as parts of global tensors, under the names of the parameters that they belong to, at any
sharding.

Names and values are those of torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(). It is not called: an
optimizer without state would take a step there, with gradients of zero, which EMA.attach() and step counters would see;
and under FSDP1 it gathers.

A tensor of a state is one of three, which its mark in the tree says:

* "$part": sharded as its parameter is, of that shape; where that is a DTensor, one too
* "$local": the same, but a plain tensor of the shape of the DTensor's local one
* "$tensor": whole, and the same on every rank: a number of steps

An optimizer that goes on from a checkpoint gets memory for its states, which the file engine fills, and takes them in.
No step is taken for it, so no hook runs and no counter moves; memory that a state has already is used again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from shardow import _core
from shardow.base import plain
from shardow.base.checks import invalid, unsupported
from shardow.distributed.gather import LocalShard
from shardow.distributed.transfers import empty
from shardow.sharding.dtensor import region_of, sharded_like
from shardow.sharding.dtypes import dtype_of
from shardow.sharding.equal import Common, common_of
from shardow.sharding.local import LocalTensor
from shardow.sharding.local_state import flat_of
from shardow.sharding.view import ModelView

Tree = dict[str, Any]


@dataclass
class Tensors:
    """What goes to files beside a tree: ``common`` are those of which one rank's stand for all."""

    parts: list[LocalShard] = field(default_factory=list)
    common: list[Common] = field(default_factory=list)

    def whole(self, where: str, value: Any) -> Tree:
        """As plain.encode() asks: a tensor that every rank holds."""
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
            return plain.refuse(where, value)
        region = _core.Region.whole(list(value.shape))
        tensor = value.detach().clone(memory_format=torch.contiguous_format)
        self.parts.append(LocalShard(where, tensor.view(-1), region))
        self.common.append(Common(where, tensor, region, where))  # where: not all ranks have the same ones, under FSDP1
        return {"$tensor": where}


def tree_of(optimizer: torch.optim.Optimizer, view: ModelView, where: str, tensors: Tensors) -> Tree:
    """{"groups": [{"params": [name], option: value}], "state": {name: {key: value}}}; what is no plain value goes to
    ``tensors``. Local.
    """
    native = optimizer.state_dict()
    params = parameters(optimizer, view)
    groups = []
    for i, (group, own) in enumerate(zip(native["param_groups"], optimizer.param_groups, strict=True)):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        names = [local.name for p in own["params"] for local in params[id(p)]]
        groups.append({"params": names, **plain.encode(options, f"{where}groups.{i}", tensors.whole)})
    order = [p for group in optimizer.param_groups for p in group["params"]]
    state: Tree = {}
    for index, values in native["state"].items():
        if not isinstance(index, int):
            raise unsupported(f"the optimizer keeps {index!r} beside its parameters' states; only those are written")
        for local in params[id(order[index])]:
            put = partial(_put, order[index], local, tensors)
            state[local.name] = plain.encode(values, f"{where}state.{local.name}", put)
    return {"groups": groups, "state": state}


def parameters(optimizer: torch.optim.Optimizer, view: ModelView) -> dict[int, list[LocalTensor]]:
    found = view.by_parameter()
    for number, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if id(p) not in found:
                raise invalid(
                    f"optimizer group {number}: parameter {i} of shape {tuple(p.shape)} is not in the model, so it "
                    "has no name; give the "
                    "model that the optimizer steps, and make the optimizer after the model was sharded"
                )
    return found


def _put(param: torch.Tensor, local: LocalTensor, tensors: Tensors, where: str, value: Any) -> Tree:
    """As plain.encode() asks: a state's tensor of one parameter."""
    if not isinstance(value, torch.Tensor):
        return plain.refuse(where, value)
    mark, flat = _held(param, local, where, value)
    if flat is None:
        return tensors.whole(where, value)
    tensors.parts.append(LocalShard(where, flat, local.region))
    if (common := common_of(local, flat)) is not None:
        tensors.common.append(replace(common, name=where))
    return {mark: where}


def _held(param: torch.Tensor, local: LocalTensor, where: str, value: torch.Tensor) -> tuple[str, torch.Tensor | None]:
    if isinstance(value, DTensor):
        if value.shape != param.shape or region_of(where, value) != local.region:
            raise unsupported(
                f"'{where}' is a DTensor of shape {tuple(value.shape)}, sharded otherwise than its parameter; not "
                "written"
            )
        return "$part", flat_of(value._local_tensor.detach(), [])
    if local.hidden and value.dim() and value.shape == param.shape:
        return "$part", flat_of(value.detach(), [])[local.within]
    if isinstance(param, DTensor):
        same = value.dim() and value.shape == param._local_tensor.shape
        return ("$local", flat_of(value.detach(), [])) if same else ("$tensor", None)
    if local.hidden and value.dim():
        raise unsupported(f"'{where}' has shape {tuple(value.shape)}, and other ranks' part is not known; not written")
    return ("$part", flat_of(value.detach(), [])) if value.shape == param.shape else ("$tensor", None)


class Wanted:
    """Memory for a file's tensors: ``parts`` are to be read."""

    def __init__(self, file: _core.Checkpoint, where: str) -> None:
        self.parts: list[LocalShard] = []
        self._there, self._where = file.tensors, where

    def form(self, name: str) -> tuple[list[int], torch.dtype]:
        if name not in self._there:
            raise invalid(f"{self._where}: '{name}' is missing")
        dtype, shape = self._there[name]
        return list(shape), dtype_of(name, dtype)

    def read(self, name: str, memory: torch.Tensor, region: _core.Region) -> None:
        self.parts.append(LocalShard(name, memory.view(-1), region))

    def whole(self, mark: Tree) -> torch.Tensor:
        """As plain.decode() asks."""
        if "$tensor" not in mark:
            raise invalid(f"{self._where}: {next(iter(mark))} is nothing that is here")
        shape, dtype = self.form(mark["$tensor"])
        tensor = empty(shape, dtype)
        self.read(mark["$tensor"], tensor, _core.Region.whole(shape))
        return tensor


class Resumed:
    """An optimizer that takes in a tree. Making it changes nothing, and raises ValueError where the optimizer steps
    other parameters.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, view: ModelView, tree: Tree, file: _core.Checkpoint, prefix: str
    ) -> None:
        self.wanted = Wanted(file, prefix.rstrip("."))
        self._optimizer, self._prefix = optimizer, prefix
        self._equal: list[tuple[str, Tree, str, Tree]] = []
        self._state: dict[int, Tree] = {}
        params = parameters(optimizer, view)
        named = [[local.name for p in group["params"] for local in params[id(p)]] for group in optimizer.param_groups]
        options = [_options_of(i, names, tree["groups"]) for i, names in enumerate(named)]
        self._groups: list[Tree] = plain.decode(options, self.wanted.whole)
        for index, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            locals_ = [one for one in params[id(p)] if one.name in tree["state"]]
            if not locals_ or (locals_[0].hidden and not p.numel()):  # of which other ranks have all
                continue
            tensor = partial(self._tensor, p, {})
            found = [(one.name, plain.decode(tree["state"][one.name], partial(tensor, one))) for one in locals_]
            self._state[index] = found[0][1]
            self._equal += [(*found[0], *one) for one in found[1:]]

    def _tensor(self, param: torch.Tensor, known: dict[str, torch.Tensor], local: LocalTensor, mark: Tree) -> Any:
        """Returns a tensor of a parameter's state, as plain.decode() asks. ``known``: those that there are, by key:
        several are read into that of a flat parameter."""
        ((kind, name),) = mark.items()
        if kind not in ("$part", "$local"):
            return self.wanted.whole(mark)
        key = name.removeprefix(f"{self._prefix}state.{local.name}.")
        if key not in known:
            known[key] = self._memory(param, key, self.wanted.form(name)[1])
        memory = known[key]
        self.wanted.read(name, memory.view(-1)[local.within], local.region)
        return sharded_like(param, memory) if isinstance(param, DTensor) and kind == "$part" else memory

    def _memory(self, param: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Returns the memory that a state has already where it will do, else new memory."""
        like, before = (
            value._local_tensor if isinstance(value, DTensor) else value
            for value in (param.detach(), self._optimizer.state.get(param, {}).get(key))
        )
        form = (like.shape, dtype, like.device)
        if isinstance(before, torch.Tensor) and (before.shape, before.dtype, before.device) == form:
            return before.detach().contiguous()
        return empty(like.shape, dtype, like.device).zero_()  # with what is padding of a flat parameter

    def check(self) -> None:
        """After reading. Raises where one flat parameter here was several, with other numbers of steps."""
        for name, one, other_name, other in self._equal:
            key = next((key for key in one if not _same(one[key], other.get(key))), None)
            if key is not None:
                raise invalid(
                    f"'{name}' and '{other_name}' are parts of one flat parameter here, and their {key!r} differed "
                    "there; wrap with use_orig_params=True"
                )

    def put(self) -> None:
        """Local."""
        groups: list[Tree] = []
        at = 0
        for options, own in zip(self._groups, self._optimizer.param_groups, strict=True):
            params = range(at, at := at + len(own["params"]))  # torch looks for each parameter in it
            groups.append({**own, **options, "params": params})
        self._optimizer.load_state_dict({"state": self._state, "param_groups": groups})
        order = [p for group in self._optimizer.param_groups for p in group["params"]]
        for index, state in self._state.items():
            param = order[index]
            now = self._optimizer.state[param]
            for key in (state.keys() & now.keys()) - {"step"}:
                now[key] = tree_map(partial(_as_it_was, param), state[key], now[key])


def _options_of(number: int, names: list[str], there: list[Tree]) -> Tree:
    """Returns those of the group there that has these parameters; one without any is found by its number."""
    found = [one for one in there if not set(names).isdisjoint(one["params"])] if names else there[number : number + 1]
    new = sorted(set(names).difference(*(one["params"] for one in found)))
    if new or len(found) > 1:
        why = f"'{new[0]}' was in none" if new else f"those with '{names[0]}' were {len(found)} groups"
        raise invalid(
            f"group {number} of the optimizer is not one of those that were saved: {why}. Make the groups as they "
            "were, or begin with new "
            'states: optimizer="skip"'
        )
    return {option: value for group in found for option, value in group.items() if option != "params"}


def _as_it_was(param: torch.Tensor, value: Any, cast: Any) -> Any:
    """Returns what torch's load_state_dict() cast to the parameter's device and to its dtype: the dtype is what it was,
    and so is a text. It lies as its parameter does: torch's fused steps want that.
    """
    if not isinstance(value, torch.Tensor):
        return value
    kept = cast if cast.dtype == value.dtype else value.to(cast.device)
    if isinstance(kept, DTensor) or kept.shape != param.shape or kept.stride() == param.stride():
        return kept
    return torch.empty_like(param.detach(), dtype=kept.dtype, device=kept.device).copy_(kept)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one is other or torch.equal(one, other)
    return bool(one == other)
