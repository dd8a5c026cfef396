"""seeds.py FOLDER: the seed corpus of the fuzzers, good files and one broken rule each."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path


def headers() -> list[tuple[str, int]]:
    def one(name: str = "a", dtype: str = "F32", shape: str = "[2]", offsets: str = "[0,8]") -> str:
        return f'"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'

    good = [
        ("{}", 0),
        ("{" + one() + "}  ", 8),
        ('{"__metadata__":{"format":"pt"},' + one("\\u00e9") + "," + one("b", "BF16", "[]", "[8,10]") + "}", 10),
    ]
    good += [
        ("{" + one("a", "F4", "[2,2]", "[0,2]") + "," + one("z", "I64", "[0,3]", "[2,2]") + "}", 2),
        ('{"__metadata__":null}', 0),
    ]
    broken = [
        one(shape="[-2]"),
        one(shape="[2.0]"),
        one(offsets="[0]"),
        one(offsets="[4,12]"),
        one(dtype="X"),
        one() + "," + one(),
        one(shape="[9223372036854775807,2]"),
    ]
    return [*good, *(("{" + text + "}", 8) for text in broken), ("[" * 200, 0)]


def indexes() -> list[str]:
    maps = [{}, {"a": "model.safetensors"}, {"a": "../x"}, {"a": "/x"}, {"a": ""}, {"a": 1}]
    return [json.dumps({"metadata": {"total_size": 8}, "weight_map": one}) for one in maps] + [
        "{}",
        '{"weight_map":{"a":"x","a":"y"}}',
    ]


def main() -> None:
    folder = Path(sys.argv[1])
    for name, seeds in (
        ("header", [struct.pack("<H", data) + text.encode() for text, data in headers()]),
        ("index", [text.encode() for text in indexes()]),
    ):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i, seed in enumerate(seeds):
            (folder / name / f"seed{i}").write_bytes(seed)


if __name__ == "__main__":
    main()
