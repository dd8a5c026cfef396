"""``python -m benchmarks.command``: the verbs of the command that read whole files, from memory and from disk.

A bfloat16 checkpoint of ``--gib``. ``verify`` is held against ``cat`` of the same file, ``convert`` against reading,
writing and flushing the same bytes (``dd conv=fsync``). Each round runs every candidate once, in turn; ratios are of
one round, and their median is shown.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import shardow
from benchmarks import report
from benchmarks.measure import Bar, at_most

COMMAND = Path(__file__).parents[1] / "build" / "release" / "shardow"
#: What each verb is held against.
OF = {"verify": "cat", "convert": "dd conv=fsync", "convert --dtype float16": "dd conv=fsync"}


@dataclass
class Results:
    gib: float
    seconds: dict[tuple[str, bool], list[float]]  # by candidate and whether the files were in memory
    memory: dict[str, int]  # bytes at the peak beyond the program's own

    def ratio(self, name: str, warm: bool) -> float:
        return statistics.median(
            a / b for a, b in zip(self.seconds[name, warm], self.seconds[OF[name], warm], strict=True)
        )


def candidates(path: Path, out: Path) -> dict[str, list[str | Path]]:
    convert = [COMMAND, "convert", path, "-o", out]
    return {
        "cat": ["cat", path],
        "dd conv=fsync": ["dd", f"if={path}", f"of={out}", "bs=8M", "conv=fsync", "status=none"],
        "verify": [COMMAND, "verify", path],
        "convert": convert,
        "convert --dtype float16": [*convert, "--dtype", "float16"],
    }


def run(gib: float = 1.0, rounds: int = 5, folder: Path | None = None) -> Results:
    with tempfile.TemporaryDirectory(dir=folder) as name:
        path, out = Path(name) / "a.safetensors", Path(name) / "out.safetensors"
        write(path, gib)
        results = Results(gib, {}, {})
        own = measured([COMMAND, "--version"])[1]
        for _ in range(rounds):
            for warm in (True, False):
                for what, words in candidates(path, out).items():
                    out.unlink(missing_ok=True)
                    in_memory([path], warm)
                    seconds, memory = measured(words)
                    results.seconds.setdefault((what, warm), []).append(seconds)
                    if what in OF:
                        results.memory[what] = max(results.memory.get(what, 0), memory - own)
    return results


def write(path: Path, gib: float) -> None:
    torch.manual_seed(0)
    size = max(1, int(gib * 2**30 / 2 / 16))
    shardow.save({f"layer.{i}.weight": torch.randn(size).bfloat16() for i in range(16)}, path)


def in_memory(paths: list[Path], warm: bool) -> None:
    """Has the kernel keep all of the files in memory, or forget them, as far as it does what it is asked for."""
    os.sync()  # it forgets what is on the disk alone
    for path in paths:
        with path.open("rb") as file:
            if warm:
                while file.read(8 << 20):
                    pass
            else:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


#: Calls the program from a small process: a child begins with the peak of who started it, and this one has torch in
#: memory.
CALL = """
import os, sys, time
begin = time.perf_counter()
child = os.fork()
if child == 0:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.execvp(sys.argv[1], sys.argv[1:])
_, status, usage = os.wait4(child, 0)
print(time.perf_counter() - begin, usage.ru_maxrss << 10, os.waitstatus_to_exitcode(status))
"""


def measured(words: Sequence[str | Path]) -> tuple[float, int]:
    """(seconds, bytes of memory at the peak)."""
    program = [sys.executable, "-ISc", CALL, *words]
    printed = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True).stdout
    seconds, memory, status = printed.split()
    if status not in ("0", "1"):
        raise SystemExit(f"{words} ended with {status}")
    return float(seconds), int(memory)


def lines(results: Results) -> list[str]:
    def cell(what: str, warm: bool) -> str:
        median = f"{statistics.median(results.seconds[what, warm]):.3f}"
        return median + (f", {results.ratio(what, warm):.2f} ({OF[what]})" if what in OF else "")

    rows = []
    for what in dict.fromkeys(name for name, _ in results.seconds):
        memory = f"{results.memory[what] / 2**20:.0f}" if what in OF else ""
        rows.append([what, cell(what, True), cell(what, False), memory])
    return [
        f"The command, a file of {results.gib:g} GiB bfloat16, 4 reads in flight: seconds, and times as long as what "
        "is in brackets",
        "",
        *report.table(("", "from memory", "from disk", "MiB beyond the program"), rows),
    ]


def bars(results: Results) -> list[Bar]:
    asked = []
    for what, memory in results.memory.items():
        for cache, warm in ("memory", True), ("disk", False):
            asked.append(at_most(f"{what}, from {cache}: times {OF[what]}", results.ratio(what, warm), 1.15))
        asked.append(at_most(f"{what}: MiB of memory", memory / 2**20, 64))
    return asked


if __name__ == "__main__":
    report.main(sys.modules[__name__])
