"""For every test: at each new connection torch looks up the name of 127.0.0.1, twice.

Where names cannot be looked up that takes 5 s a time, longer than deadlines in tests; a second is enough to say so.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture
def quick_folder() -> Iterator[Path]:
    import quick  # of python/tests, which pytest finds by then

    with quick.folder() as one:
        yield one


def pytest_collection_finish() -> None:
    gc.freeze()  # Every collection of a test would look through what is imported by now, for a second.
