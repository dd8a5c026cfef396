"""Machines in miniature want root, and a kernel that lets it make namespaces and links."""

from __future__ import annotations

import pytest
from lab import why_not

_WHY = why_not()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _WHY:
        for item in items:
            if "machines" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason=f"no machines in miniature: {_WHY}"))
