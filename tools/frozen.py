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

_COMPAT = "python/tests/compat/"
SUITES = {
    "random programs": ["python/tests/programs/*.py"],
    "simulator": ["tests/simulate/*"],
    "crash": ["tests/crash/*"],
    "C++ and Python on one trajectory": ["tests/faces/*"],
    "conformance of compat": [
        *(_COMPAT + name for name in ("surfaces.py", "walks.py", "test_moves.py", "test_on_host.py")),
        *(_COMPAT + name for name in ("test_bagel.py", "bagel_models.py")),
        *(_COMPAT + name for name in ("test_causal_forcing.py", "causal_forcing_models.py")),
        *(_COMPAT + name for name in ("test_diffusers.py", "diffusers_models.py")),
        *(_COMPAT + name for name in ("test_dist_ema.py", "dist_emas.py")),
        *(_COMPAT + name for name in ("test_ema_pytorch.py", "ema_pytorch_states.py")),
        *(_COMPAT + name for name in ("test_swa_utils.py", "swa_models.py")),
        *(_COMPAT + name for name in ("test_timm.py", "timm_averages.py")),
        _COMPAT + "test_torch_ema.py",
    ],
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
