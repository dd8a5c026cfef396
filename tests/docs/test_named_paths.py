"""Files that the README, CONTRIBUTING and the docs name are there, and so is what a dotted name below shardow leads
to."""

from __future__ import annotations

import importlib
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Of other projects, or of a reader's own.
ELSEWHERE = {"foo_test.cc", "train.py", "generate.py", "main.cc", "main.cpp"}

# Keys of a file's metadata.
KEYS = {
    "shardow.checkpoint",
    "shardow.crc32",
    "shardow.extra_state",
    "shardow.files",
    "shardow.part",
    "shardow.replaces",
    "shardow.version",
    "shardow.snapshot",
    "shardow.state",
    "shardow.step",
    "shardow.values",
}


@cache
def tracked() -> frozenset[str]:
    """Files below the root, and their folders with a slash at the end."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [name for name in listed.stdout.split("\n") if name and (ROOT / name).exists()]
    return frozenset(files) | {f"{parent}/" for name in files for parent in Path(name).parents}


def named(page: str) -> set[str]:
    """Sources by any tail of their path, folders from the root on, and what links lead to."""
    sources = re.findall(r"(?<![\w/.*<-])[\w-][\w./-]*\.(?:py|cc|h|cu|cuh|c)\b(?![\w(])", page)
    roots = "|".join(
        sorted(one[:-1] for one in tracked() if one.count("/") == 1 and one.endswith("/") and one[0] != ".")
    )
    folders = re.findall(rf"(?<![\w/.-])(?:{roots})/(?:[\w.-]+/)*(?![\w*.])", page)
    return {*sources, *folders}


def is_there(name: str) -> bool:
    return Path(name).name in ELSEWHERE or any(f"/{one}".endswith(f"/{name}") for one in tracked())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    assert [name for name in sorted(named(text)) if not is_there(name)] == []
    links = [link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text) if not (page.parent / link).exists()]
    assert links == []


def test_a_page_that_names_what_is_not_there_is_found() -> None:
    found = named(
        "see `python/shardow/ema.py`, averaging/swap.py, `src/none/x.cc` and python/tests/harness/; not "
        "`optimizer.step()`, run/a.py"
    )
    assert {name for name in found if not is_there(name)} == {"src/none/x.cc", "python/tests/harness/", "run/a.py"}


def found(name: str) -> Any:
    """What a dotted name leads to: modules first, then attributes."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            here: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "shardow":
                return None  # it is there; what it is for is not installed
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
