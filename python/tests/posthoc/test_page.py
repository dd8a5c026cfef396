"""docs/posthoc.md says what its example prints, and shows the picture that it draws.

After a change that is meant, `python python/tests/posthoc/test_page.py` writes both anew.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch

import shardow

PAGE = Path(__file__).parents[3] / "docs" / "posthoc.md"
PICTURE = PAGE.parent / "pictures" / "posthoc_sweep.png"
EXAMPLE = re.compile(r"```python\n(.*?)```\n\nwhich prints\n\n```\n(.*?)```", re.DOTALL)


def run(directory: Path) -> tuple[str, bytes]:
    """(what the example prints, the picture)."""
    found = EXAMPLE.search(PAGE.read_text())
    assert found
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(8)).sum().backward()
    space: dict[str, Any] = {"shardow": shardow, "model": model, "optimizer": optimizer}
    printed = io.StringIO()
    before = Path.cwd()
    os.chdir(directory)
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(found[1], str(PAGE), "exec"), space)
        return printed.getvalue().strip() + "\n", Path("run/sweep.png").read_bytes()
    finally:
        os.chdir(before)


def test_the_example_prints_what_the_page_says(tmp_path: Path) -> None:
    printed, picture = run(tmp_path)
    found = EXAMPLE.search(PAGE.read_text())
    assert found
    assert printed == found[2]
    assert picture[:4] == PICTURE.read_bytes()[:4] == b"\x89PNG"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        printed, picture = run(Path(scratch))
    page = PAGE.read_text()
    found = EXAMPLE.search(page)
    assert found
    PAGE.write_text(page[: found.start(2)] + printed + page[found.end(2) :])
    PICTURE.write_bytes(picture)
