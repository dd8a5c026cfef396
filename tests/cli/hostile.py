"""hostile.py COMMAND: files that nobody should have written, through every verb of a build of the command.

Each run must end by itself with a status that the help names, say why on standard error where that is not 0 or 1, use little memory, and
leave nothing behind. Needs nothing but Python, so that CTest runs it on the sanitizers' builds.
"""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
import seeds

STATUSES = {0, 1, 2, 3, 4, 5}
MOST_BYTES = 300 << 20  # of one allocation under the sanitizers, and of resident memory elsewhere: the largest header has 100 MB


def safetensors(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def entry(name: str, dtype: str = "F32", shape: str = "[2]", offsets: str = "[0,8]") -> str:
    return f'"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


def good(metadata: dict[str, str] | None = None) -> bytes:
    header = {"__metadata__": metadata or {}, "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    return safetensors(json.dumps(header).encode(), struct.pack("<ff", 1.0, 2.0))


def broken_headers() -> Iterator[bytes]:
    """Of docs/file_format.md's rules, one broken each; and what the reference's tests and known attacks are made of."""
    for text, size in seeds.headers():
        yield safetensors(text.encode(), bytes(size))
    yield b""
    yield b"1234567"
    yield struct.pack("<Q", 1000) + b"{}"
    for length in (100_000_000, 100_000_001, 2**63, 2**64 - 1, 0xFFFFFFFF0000003C, 0x04034B50, 0):
        yield struct.pack("<Q", length) + b"{}"
    yield safetensors(b"\xff")
    yield safetensors(b"{}\0\0")
    yield safetensors(b"\xef\xbb\xbf{}")
    yield safetensors(b"[" * 100_000)
    yield safetensors(b'{"a":' * 500 + b"1" + b"}" * 500)
    for name in ("\\u0000", "\\u001b]0;x\\u0007", "\\ud800", "../../x", "x" * 1_000_000, "a\\nshardow: b", "__metadata__", "\\u202ex"):
        yield safetensors(("{" + entry(name) + "}").encode(), bytes(8))
    for shape in (
        "[18446744073709551615]",
        "[9223372036854775807,9223372036854775807]",
        "[0,9223372036854775807]",
        "[" + "1," * 100 + "2]",
        "[-0]",
    ):
        yield safetensors(("{" + entry("a", shape=shape) + "}").encode(), bytes(8))
    for offsets in ("[8,0]", "[0,18446744073709551615]", "[0,9223372036854775807]", "[4,12]", "[0,8,8]", "[]", "[0,7]"):
        yield safetensors(("{" + entry("a", offsets=offsets) + "}").encode(), bytes(8))
    for dtype in ("F4", "F6_E2M3", "F8_E8M0", "C64", "BOOL", "I64", "F64", "U8", "f32", ""):
        yield safetensors(("{" + entry("a", dtype, "[8]") + "}").encode(), bytes(8))
    yield safetensors(("{" + ",".join(entry(f"t{i}", shape="[2]", offsets="[0,8]") for i in range(1000)) + "}").encode(), bytes(8))
    for value in ("1", "null", "[]", "{}", '{"a":1}', '{"shardow.crc32":"{}"}', '{"k":"\\u001b[31m"}'):
        yield safetensors(('{"__metadata__":' + value + "," + entry("a") + "}").encode(), bytes(8))
    for sums in (
        "",
        "x",
        "[]",
        '{"a":1}',
        '{"a":"0123456"}',
        '{"a":"0123456z"}',
        '{"a":"00000000","a":"00000000"}',
        '{"b":"00000000"}',
        "{" * 1000,
    ):
        yield good({"shardow.crc32": sums})
    for text in ("", "x", "{}", '{"schedules":[]}', '{"format":1,"step":-1}', "[" * 1000, '{"inputs":1}', '{"step":1e999}', "\x1b[2J"):
        for key in ("shardow.state", "shardow.merge", "shardow.snapshot", "shardow.values"):
            yield good({key: text})
    yield good() + b"trailing"
    yield good()[:-1]


def folders() -> Iterator[dict[str, bytes]]:
    """Directories: indexes that lie, manifests that lead elsewhere."""
    for text in seeds.indexes():
        yield {"model.safetensors.index.json": text.encode(), "model.safetensors": good()}
    for target in ("../a.safetensors", "/etc/passwd", ".", "a\\u0000b", "none.safetensors", "model.safetensors"):
        index = f'{{"weight_map":{{"a":"{target}","z":"model.safetensors"}}}}'
        yield {"model.safetensors.index.json": index.encode(), "model.safetensors": good()}
    for line in (
        b"x",
        b"0" * 64 + b"  ../../etc/passwd\n",
        b"0" * 64 + b"  /etc/passwd\n",
        b"\\" + b"0" * 64 + b"  a\\x\n",
        b"\xff" * 5000,
        b"0" * 63,
    ):
        yield {"model.safetensors": good(), "SHA256SUMS": line}
    yield {"ema-0.9.safetensors": good({"shardow.state": "{}"}), "ema-0.99.safetensors": b"short"}
    yield {}


def calls(path: Path, beside: Path) -> Iterator[list[str]]:
    yield ["inspect", str(path)]
    yield ["inspect", "--json", str(path)]
    yield ["inspect", "--tree", "--full", str(path)]
    yield ["verify", "--json", str(path)]
    yield ["verify", "--manifest=check", str(path)]
    yield ["diff", str(path), str(beside)]
    yield ["diff", "--json", str(beside), str(path)]
    for verb in writers(COMMAND):
        yield [*verb(path, beside), "-o", str(path.parent / f"out-of-{path.name}")]


@functools.cache
def writers(command: str) -> list:
    """The verbs that write, as far as this build has them."""
    told = subprocess.run([command, "--help"], capture_output=True, text=True, check=True).stdout
    known = {
        "convert": lambda path, beside: ["convert", str(path)],
        "average": lambda path, beside: ["average", "--uniform", str(beside), str(path)],
        "posthoc": lambda path, beside: ["posthoc", "--sigma-rel", "0.1", str(path)],
    }
    return [call for verb, call in known.items() if re.search(rf"^  {verb} ", told, re.MULTILINE)]


def check(command: list[str], what: str) -> None:
    environment = {
        **os.environ,
        "ASAN_OPTIONS": f"max_allocation_size_mb={MOST_BYTES >> 20}:detect_leaks=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    done = subprocess.run(command, capture_output=True, timeout=120, env=environment)
    told = f"{command} of {what}: {done.returncode}\n{done.stdout[-2000:]!r}\n{done.stderr[-4000:]!r}"
    assert done.returncode in STATUSES, told
    assert done.returncode < 2 or done.stderr.startswith(b"shardow: "), told
    assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", done.stdout + done.stderr), told
    if "--json" in command:
        json.loads(done.stdout)


COMMAND = ""


def put(folder: Path) -> Iterator[tuple[Path, str]]:
    """Paths to call the command with, and what lies there."""
    for i, text in enumerate(broken_headers()):
        path = folder / f"{i}.safetensors"
        path.write_bytes(text)
        yield path, f"file {i}: {text[:80]!r}"
    for i, files in enumerate(folders()):
        path = folder / f"folder{i}"
        path.mkdir()
        for name, text in files.items():
            (path / name).write_bytes(text)
        yield path, f"folder {i}: {files!r}"[:300]


def main(command: str, every: int = 1) -> int:
    """How many runs there were; of `every` many files one is tried."""
    global COMMAND
    COMMAND = command
    with tempfile.TemporaryDirectory() as name, ThreadPool(2) as pool:
        folder = Path(name)
        beside = folder / "beside.safetensors"
        beside.write_bytes(good())
        runs = [([command, *words], what) for path, what in list(put(folder))[::every] for words in calls(path, beside)]
        pool.starmap(check, runs)
        left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
        assert left == [], left
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10 < 2 * MOST_BYTES
    return len(runs)


if __name__ == "__main__":
    print(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1), "runs")
