"""Modules of a model: its repeated blocks, which are sharded, checkpointed and looked at one by one; and the modes
that they are in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def is_container(module: nn.Module) -> bool:
    """A list or mapping of modules, which can't be called: torch shards none, since it brings weights together before
    forward().
    """
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Members, with parameters, of a list that has several of their class, each once. The outermost lists count."""
    found: list[nn.Module] = []
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
        found += blocks
        inside.update(id(one) for block in blocks for one in block.modules())
    return list({id(block): block for block in found}.values())


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards every module is in training or evaluation as it was."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
