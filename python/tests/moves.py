"""What happens to the memory of a model's weights: moved, cast, replaced, swapped, by the names of what does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data.clone()


def to_and_back(model: nn.Module) -> None:
    model.double()
    model.float()


def vector(model: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()).detach().clone(), model.parameters())


def assigned(model: nn.Module) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def replaced(model: nn.Module) -> None:
    linear = model.get_submodule("2")
    linear.weight = nn.Parameter(linear.weight.detach().clone())


@contextmanager
def swapping() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def swapped_tensors(model: nn.Module) -> None:
    with swapping():
        to_and_back(model)


def swapped_load(model: nn.Module) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with swapping():
        model.load_state_dict(state)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "weight.data = ...": data,
    "double(), float()": to_and_back,
    "vector_to_parameters()": vector,
    "share_memory()": lambda model: model.share_memory(),
    "load_state_dict(assign=True)": assigned,
    "a new Parameter": replaced,
    "to(bfloat16)": lambda model: model.to(torch.bfloat16),
    "swap_tensors(), double() and float()": swapped_tensors,
    "swap_tensors(), load_state_dict()": swapped_load,
}
