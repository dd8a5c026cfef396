"""Finds a model's repeated blocks, which are sharded, checkpointed and examined one by one, and keeps its modules'
modes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def is_container(module: nn.Module) -> bool:
    """Returns whether a module is a list or mapping of modules, which can't be called: torch shards none of these,
    since it gathers weights before forward().
    """
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns each member, with parameters, of an outermost list that has several of its class, once."""
    repeated: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or id(module) in inside:
            continue
        classes = [type(child) for child in module]
        blocks = [
            child
            for child in module
            if classes.count(type(child)) > 1 and not is_container(child) and any(True for _ in child.parameters())
        ]
        repeated += blocks
        inside.update(id(child) for block in blocks for child in block.modules())
    return list({id(block): block for block in repeated}.values())


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restores on exit whether each module is in training or in evaluation."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
