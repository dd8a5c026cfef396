"""Each tensor that Shardow makes says where: else it lies wherever torch.set_default_device() sends it."""

from __future__ import annotations

import ast
from pathlib import Path

from torch.utils._device import _device_constructors

import shardow

FACTORIES = {made.__name__ for made in _device_constructors()}


def test_every_tensor_names_its_device() -> None:
    home = Path(shardow.__file__).parent
    without = [
        f"{path.relative_to(home)}:{node.lineno}: torch.{node.func.attr}()"
        for path in sorted(home.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        if "device" not in [keyword.arg for keyword in node.keywords]
    ]
    assert without == []
