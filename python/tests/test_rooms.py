"""Rooms import what their docstrings say they may, and nothing in a circle.

Imports in functions and for type checkers count as any other.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import shardow

HOME = Path(shardow.__file__).parent
ROOMS = sorted(path.parent.name for path in HOME.glob("*/__init__.py"))
Edge = tuple[str, str]


@cache
def modules() -> dict[str, Path]:
    """By dotted name below shardow; "" is the package itself, a room's name its __init__."""
    return {
        str(path.relative_to(HOME).with_suffix("")).replace("/", ".").removesuffix("__init__").rstrip("."): path
        for path in HOME.rglob("*.py")
    }


def imported_by(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (one.name.partition(".")[2] for one in node.names if one.name.partition(".")[0] == "shardow")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "shardow":
            home = (node.module or "").partition(".")[2]
            inner = [f"{home}.{one.name}".lstrip(".") for one in node.names]
            yield from (one if one in modules() else home for one in inner if one not in ("_core", "Schedule"))


@cache
def edges() -> list[Edge]:
    return [(name, other) for name, path in sorted(modules().items()) for other in sorted(set(imported_by(path)))]


def room_of(module: str) -> str:
    return module.partition(".")[0]


def allowed(room: str) -> set[str]:
    says = re.search(r"May import: ([^.]*)\.", ast.get_docstring(ast.parse(modules()[room].read_text())) or "")
    assert says, f"{room}/__init__.py says what it may import"
    return {*re.findall(r"\w+", says[1])} - {"nothing"}


def circle(links: list[Edge]) -> list[str]:
    """What lies on a circle, or between two: nothing where all can be put in an order."""
    left = {one for link in links for one in link}
    while ends := {
        one
        for side in (0, 1)
        for one in left
        if not any(a in left and b in left and (a, b)[side] == one for a, b in links if a != b)
    }:
        left -= ends
    return sorted(left)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_it_says(room: str) -> None:
    against = [
        f"{a} imports {b}" for a, b in edges() if room_of(a) == room and room_of(b) not in {room, *allowed(room)}
    ]
    assert against == []


def test_rooms_are_in_an_order() -> None:
    assert circle([(room, other) for room in ROOMS for other in allowed(room)]) == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert circle([(a, b) for a, b in edges() if a]) == []
