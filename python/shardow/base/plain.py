"""Plain values as JSON, and back as they were: what torch.save() would pickle of a scheduler, or of a program's own
state.

JSON lacks tuples, infinities, keys that are no texts, and bytes. Such a value is an object with one key that begins
with "$": {"$tuple": [...]}, {"$float": "inf"}, {"$dict": [[key, value], ...]}, {"$counter": [[key, value], ...]},
{"$bytes": base64}.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

from shardow import errors
from shardow.base.checks import invalid, utf8

_DEEPEST = 100
_MOST_BITS = 14_000  # of a whole number: Python itself reads 4300 digits
Put = Callable[[str, Any], dict[str, Any]]
Get = Callable[[Any], Any]


def refuse(where: str, value: Any) -> dict[str, Any]:
    instead = "; of numpy's, value.item() and value.tolist() are" if type(value).__module__ == "numpy" else ""
    raise invalid(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which is not written, since files hold no "
        "pickles; "
        f"give numbers, texts, None, bytes, and lists, tuples and dicts of such, of Python's own types{instead}"
    )


def encode(value: Any, where: str, put: Put = refuse, depth: int = 0) -> Any:
    """What json.dumps(allow_nan=False) takes. ``put(where, leaf)``: an object with one "$" key for what is no plain
    value, or it raises.

    ``where``: a path like ``state.lr``, for messages and names.
    """
    if depth > _DEEPEST:
        raise invalid(f"{where} is deeper than {_DEEPEST} lists and dicts; does it hold itself?")

    def each(values: Any) -> list[Any]:
        return [encode(one, f"{where}.{i}", put, depth + 1) for i, one in enumerate(values)]

    def pairs(values: dict[Any, Any]) -> list[Any]:
        return [
            [encode(key, f"a key of {where}", depth=depth + 1), encode(one, f"{where}.{key}", put, depth + 1)]
            for key, one in values.items()
        ]

    kind = type(value)
    if kind is int and value.bit_length() > _MOST_BITS:
        raise invalid(f"{where} has {value.bit_length()} bits; Python reads {_MOST_BITS}: give a text, hex(value)")
    if value is None or kind in (bool, int):
        return value
    if kind is str:
        return utf8(value, where)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if kind is list:
        return each(value)
    if kind is tuple:
        return {"$tuple": each(value)}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is Counter:
        return {"$counter": pairs(value)}
    if kind in (dict, OrderedDict, defaultdict):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {
                utf8(key, f"a key of {where}"): encode(one, f"{where}.{key}", put, depth + 1)
                for key, one in value.items()
            }
        return {"$dict": pairs(value)}
    return put(where, value)


def decode(value: Any, get: Get | None = None, where: str = "this") -> Any:
    """encode()'s value. ``get(object)``: what put() gave for. Raises ValueError, of ``where``, for what encode() does
    not write.
    """
    try:
        return _decode(value, get)
    except errors.Error:
        raise
    except (TypeError, ValueError) as error:  # keys that are lists, what is no number, ...
        raise invalid(f"{where} is no plain value: {error}") from None


def _decode(value: Any, get: Get | None) -> Any:
    if isinstance(value, list):
        return [_decode(one, get) for one in value]
    if not isinstance(value, dict):
        return value
    key = next(iter(value), "")
    if not key.startswith("$"):
        return {name: _decode(one, get) for name, one in value.items()}
    inner = value[key]
    if len(value) != 1:
        raise invalid(f"{key} is not alone in its object")
    if key == "$tuple":
        return tuple(_decode(inner, get))
    if key == "$float":
        return float(inner)
    if key == "$bytes":
        return base64.b64decode(inner, validate=True)
    if key in ("$dict", "$counter"):
        found = {_decode(name, get): _decode(one, get) for name, one in inner}
        return Counter(found) if key == "$counter" else found
    if get is None:
        raise invalid(f"{key} is nothing that plain values have")
    return get(value)
