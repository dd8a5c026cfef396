"""``python -m benchmarks.command``: the verbs of the command that read files, against ``cat`` of the same files, from
memory and from disk.

Two bfloat16 checkpoints of ``--gib`` each, which differ everywhere. ``convert`` is held against reading, writing and
flushing the same bytes (``dd conv=fsync``). Each round runs every candidate once, in turn; ratios are of one round, and
their median is shown.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

import shardow
from benchmarks import report

COMMAND = Path(__file__).parents[1] / "build" / "release" / "shardow"
BAR, MOST = 1.15, 64 << 20
#: What it is held against.
OF = {
    "verify": "cat of one",
    "diff": "cat of both",
    "diff, equal": "cat of both",
    "convert": "dd conv=fsync",
    "convert --dtype float16": "dd conv=fsync",
}


@dataclass
class Results:
    gib: float
    seconds: dict[tuple[str, bool], list[float]]  # by candidate and whether the files were in memory
    memory: dict[str, int]  # bytes at the peak beyond the program's own

    def ratio(self, name: str, warm: bool) -> float:
        return statistics.median(
            a / b for a, b in zip(self.seconds[name, warm], self.seconds[OF[name], warm], strict=True)
        )


def candidates(folder: Path) -> dict[str, list[str]]:
    a, b, same, out = (str(folder / f"{name}.safetensors") for name in ("a", "b", "same", "out"))
    command = str(COMMAND)
    return {
        "cat of one": ["cat", a],
        "cat of both": ["cat", a, b],
        "dd conv=fsync": ["dd", f"if={a}", f"of={out}", "bs=8M", "conv=fsync", "status=none"],
        "verify": [command, "verify", a],
        "diff": [command, "diff", a, b],
        "diff, equal": [command, "diff", a, same],
        "convert": [command, "convert", a, "-o", out],
        "convert --dtype float16": [command, "convert", a, "-o", out, "--dtype", "float16"],
    }


def run(gib: float = 1.0, rounds: int = 7, folder: Path | None = None, only: str = "") -> Results:
    """Of candidates whose names begin with ``only``, and what they are held against."""
    wanted = {name for what, other in OF.items() if what.startswith(only) for name in (what, other)}
    if not wanted:
        raise SystemExit(f"no candidate begins with '{only}': {', '.join(OF)}")

    with tempfile.TemporaryDirectory(dir=folder) as name:
        path = Path(name)
        files = write(path, gib)
        results = Results(gib, {}, {})
        own = measured([str(COMMAND), "--version"])[1]
        for _ in range(rounds):
            for warm in (True, False):
                for what, words in candidates(path).items():
                    if what not in wanted:
                        continue
                    (path / "out.safetensors").unlink(missing_ok=True)
                    prepare(files, warm)
                    seconds, memory = measured(words)
                    results.seconds.setdefault((what, warm), []).append(seconds)
                    if what in OF:
                        results.memory[what] = max(results.memory.get(what, 0), memory - own)
    return results


def write(folder: Path, gib: float) -> list[Path]:
    torch.manual_seed(0)
    size = max(1, int(gib * 2**30 / 2 / 16))
    weights = {f"layer.{i}.weight": torch.randn(size).bfloat16() for i in range(16)}
    near = {name: (value * 1.01 + 0.001) for name, value in weights.items()}
    for name, values in (("a", weights), ("b", near), ("same", weights)):
        shardow.save(values, folder / f"{name}.safetensors")
    return [folder / f"{name}.safetensors" for name in ("a", "b", "same")]


def prepare(files: list[Path], warm: bool) -> None:
    """In memory, or none of it (as far as this kernel forgets files that it is told to)."""
    for file in files:
        with file.open("rb") as opened:
            if warm:
                while opened.read(8 << 20):
                    pass
            else:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


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


def measured(words: list[str]) -> tuple[float, int]:
    """(seconds, bytes of memory at the peak)."""
    told = subprocess.run([sys.executable, "-ISc", CALL, *words], stdout=subprocess.PIPE, text=True, check=True).stdout
    seconds, memory, status = told.split()
    if status not in ("0", "1"):
        raise SystemExit(f"{words} ended with {status}")
    return float(seconds), int(memory)


def lines(results: Results) -> list[str]:
    rows = [
        f"The command, files of {results.gib:g} GiB bfloat16, 4 reads in flight: seconds, and times as long as what "
        "is in brackets",
        "",
        "| | from memory | from disk | MiB beyond the program |",
        "|---|---|---|---|",
    ]
    for what in dict.fromkeys(name for name, _ in results.seconds):
        cells = []
        for warm in (True, False):
            median = f"{statistics.median(results.seconds[what, warm]):.3f}"
            cells.append(median + (f", {results.ratio(what, warm):.2f} ({OF[what]})" if what in OF else ""))
        rows.append(
            f"| {what} | {' | '.join(cells)} | {results.memory[what] / 2**20:.0f} |"
            if what in OF
            else f"| {what} | {' | '.join(cells)} | |"
        )
    return rows


def bars(results: Results) -> list[tuple[str, float, float, bool]]:
    found = []
    for what, other in OF.items():
        if what not in results.memory:
            continue
        for warm in () if what.startswith("diff") else (True, False):
            ratio = results.ratio(what, warm)
            found.append(
                (f"{what}, from {'memory' if warm else 'disk'}: times {other} (at most)", ratio, BAR, ratio <= BAR)
            )
        found.append(
            (
                f"{what}: MiB of memory (at most)",
                results.memory[what] / 2**20,
                MOST / 2**20,
                results.memory[what] <= MOST,
            )
        )
    return found


if __name__ == "__main__":
    report.main(sys.modules[__name__])
