"""``python -m benchmarks``: side-by-side tables against the peers and the machine's own limit, and the bars that they must meet.

Speed is shown, never tested: the exit status is 0.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys

import torch

from benchmarks import checkpoints, files, init, machine, merges, overlap, report, startup, surfaces
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
    beside = surfaces.run(options.quick, options.rounds)
    print("\n".join(surfaces.lines(beside)))
    saved = files.run(0.01 if options.quick else 1.0, 1 if options.quick else 5)
    print("\n".join(files.lines(saved)))
    kept = checkpoints.run(0.01, 1, 0) if options.quick else checkpoints.run(1.0, 5, 10)
    print("\n".join(checkpoints.lines(kept)))
    begun = (
        init.run(64, 2, 1) if options.quick else init.run(init.WIDTH, init.LAYERS, 5, picture=report.PAGE.parent / "pictures" / "init.png")
    )
    print("\n".join(init.lines(begun)))
    overlapped = overlap.run(options.quick, options.rounds)
    print("\n".join(overlap.lines(overlapped)))
    averaged = merges.run(4, 10, 1) if options.quick else merges.run(512, 10, 5)
    print("\n".join(merges.lines(averaged)))
    bars = (
        report.bars(results, started)
        + surfaces.bars(beside)
        + overlap.bars(overlapped)
        + files.bars(saved)
        + checkpoints.bars(kept)
        + init.bars(begun)
        + merges.bars(averaged)
    )
    report.print_bars(bars)
    if options.write:
        report.write(
            machine.facts(),
            results,
            notes,
            started,
            [
                *surfaces.lines(beside),
                "",
                *overlap.lines(overlapped),
                "",
                *files.lines(saved),
                "",
                *checkpoints.lines(kept),
                "",
                *init.lines(begun),
                "",
                *merges.lines(averaged),
            ],
            bars,
        )


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
    """Nobody was timed doing something else: weights that move, then one more step, give the same averages everywhere."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    for one in known:
        before = one.averages()[0].detach().clone()
        one.step()
        moved = one.averages()[0].detach().float() - before.float()
        weight = moved.norm() / (next(iter(model.parameters())).detach().float() - before.float()).norm()
        if not one.note.startswith("averages in bf16") and not 0.5e-3 < float(weight) < 2e-3:
            sys.exit(f"{one.name} moved its averages by {float(weight):.2e} of the way, not by 1e-3: it is not timed at the same work")


def start_up(small: Case, tries: int) -> dict[str, float]:
    whole, copies = startup.construction_seconds(small, tries)
    return {
        "import shardow": statistics.median(startup.import_seconds(tries)),
        "EMA(...) of the small tensors": statistics.median(whole),
        "of it beyond the copy": startup.beyond_the_copy(whole, copies),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds: shows that everything runs, not how fast")
    parser.add_argument("--rounds", type=int, help="rounds of each table of large models; small ones run ten times as many")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--no-write", dest="write", action="store_false", help="leave docs/performance.md as it is")
    options = parser.parse_args()
    options.rounds = options.rounds or (3 if options.quick else 15)
    return options


if __name__ == "__main__":
    main()
