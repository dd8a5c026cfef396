"""Plain values beside a mapping's tensors, as base/plain.py writes them: a JSON object in the metadata of the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardow.base import plain
from shardow.base.checks import invalid

METADATA = "shardow.values"


def check(name: str, value: Any) -> Any:
    """``value``, or ValueError where it is neither a tensor nor what a file takes."""
    plain.encode(value, f"'{name}'")
    return value


def for_file(values: Mapping[str, Any]) -> dict[str, str]:
    """Metadata."""
    return {METADATA: json.dumps(plain.encode(dict(values), "a value"), allow_nan=False)} if values else {}


def in_file(wanted: Mapping[str, Any], metadata: Mapping[str, str], strict: bool, where: str) -> dict[str, Any]:
    """Those of the ``wanted`` names. Raises ValueError where ``strict`` and others are there, or some are not."""
    there: dict[str, Any] = plain.decode(json.loads(metadata.get(METADATA, "{}")))
    if strict and (other := sorted(wanted.keys() ^ there.keys())):
        missing = [name for name in other if name in wanted]
        told = (
            f"missing in the file: {', '.join(missing)}" if missing else f"unexpected in the file: {', '.join(other)}"
        )
        raise invalid(f"{where} has other plain values, nothing was loaded: {told}; strict=False takes the rest")
    return {name: there[name] for name in wanted if name in there}
