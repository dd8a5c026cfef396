"""The suites that hold shardow to what it does, and change only where that is meant: tests/frozen.txt has the SHA-256
of each of their files. ``tools/frozen.py`` compares, ``tools/frozen.py --write`` records the files as they are."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "frozen.txt"
ADVICE = (
    "where that is meant, say in the commit why, show that the same planted mistakes are found, and run "
    "tools/frozen.py --write"
)

COMPAT = [
    "surfaces", "walks", "test_moves", "test_on_host", "test_bagel", "bagel_models", "test_causal_forcing",
    "causal_forcing_models", "test_diffusers", "diffusers_models", "test_dist_ema", "dist_emas", "test_ema_pytorch",
    "ema_pytorch_states", "test_swa_utils", "swa_models", "test_timm", "timm_averages", "test_torch_ema",
]  # fmt: skip
SUITES = {
    "random programs": ["python/tests/programs/*.py"],
    "simulator": ["tests/simulate/*"],
    "crash": ["tests/crash/*"],
    "C++ and Python on one trajectory": ["tests/faces/*"],
    "conformance of compat": [f"python/tests/compat/{name}.py" for name in COMPAT],
    "tables of shardings": ["python/tests/averages/test_bit_identical.py", "python/tests/files/test_files.py"],
    "stopped swaps": ["python/tests/stopped_swaps.py", "python/tests/averages/test_swap_interrupts.py"],
}
#: What these suites take from inside of shardow: it changes with shardow.
SEAMS = {
    "tests/crash/merger.py", "tests/crash/saver.py", "tests/simulate/late_store.cc", "tests/simulate/late_store.h",
    "tests/simulate/seams.h", "tests/simulate/stepped_group.h",
}  # fmt: skip


def files() -> Iterator[str]:
    """Yields the paths of the frozen files, from the root of the repository."""
    for patterns in SUITES.values():
        for pattern in patterns:
            paths = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern) if path.is_file())
            yield from (path for path in paths if path not in SEAMS)


def sums() -> dict[str, str]:
    """Returns the SHA-256 of each frozen file."""
    return {path: hashlib.sha256((ROOT / path).read_bytes()).hexdigest() for path in files()}


def recorded() -> dict[str, str]:
    lines = RECORD.read_text().splitlines()
    return {path: digest for digest, path in (line.split("  ", 1) for line in lines)}


def changes(before: dict[str, str], current: dict[str, str]) -> list[str]:
    """Returns one sentence for each file that is not as it was recorded."""
    paths = sorted({*before, *current})
    verbs = {
        path: "is gone" if path not in current else "is new" if path not in before else "changed" for path in paths
    }
    return [f"{path} {verbs[path]}; {ADVICE}" for path in paths if before.get(path) != current.get(path)]


def main() -> int:
    if sys.argv[1:] == ["--write"]:
        RECORD.write_text("".join(f"{digest}  {path}\n" for path, digest in sums().items()))
        return 0
    differences = changes(recorded(), sums())
    print("\n".join(differences) or "as recorded")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
