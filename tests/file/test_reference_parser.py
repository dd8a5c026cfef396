"""Our header rules against the reference parser's, on files made by mutating good ones and by hand.

The verdict is the same, but for what docs/file_format.md names.
"""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from core_modules import HOOKS
from safetensors import SafetensorError, deserialize

TESTS = Path(__file__).parents[2] / "python" / "tests"
BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "I16": 16,
    "BF16": 16,
    "F16": 16,
    "F32": 32,
    "I32": 32,
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "C64": 64,
    "F4": 4,
}


def reference(header: bytes, data_bytes: int) -> bool:
    try:
        deserialize(struct.pack("<Q", len(header)) + header + bytes(data_bytes))
    except (SafetensorError, UnicodeDecodeError):
        return False
    return True


def ours(header: bytes, data_bytes: int) -> bool:
    from shardow._core import hooks  # type: ignore[attr-defined]

    try:
        hooks.parse_header(header, data_bytes)
    except ValueError as error:
        assert "twice" not in str(error) or duplicate(header) or not reference(header, data_bytes), error
        return False
    return True


def duplicate(header: bytes) -> bool:
    """The one thing that only we refuse, for certain: a key that comes twice."""

    def check(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) < len(pairs):
            raise LookupError
        return dict(pairs)

    try:
        json.loads(header, object_pairs_hook=check)
    except LookupError:
        return True
    except (ValueError, RecursionError):
        return False
    return False


def good(rng: random.Random) -> tuple[bytes, int]:
    at, header = 0, {}
    if rng.random() < 0.3:
        header["__metadata__"] = {"format": "pt", "k": "v"}
    for i in range(rng.randrange(5)):
        dtype = rng.choice(list(BITS))
        shape = [rng.randrange(4) for _ in range(rng.randrange(4))]
        count = 1
        for size in shape:
            count *= size
        if count * BITS[dtype] % 8:
            continue
        size = count * BITS[dtype] // 8
        header[f"t{i}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return json.dumps(header, separators=rng.choice([(",", ":"), (", ", ": ")])).encode() + b" " * rng.randrange(3), at


PIECES = [
    b"0",
    b"1",
    b"4",
    b"-",
    b"9",
    b"18446744073709551615",
    b"1e3",
    b".0",
    b"null",
    b"true",
    b"[",
    b"]",
    b"{",
    b"}",
    b",",
    b":",
    b'"',
    b"\\u0000",
    b"\\ud800",
    b"\xff",
    b"\x00",
    b" ",
]
PIECES += [b"F32", b'"F32"', b'"shape"', b'"dtype":"F32",', b'"t0":', b'"__metadata__":{},', b'"x":1,', b"[0,4]"]


def mutated(rng: random.Random) -> tuple[bytes, int]:
    header, data = good(rng)
    text = bytearray(header)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(text) + 1)
        kind = rng.random()
        if kind < 0.4:
            text[at:at] = rng.choice(PIECES)
        elif kind < 0.7:
            del text[at : at + rng.randrange(1, 4)]
        else:
            text[at : at + 1] = rng.choice(PIECES)
    return bytes(text), max(0, data + rng.choice([0, 0, 0, 0, 1, -1, 4]))


@HOOKS.alone
def test_mutated_headers_get_the_same_verdict() -> None:
    rng = random.Random(1)
    verdicts = {True: 0, False: 0}
    mutations = 60_000 if os.environ.get("SHARDOW_ALL") else 6_000
    for _ in range(mutations):
        header, data = mutated(rng) if rng.random() < 0.9 else good(rng)
        theirs = reference(header, data)
        verdicts[theirs] += 1
        assert ours(header, data) == (theirs and not duplicate(header)), (header, data, theirs)
    assert min(verdicts.values()) > mutations // 20


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"{}", 0), (b" \t\n{}", 0), (b"{}    ", 0), (b'{"__metadata__":null}', 0),
        (b'{"":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}', 1),
        (b'{"a":{"dtype":"U8","shape":[0,5],"data_offsets":[0,0]},"b":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
         0),
        (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":{"y":[1.5,-2,null]}}}', 1),
        (b'{"a":{"dtype":"F4","shape":[2,2],"data_offsets":[0,2]}}', 2),
        (b'{"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}', 3),
        (b'{"a":{"dtype":"C64","shape":[2],"data_offsets":[0,16]}}', 16),
        (b'{"\xc3\xa9\\u00e9\\ud83d\\ude00":{"dtype":"F8_E8M0","shape":[1],"data_offsets":[0,1]}}', 1),
    ],
)  # fmt: skip
@HOOKS.alone
def test_what_both_take(header: bytes, data: int) -> None:
    assert reference(header, data)
    assert ours(header, data)


HOSTILE = {
    "one shape": lambda n: b'{"a":{"dtype":"F32","shape":[' + b"1," * (n // 2) + b'1],"data_offsets":[0,4]}}',
    "one field": lambda n: b'{"a":{"x":[' + b"[]," * (n // 3) + b"[]]}}",
    "a number for every name": lambda n: b"{" + b'"a":1,' * (n // 6) + b'"b":1}',
    "as much metadata": lambda n: b'{"__metadata__":{' + b",".join(b'"%07x":""' % i for i in range(n // 13)) + b"}}",
}


@pytest.mark.parametrize("which", HOSTILE)
def test_a_hostile_header_takes_little_more_memory_than_its_text(which: str) -> None:
    """100 MB of JSON, the largest header that is read, once took 1.75 GB."""
    code = f"""
import resource, sys
sys.path[:0] = {[str(Path(__file__).parent), str(TESTS)]!r}
from test_reference_parser import HOOKS, HOSTILE
HOOKS.install()
from shardow._core import hooks
text = HOSTILE[{which!r}](25_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    hooks.parse_header(text, 4)
except ValueError:
    pass
else:
    sys.exit("it was taken")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) < 150, f"{ran.stdout} MiB for 24 MiB of text"
