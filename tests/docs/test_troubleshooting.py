"""What docs/troubleshooting.md quotes is what the sources say: a message that was reworded is found here."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import shardow

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = [
    re.findall(r"`([^`]+)`", line.split(" | ")[0])
    for line in PAGE.split("## Ranks", 1)[1].splitlines()
    if line.startswith("| `")
]


def text_of(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "{}"


@cache
def messages() -> str:
    """All string literals, each whole: adjacent ones are joined, and what is put into them is left out."""
    found = []
    for path in (ROOT / "python" / "shardow").rglob("*.py"):
        found += [
            text_of(node)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant | ast.JoinedStr)
        ]
    for path in sorted(
        path for folder in ("src", "include", "python/src") for path in (ROOT / folder).rglob("*.[ch]*")
    ):
        if path.suffix in (".cc", ".h") and not path.name.endswith("_test.cc"):
            found.append(re.sub(r'"\s*\n\s*"', "", path.read_text()))
    return "\n".join(found)


def test_there_is_much_to_read() -> None:
    assert len(QUOTED) > 30


@pytest.mark.parametrize("quotes", QUOTED, ids=[" ".join(one)[:50] for one in QUOTED])
def test_what_is_quoted_is_said(quotes: list[str]) -> None:
    for piece in (piece for quote in quotes for piece in quote.split("...")):
        assert piece.strip(" ,") in messages(), piece


def test_every_class_of_errors_is_explained() -> None:
    classes = {
        name for name, one in vars(shardow.errors).items() if isinstance(one, type) and issubclass(one, shardow.Error)
    }
    assert set(re.findall(r"`(\w+Error)`", PAGE.split("## Ranks")[0])) >= classes - {"Error"}


def test_the_reference_has_all_that_is_public() -> None:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    listed = set(re.findall(r"auto(?:class|function|module):: shardow\.([\w.]+)", pages))
    surfaces = {f"compat.{name}" for name in shardow.compat.__all__}
    public = {name for name in shardow.__dir__() if name not in ("__version__", "compat", "Error")}
    assert listed == public | surfaces
