"""What an origin calls a parameter: the name that named_parameters() gives it, with whatever wrappers have put into
it."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardow.base.checks import invalid
from shardow.model.names import join, layers, walk


def called(root: nn.Module) -> Callable[[str], str]:
    """The function from a clean name (shardow.model.names) to the name in ``root.named_parameters()``; for parts of
    flat ones too.
    """
    pairs = zip(walk(root), nn.Module.named_modules(root, remove_duplicate=False), strict=True)
    # The innermost of a module and its wrappers comes last, and is kept.
    prefixes = {clean: wrapped for (clean, _), (wrapped, _) in pairs}

    def name_of(clean: str) -> str:
        prefix, _, key = clean.rpartition(".")
        return join(prefixes[prefix], key)

    return name_of


def model_and_root(given: object) -> tuple[nn.Module, nn.Module]:
    """(what is averaged, what names it), of a module or of an object with ``.module``, which names them then."""
    module = getattr(given, "module", None)
    if not isinstance(given, nn.Module):
        if isinstance(module, nn.Module):
            return module, module
        raise invalid(f"{type(given).__name__} is no nn.Module, and has none as .module", AttributeError)
    if not isinstance(module, nn.Module):
        return given, given
    if any(one is module for one in layers(given)):
        return given, module
    whole = {*map(id, given.parameters())} == {*map(id, module.parameters())} and not isinstance(given, FSDPModule)
    return (module, module) if whole else (given, given)
