"""How `make docs` makes build/docs: pages in Markdown, the reference from docstrings."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

import shardow

project, author = "Shardow", "the Shardow developers"
version = release = shardow.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["conf.py"]
html_theme = "furo"
html_title = f"Shardow {release}"
myst_heading_anchors = 3
autodoc_member_order = "bysource"
suppress_warnings = ["ref.python"]  # EMA stands for two classes
ROOT = Path(__file__).parent.parent


def borrow(_: Sphinx, page: str, text: list[str]) -> None:
    """Two pages stand in the root, where their links begin."""
    name = {"index": "README.md", "contributing": "CONTRIBUTING.md"}.get(page)
    if name:
        found = (
            re.sub(r"\]\((?!https?:|#)", "](../", (ROOT / name).read_text())
            .replace("](../docs/", "](")
            .replace("](../CONTRIBUTING.md", "](contributing.md")
        )
        text[0] = f"{found}\n{text[0]}"


def setup(app: Sphinx) -> None:
    app.connect("source-read", borrow)
