"""What several averages of one EMA are called: in state dicts, in statistics, in file names and where ``decay=`` chooses one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from shardow import _core
from shardow.base.checks import invalid

STATE = "shardow.state"  # key of the engine's state in a file's metadata


def key_of(schedule: _core.Schedule) -> str:
    """ "0.9999" for a constant decay, else the kind with its numbers: "power(sigma_rel=0.1)"."""
    numbers = json.loads(schedule.to_json())
    kind = numbers.pop("kind")
    if kind == "constant":
        return repr(numbers["decay"])
    return f"{kind}({','.join(f'{name}={value!r}' for name, value in numbers.items())})"


def keys_in(metadata: Mapping[str, str]) -> list[str]:
    """Of a file's metadata; [] where it is no saved EMA."""
    try:
        return [key_of(_core.Schedule.from_json(json.dumps(numbers))) for numbers in json.loads(metadata[STATE])["schedules"]]
    except (KeyError, TypeError, ValueError):
        return []


def file_name(key: str) -> str:
    """Of one of several averages in a saved EMA's directory."""
    return f"ema-{re.sub(r'[^A-Za-z0-9.=_-]+', '-', key).strip('-')}.safetensors"


def _invalid(message: str) -> Exception:
    return invalid(message)


def keys_of(schedules: Sequence[_core.Schedule]) -> list[str]:
    """One key each; equal schedules are refused, since nothing could tell their averages apart."""
    keys = [key_of(schedule) for schedule in schedules]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _invalid(f"decay {twice} is given twice; each average needs a decay of its own")
    return keys


def choose(keys: Sequence[str], decay: object) -> int:
    """The index that ``decay`` names: a number, a key or a Schedule; None where there is but one."""
    if decay is None:
        if len(keys) == 1:
            return 0
        raise _invalid(f"this EMA keeps {len(keys)} averages; say which with decay=, one of {', '.join(keys)}")
    if isinstance(decay, _core.Schedule):
        key = key_of(decay)
    else:
        key = repr(float(decay)) if isinstance(decay, (int, float)) else str(decay)
    if key not in keys:
        raise _invalid(f"decay={decay}; this EMA keeps {', '.join(keys)}")
    return list(keys).index(key)
