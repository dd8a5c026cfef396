"""Plain values beside a mapping's tensors, as base/plain.py writes them: a JSON object in the metadata of the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardow.base import plain

METADATA = "shardow.values"


def check(name: str, value: Any) -> Any:
    """``value``, or ValueError where it is neither a tensor nor what a file takes."""
    plain.encode(value, f"'{name}'")
    return value


def for_file(values: Mapping[str, Any]) -> dict[str, str]:
    """Metadata."""
    return {METADATA: json.dumps(plain.encode(dict(values), "a value"), allow_nan=False)} if values else {}


def in_file(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Returns the values of a file by name."""
    values: dict[str, Any] = plain.decode(json.loads(metadata.get(METADATA, "{}")))
    return values
