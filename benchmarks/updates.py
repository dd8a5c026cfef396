"""Updates of every case beside torch's own ways and the peers, as shares of the machine's limit; and what an EMA costs
before its first step: the import, and construction beyond the copy that it must make."""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

import shardow
from benchmarks.measure import Bar, Timing, at_least, at_most, interleaved
from benchmarks.peers import TEACHER, Candidate, candidates, limit
from benchmarks.report import table

DECAYS = (0.999, 0.9995, 0.9999, 0.9998)


@dataclass(frozen=True)
class Case:
    """One column of a table. ``num_decays`` averages of each parameter at once, on ``threads`` threads."""

    name: str
    shapes: Sequence[tuple[int, ...]]
    dtype: torch.dtype
    num_decays: int = 1
    threads: int = 1

    @property
    def decays(self) -> tuple[float, ...]:
        return DECAYS[: self.num_decays]

    @property
    def elements(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    def rounds(self, rounds: int) -> int:
        """Returns ten times as many where a round is short."""
        return rounds * (10 if self.elements < 10_000_000 else 1)

    def model(self) -> nn.Module:
        generator = torch.Generator().manual_seed(0)
        return nn.ParameterList(
            [nn.Parameter(torch.randn(shape, generator=generator).mul_(0.02).to(self.dtype)) for shape in self.shapes]
        )


def transformer(layers: int = 12, width: int = 768) -> list[tuple[int, ...]]:
    """The blocks of GPT-2 small: 85 M elements in 146 tensors."""
    vector: tuple[int, ...] = (width,)
    attention = [vector, vector, (3 * width, width), (3 * width,), (width, width), vector]
    mlp = [vector, vector, (4 * width, width), (4 * width,), (width, 4 * width), vector]
    return (attention + mlp) * layers + [vector, vector]


def many_small(count: int = 2000) -> list[tuple[int, ...]]:
    """Sizes from 64 to 2000 elements, log-uniform."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.rand(count, generator=generator).mul(torch.tensor(2000 / 64).log()).exp().mul(64).long()
    return [(int(size),) for size in sizes]


def all_cases(quick: bool) -> list[Case]:
    large = transformer(2, 128) if quick else transformer()
    small = many_small(200 if quick else 2000)
    return [
        Case("fp32 <- fp32", large, torch.float32),
        Case("fp32 <- fp32, 2 threads", large, torch.float32, threads=2),
        Case("fp32 <- bf16", large, torch.bfloat16),
        Case("4 decays, fp32", large, torch.float32, num_decays=4),
        Case("4 decays, bf16", large, torch.bfloat16, num_decays=4),
        Case("2000 small tensors", small, torch.float32),
    ]


# ---- the table


LIMIT = "the machine's limit"
IMPORT, WHOLE, BEYOND = "import shardow", "EMA(...) of the small tensors", "of it beyond the copy"
TORCH = ("torch foreach", "mul_()")


@dataclass
class Results:
    timings: dict[str, dict[str, Timing]] = field(default_factory=dict)  # by case and candidate
    notes: dict[tuple[str, str], str] = field(default_factory=dict)  # by the same
    started: dict[str, float] = field(default_factory=dict)  # seconds

    def over_torch(self, case: str, rivals: tuple[str, ...] = TORCH) -> float:
        """Returns the speed over that of the best rival, whose names begin so."""
        timings = self.timings[case]
        best = max(timing.ratio for name, timing in timings.items() if name.startswith(rivals))
        return timings["shardow"].ratio / best


def run(quick: bool = False, rounds: int = 15, only: str = "") -> Results:
    results = Results()
    cases = all_cases(quick)
    for case in cases:
        if only in case.name:
            measure(case, case.rounds(rounds), results)
    results.started = start_up(cases[-1], rounds)
    return results


def measure(case: Case, rounds: int, results: Results) -> None:
    torch.set_num_threads(case.threads)
    model = case.model()
    known = list(candidates(case, model))
    results.notes |= {(case.name, candidate.name): candidate.note for candidate in known if candidate.note}
    steps = {LIMIT: limit(case, model), **{candidate.name: candidate.step for candidate in known}}
    results.timings[case.name] = interleaved(steps, LIMIT, rounds)
    check(model, known)
    del known, steps
    gc.collect()


def check(model: nn.Module, known: list[Candidate]) -> None:
    """Exits where a candidate was timed at other work: after weights that move, one more step moves all averages
    alike."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    for candidate in known:
        before = candidate.averages()[0].detach().clone()
        candidate.step()
        moved = candidate.averages()[0].detach().float() - before.float()
        weight = moved.norm() / (next(iter(model.parameters())).detach().float() - before.float()).norm()
        if not candidate.note.startswith("averages in bf16") and not 0.5e-3 < float(weight) < 2e-3:
            sys.exit(
                f"{candidate.name} moved its averages by {float(weight):.2e} of the way, not by 1e-3: it is not timed "
                "at the same work"
            )


def start_up(case: Case, tries: int) -> dict[str, float]:
    """Returns medians of seconds; EMA(model) and a copy of all parameters in float32 are interleaved."""
    code = "import time; began = time.perf_counter(); import shardow; print(time.perf_counter() - began)"
    program = [sys.executable, "-c", code]
    imports = [float(subprocess.run(program, check=True, capture_output=True).stdout) for _ in range(tries)]
    model = case.model()
    whole, beyond = [], []
    for _ in range(tries):
        gc.collect()
        began = time.perf_counter()
        ema = shardow.EMA(model, threads=1)
        made = time.perf_counter()
        copies = [p.detach().to(torch.float32, copy=True) for p in model.parameters()]
        whole.append(made - began)
        beyond.append(whole[-1] - (time.perf_counter() - made))
        del ema, copies
    return {IMPORT: statistics.median(imports), WHOLE: statistics.median(whole), BEYOND: statistics.median(beyond)}


def lines(results: Results) -> list[str]:
    notes = list(dict.fromkeys(results.notes.values()))

    def cell(case: str, name: str) -> str:
        timing, note = results.timings[case].get(name), results.notes.get((case, name))
        return (timing.cell if timing else "") + (f" [{notes.index(note) + 1}]" if note else "")

    cases = list(results.timings)
    names = dict.fromkeys(name for timings in results.timings.values() for name in timings)
    rows = [[name, *(cell(case, name) for case in cases)] for name in names]
    started = [(what, f"{seconds * 1e3:.1f}") for what, seconds in results.started.items()]
    return [
        *table(["share of the limit's speed", *cases], rows),
        "",
        *(f"{number}. {note}" for number, note in enumerate(notes, 1)),
        "",
        *table(["start-up", "milliseconds, median"], started),
    ]


def bars(results: Results) -> list[Bar]:
    """Returns what DESIGN asks of updates on a CPU, of the cases that were run."""
    timings, asked = results.timings, []
    for case, fastest in [
        ("fp32 <- fp32", 1.0),
        ("fp32 <- bf16", 2.0),
        ("4 decays, fp32", 1.5),
        ("4 decays, bf16", 3.0),
    ]:
        if case in timings:
            asked.append(at_least(f"{case}: of the limit", timings[case]["shardow"].ratio, 0.95))
            asked.append(at_least(f"{case}: times the best torch way", results.over_torch(case), fastest))
        if TEACHER in timings.get(case, {}):
            without = timings[case]["shardow"].ratio / timings[case][TEACHER].ratio
            asked.append(at_most(f"{case}: a teacher's update, times one without a teacher", without, 1.05))
            foreach = timings[case][TEACHER].ratio / timings[case]["torch foreach lerp"].ratio
            asked.append(at_least(f"{case}: a teacher's update, times DINOv3's foreach lerp", foreach, 1.0))
    if (case := "fp32 <- fp32, 2 threads") in timings:
        rivals = (*TORCH, "AveragedModel")
        asked.append(at_least(f"{case}: times the best torch way", results.over_torch(case, rivals), 1.0))
    if (case := "2000 small tensors") in timings:
        asked.append(at_least(f"{case}: of the limit", timings[case]["shardow"].ratio, 0.55))
        lerp, averaged = (results.over_torch(case, (name,)) for name in ("torch foreach lerp", "AveragedModel"))
        asked.append(at_least(f"{case}: times foreach lerp", lerp, 2.5))
        asked.append(at_least(f"{case}: times AveragedModel", averaged, 10.0))
    for what, most in [(IMPORT, 0.05), (BEYOND, 0.1)]:
        asked.append(at_most(f"{what}, seconds", results.started[what], most))
    return asked
