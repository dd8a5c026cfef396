"""What calls cost against the number of tensors in instructions of this process, which valgrind counts: the same on
every machine, whatever its caches, and whatever else it does. It takes a hundred times as long."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import scale_report, scale_tensors

SIZES = (5_000, 25_000)


class Instructions:
    """Of all threads, in user space."""

    def __init__(self, counts: Path) -> None:
        self._counts, self._dumps = counts, 0
        self._own = 0.0
        self._own = self(lambda: None)  # what switching takes

    def __call__(self, call: Callable[[], Any], again: bool = True) -> float:
        self._control("--instr=on")
        kept = call()
        self._control("--instr=off")
        self._control("--dump")
        self._dumps += 1
        del kept
        text = self._counts.with_name(f"{self._counts.name}.{self._dumps}").read_text()
        (count,) = [int(line.split()[1]) for line in text.splitlines() if line.startswith("totals:")]
        return count - self._own

    def _control(self, what: str) -> None:
        subprocess.run(["callgrind_control", what, str(os.getpid())], check=True, capture_output=True)


def run(sizes: list[int]) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    if shutil.which("callgrind_control") is None:
        print("skipped: there is no valgrind here (apt-get install valgrind)")
        return found
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            counts = Path(folder) / "counts"
            tool = ["valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={counts}"]
            command = [*tool, sys.executable, "-m", "benchmarks.scale_work", str(size), folder]
            answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found[size] = {what: value for what, value in json.loads(answer.stdout).items() if not what.startswith("bytes")}
        for what, value in found[size].items():
            print(f"{size:>9} tensors  {what:<18} {value / size:.0f} instructions a tensor", flush=True)
    return found


def lines(found: dict[int, dict[str, float]]) -> Iterator[str]:
    for what in found[max(found)] if found else ():
        yield (
            f"{what}: instructions ~ "
            f"tensors^{scale_report.exponent([(size, found[size][what]) for size in found]):.2f} (at most 1.1)"
        )


if __name__ == "__main__":
    place = Path(sys.argv[2])
    print(json.dumps(scale_tensors.at(int(sys.argv[1]), place, Instructions(place / "counts"))))
