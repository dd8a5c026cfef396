"""``python -m benchmarks``: side-by-side tables against the peers and the machine's own limit, and the bars that they
must meet.

Speed is shown, never tested: the exit status is 0.
"""

from __future__ import annotations

import argparse
from typing import Any

import benchmarks.engine  # noqa: F401  # isort: split
from benchmarks import checkpoints, command, compat, files, init, merges, overlap, report, swaps, updates
from benchmarks.measure import Bar


def main() -> None:
    options = _options()
    text: list[str] = []
    bars: list[Bar] = []
    for section, arguments in sections(options.quick, options.rounds, options.only).items():
        results = section.run(**arguments)
        lines = [*section.lines(results), ""]
        print("\n".join(lines))
        text += lines
        bars += section.bars(results)
    text += report.bar_table(bars)
    print("\n".join(report.bar_table(bars)))
    if options.write:
        report.write(text)


def sections(quick: bool, rounds: int, only: str) -> dict[Any, dict[str, Any]]:
    """Returns the arguments of each section's run(), in the order of the page."""
    return {
        updates: {"quick": quick, "rounds": rounds, "only": only},
        compat: {"quick": quick, "rounds": rounds},
        overlap: {"quick": quick, "rounds": rounds},
        swaps: {"width": 64, "layers": 2, "rounds": 1} if quick else {},
        files: {"gib": 0.01, "rounds": 1} if quick else {},
        checkpoints: {"gib": 0.01, "rounds": 1, "kills": 0} if quick else {},
        init: {"width": 64, "layers": 2, "rounds": 1} if quick else {"picture": init.PICTURE},
        merges: {"mib": 4, "rounds": 1} if quick else {},
        command: {"gib": 0.01, "rounds": 1} if quick else {},
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes and few rounds: shows that everything runs, not how fast"
    )
    parser.add_argument(
        "--rounds", type=int, help="rounds of each table of large models; small ones run ten times as many"
    )
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--no-write", dest="write", action="store_false", help="leave docs/performance.md as it is")
    options = parser.parse_args()
    options.rounds = options.rounds or (3 if options.quick else 15)
    return options


if __name__ == "__main__":
    main()
