"""What README, CONTRIBUTING and the docs name is there: files, folders, and what a dotted name below shardow leads to."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HOMES = ("", "src", "include", "python", "python/shardow", "python/tests")  # what a path may be written from, beside its document's folder
OTHERS = {"generate.py"}  # of projects that the docs speak of
KEYS = {"shardow.crc32", "shardow.extra_state", "shardow.state"}  # of a file's metadata
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
NAMES = {Path(path).name for path in TRACKED}

FILE = r"(?<![\w/.~*-])(?:[\w.-]+/)*[\w-]+\.(?:py|cc|cu|cuh|h|md|toml|cmake)\b"
FOLDER = r"(?<![\w/.])(?:src|python|include|tests|tools|benchmarks|examples)/[\w./-]*\w"


def paths_in(page: Path) -> list[str]:
    text = page.read_text()
    text = text if page.name == "architecture.md" else re.sub(r"```\w*\n.*?```", "", text, flags=re.S)  # its map is no program
    return sorted({*re.findall(FILE, text), *re.findall(FOLDER, text)} - OTHERS)


def is_there(mention: str, page: Path) -> bool:
    """A bare name may be anybody's."""
    return any((ROOT / home / mention).exists() for home in (*HOMES, page.parent)) or ("/" not in mention and mention in NAMES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_in_docs_exist(page: Path) -> None:
    assert [mention for mention in paths_in(page) if not is_there(mention, page)] == []


def found(name: str) -> Any:
    """What a dotted name leads to: modules first, then attributes."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            here: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            here = getattr(here, part)
        return here
    raise AttributeError(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_dotted_names_in_docs_lead_somewhere(page: Path) -> None:
    lost = []
    for name in sorted(set(re.findall(r"\bshardow(?:\.[A-Za-z_]\w*)+(?![\w=/])", page.read_text())) - KEYS):
        try:
            found(name)
        except AttributeError:
            lost.append(name)
    assert lost == []
