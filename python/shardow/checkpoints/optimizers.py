"""States of optimizers as parts of global tensors, under the names of the parameters that they belong to, at any
sharding.

Names and values are those of torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(). It is not called: an
optimizer without state would take a step there, with gradients of zero, which EMA.attach() and step counters would see;
and under FSDP1 it gathers.

A tensor of a state is one of three, which its mark in the tree says:

* "$part": sharded as its parameter is, of that shape; where that is a DTensor, one too
* "$local": the same, but a plain tensor of the shape of the DTensor's local one
* "$tensor": whole, and the same on every rank: a number of steps
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardow import _core
from shardow.base import plain
from shardow.base.checks import invalid, unsupported
from shardow.distributed.gather import Part
from shardow.model.dtensor import region_of
from shardow.model.equal import Common, common_of
from shardow.model.fsdp1 import FlatTensor
from shardow.model.local import LocalTensor
from shardow.model.parts import flat_of
from shardow.model.view import ModelView

Tree = dict[str, Any]


@dataclass
class Tensors:
    """What goes to files beside a tree: ``common`` are those of which one rank's stand for all."""

    parts: list[Part] = field(default_factory=list)
    common: list[Common] = field(default_factory=list)

    def whole(self, where: str, value: Any) -> Tree:
        """As plain.encode() asks: a tensor that every rank holds."""
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
            return plain.refuse(where, value)
        region = _core.Region.whole(list(value.shape))
        tensor = value.detach().clone(memory_format=torch.contiguous_format)
        self.parts.append(Part(where, tensor.view(-1), region))
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
            put = functools.partial(_put, order[index], local, tensors)
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
    tensors.parts.append(Part(where, flat, local.region))
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
    if isinstance(local, FlatTensor) and value.dim() and value.shape == param.shape:
        return "$part", flat_of(value.detach(), [])[stretch(param, local)]
    if isinstance(param, DTensor):
        same = value.dim() and value.shape == param._local_tensor.shape
        return ("$local", flat_of(value.detach(), [])) if same else ("$tensor", None)
    if isinstance(local, FlatTensor) and value.dim():
        raise unsupported(f"'{where}' has shape {tuple(value.shape)}, and other ranks' part is not known; not written")
    return ("$part", flat_of(value.detach(), [])) if value.shape == param.shape else ("$tensor", None)


def stretch(param: torch.Tensor, local: FlatTensor) -> slice:
    """Of the memory that ``param`` shows: its own, or the flat parameter's."""
    begin = local.offset if param is local.handle.flat_param else 0
    return slice(begin, begin + local.region.size)
