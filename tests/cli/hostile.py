"""hostile.py COMMAND: files that nobody should have written, through every verb of a build of the command.

Each run must end by itself with a status that the help names, say why on standard error where that is not 0 or 1, use
little memory, and leave nothing behind. Needs nothing but Python, so that CTest runs it on the sanitizers' builds.
"""

from __future__ import annotations

import json
import os
import re
import resource
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
import seeds

STATUSES = {0, 1, 2, 3, 4, 5}
# Bytes of one allocation under the sanitizers, and of resident memory elsewhere: the largest header has 100 MB.
MOST_BYTES = 300 << 20


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
    for name in (
        "\\u0000",
        "\\u001b]0;x\\u0007",
        "\\ud800",
        "../../x",
        "x" * 1_000_000,
        "a\\nshardow: b",
        "__metadata__",
        "\\u202ex",
    ):
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
    yield safetensors(
        ("{" + ",".join(entry(f"t{i}", shape="[2]", offsets="[0,8]") for i in range(1000)) + "}").encode(), bytes(8)
    )
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
    for text in (
        "",
        "x",
        "{}",
        '{"schedules":[]}',
        '{"format":1,"step":-1}',
        "[" * 1000,
        '{"inputs":1}',
        '{"step":1e999}',
        "\x1b[2J",
    ):
        for key in ("shardow.state", "shardow.merge", "shardow.snapshot", "shardow.values"):
            yield good({key: text})
    yield good() + b"trailing"
    yield good()[:-1]


def folders() -> Iterator[dict[str, bytes]]:
    """Directories: indexes that lie."""
    for text in seeds.indexes():
        yield {"model.safetensors.index.json": text.encode(), "model.safetensors": good()}
    for target in ("../a.safetensors", "/etc/passwd", ".", "a\\u0000b", "none.safetensors", "model.safetensors"):
        index = f'{{"weight_map":{{"a":"{target}","z":"model.safetensors"}}}}'
        yield {"model.safetensors.index.json": index.encode(), "model.safetensors": good()}
    yield {"ema-0.9.safetensors": good({"shardow.state": "{}"}), "ema-0.99.safetensors": b"short"}
    yield {}


STATE = """{"format":1,"step":10,"updates":10,"applied_step":10,"applied_samples":0,"held_non_finite":0,"seed":"0",
"update_every":1,"start_step":0,"rule":"lerp","rounding":"auto","dtype":"F32","schedules":[{"kind":"power","sigma_rel":0.05}]}"""
RECORD = """{"format":1,"segments":[{"run":"5c202cdb48fef2d1","start_step":0,
"schedules":{"power(sigma_rel=0.05)":{"kind":"power","sigma_rel":0.05}},"updates":[[1,1,10]]}]}"""


def packed_as(text: str) -> str:
    return json.dumps({"crc32": f"{zlib.crc32(text.encode()):08x}", "text": text})


def snapshots() -> Iterator[dict[str, bytes]]:
    """Directories of snapshots whose records lie, each beside one that does not."""

    def folder(record: str, state: str = STATE, step: str = "10") -> dict[str, bytes]:
        sound = {"shardow.state": STATE.replace("10", "20"), "shardow.snapshot": RECORD.replace("10", "20")}
        name = "ema-power-sigma_rel=0.05.safetensors"
        file = good({"shardow.state": state, "shardow.snapshot": record})
        return {f"snapshot-{step}/{name}": file, f"snapshot-000000020/{name}": good(sound)}

    yield folder(RECORD)
    for updates in (
        "[]",
        "[[1,1,9223372036854775807]]",
        "[[1,0,10]]",
        "[[-1,1,10]]",
        "[[1,1,-10]]",
        "[[1,9223372036854775807,10]]",
        "[[1,1]]",
    ):
        yield folder(RECORD.replace("[[1,1,10]]", updates))
    for packed in (
        '{"crc32":"00000000","text":".CAA*Q"}',
        '{"crc32":"e9d1c4e7","text":""}',
        '{"text":".CAA*Q"}',
        '{"crc32":1,"text":[]}',
        "[]",
        packed_as(".CAA*Q"),
        packed_as(".CAA*ggggggggC"),
        packed_as("#CC=1e308;=1.7e308;*+C"),
        packed_as(".C++++++++++/A"),
        packed_as("#CC=\u0000;"),
        packed_as("." + "CAC" * 300_000),
    ):
        yield folder(RECORD.replace('"format":1', '"format":2').replace('"updates":[[1,1,10]]', f'"packed":{packed}'))
    many = ",".join(f"[{2 * i + 1},1,1]" for i in range(200_000))
    yield folder(RECORD.replace("[1,1,10]", many))
    for width in ("0", "-1", "1e999", "1e-320", '"x"', "0.28", "null"):
        yield folder(RECORD.replace("0.05}", width + "}"), STATE.replace("0.05", width))
    for record in (
        "",
        "{}",
        "[" * 1000,
        RECORD.replace('"format":1', '"format":3'),
        RECORD.replace("power", "\u001b[31m"),
        RECORD[:-1],
    ):
        yield folder(record)
    for state in (
        "",
        "{}",
        STATE.replace('"step":10', '"step":9223372036854775807'),
        STATE.replace("power", "constant"),
    ):
        yield folder(RECORD, state)
    for step in ("9223372036854775807", "99999999999999999999", "-1", "000000020x", "0"):
        yield folder(RECORD, step=step)


def calls(path: Path, beside: Path) -> Iterator[list[str]]:
    yield ["inspect", str(path)]
    yield ["inspect", "--json", str(path)]
    yield ["inspect", "--tree", "--full", str(path)]
    yield ["verify", "--json", str(path)]
    yield ["diff", str(path), str(beside)]
    yield ["diff", "--json", str(beside), str(path)]
    out = path.parent / f"out-of-{path.name}"
    yield ["convert", str(path), "-o", str(out)]
    yield ["convert", str(path), "-o", f"{out}.d", "--dtype", "float16", "--max-shard-size", "1", "--rename", "*=x.*"]
    for way in (
        [],
        ["--weights", "0.5,-2"],
        ["--ema", "0.9"],
        ["--ema", "0.9", "--per-step", "--steps", "1,9223372036854775807"],
        ["--lawa", "1", "--steps", "2,1", "--dtype", "bfloat16"],
        ["--curve", "cosine", "--steps", "1,2"],
    ):
        yield ["average", str(beside), str(path), "-o", str(out), *way]
    yield ["posthoc", "--sigma-rel", "0.1", str(path), "-o", str(out), "--json"]
    yield ["posthoc", "--sweep", str(path)]


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


def put(folder: Path) -> Iterator[tuple[Path, str]]:
    """Paths to call the command with, and what lies there."""
    for i, text in enumerate(broken_headers()):
        path = folder / f"{i}.safetensors"
        path.write_bytes(text)
        yield path, f"file {i}: {text[:80]!r}"
    for i, files in enumerate([*folders(), *snapshots()]):
        path = folder / f"folder{i}"
        path.mkdir()
        for name, text in files.items():
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_bytes(text)
        yield path, f"folder {i}: {files!r}"[:300]


def main(command: str, every: int = 1) -> int:
    """How many runs there were; of `every` many files one is tried."""
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
