"""``python -m benchmarks``: side-by-side tables against the peers and the machine's own limit, and the bars that they
must meet.

Speed is shown, never tested: the exit status is 0.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

import benchmarks.engine  # noqa: F401  # isort: split
from benchmarks import checkpoints, command, files, init, machine, merges, overlap, report, startup, surfaces
from benchmarks.cases import Case, all_cases
from benchmarks.measure import Timing, interleaved
from benchmarks.peers import Candidate, candidates, limit

LIMIT = "the machine's limit"


def main() -> None:
    options = _options()
    results: dict[str, dict[str, Timing]] = {}
    notes: dict[str, str] = {}
    for case in all_cases(options.quick):
        if options.only in case.name:
            results[case.name] = run(case, options.rounds, notes)
            report.print_case(case, results[case.name], notes)
    started = start_up(all_cases(options.quick)[-1], 3 if options.quick else 15)
    text: list[str] = []
    bars = report.bars(results, started)
    for section, measure in sections(options.quick, options.rounds).items():
        found = measure()
        print("\n".join(section.lines(found)))
        text += [*section.lines(found), ""]
        bars += section.bars(found)
    report.print_bars(bars)
    if options.write:
        report.write(machine.facts(), results, notes, started, text[:-1], bars)


def sections(quick: bool, rounds: int) -> dict[Any, Callable[[], Any]]:
    """Modules that have lines() and bars() of what they measure, in the order of the page."""
    picture = report.PAGE.parent / "pictures" / "init.png"
    return {
        surfaces: lambda: surfaces.run(quick, rounds),
        overlap: lambda: overlap.run(quick, rounds),
        files: lambda: files.run(0.01, 1) if quick else files.run(1.0, 5),
        checkpoints: lambda: checkpoints.run(0.01, 1, 0) if quick else checkpoints.run(1.0, 5, 10),
        init: lambda: init.run(64, 2, 1) if quick else init.run(init.WIDTH, init.LAYERS, 5, picture=picture),
        merges: lambda: merges.run(4, 10, 1) if quick else merges.run(512, 10, 5),
        command: lambda: command.run(0.01, 1) if quick else command.run(1.0, 5),
    }


def run(case: Case, rounds: int, notes: dict[str, str]) -> dict[str, Timing]:
    torch.set_num_threads(case.threads)
    model = case.model()
    known: list[Candidate] = list(candidates(case, model))
    notes.update({f"{case.name}/{one.name}": one.note for one in known if one.note})
    many = rounds * (10 if case.elements < 10_000_000 else 1)
    timings = interleaved([(LIMIT, limit(case, model)), *((one.name, one.step) for one in known)], LIMIT, many)
    check(model, known)
    del known
    gc.collect()
    return timings


def check(model: torch.nn.Module, known: list[Candidate]) -> None:
    """Nobody was timed doing something else: weights that move, then one more step, give the same averages
    everywhere."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    for one in known:
        before = one.averages()[0].detach().clone()
        one.step()
        moved = one.averages()[0].detach().float() - before.float()
        weight = moved.norm() / (next(iter(model.parameters())).detach().float() - before.float()).norm()
        if not one.note.startswith("averages in bf16") and not 0.5e-3 < float(weight) < 2e-3:
            sys.exit(
                f"{one.name} moved its averages by {float(weight):.2e} of the way, not by 1e-3: it is not timed at "
                "the same work"
            )


def start_up(small: Case, tries: int) -> dict[str, float]:
    whole, copies = startup.construction_seconds(small, tries)
    return {
        "import shardow": statistics.median(startup.import_seconds(tries)),
        "EMA(...) of the small tensors": statistics.median(whole),
        "of it beyond the copy": startup.beyond_the_copy(whole, copies),
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
