"""``python -m benchmarks.gpu``: updates, averages on the host, a save and a load on a CUDA device, side by side.

They are the figures of docs/performance.md's section on CUDA.

Updates: device time by events, every candidate once in every round, in an order drawn anew.
The limit is a device copy that moves as many bytes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import shardow
from benchmarks.measure import Step, interleaved, seconds_of
from benchmarks.overlap import BURST, Training, seconds_offloaded
from benchmarks.peers import torch_ways
from benchmarks.updates import DECAYS, Case, all_cases
from shardow import _core

COPY, TIMM = "device copy", "as timm does"
# Shares of the copy's bandwidth that are asked for.
BARS = {"fp32 <- fp32": 0.92, "fp32 <- bf16": 0.92, "4 decays, fp32": 0.92, "4 decays, bf16": 0.92}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    if not (torch.cuda.is_available() and _core.cuda_available()):
        print("no CUDA device answers: nothing to measure")
        return 3
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, medians of {options.rounds} rounds [10th to 90th "
        "percentile]"
    )
    _first()
    for case in all_cases(quick=False):
        if case.threads == 1:
            _updates(case, options.rounds)
    _on_host(options.rounds)
    _files(1 << 30)
    return 0


def _first() -> None:
    """Prints the seconds of the first EMA of a process, for which the kernels are compiled, and of the second."""
    models = [nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    first, second = (seconds_of(lambda model=model: shardow.EMA(model, 0.9).update()) for model in models)  # type: ignore[misc]
    print(f"first EMA and update of a process {first:.2f} s, second {1e3 * second:.2f} ms")


def _updates(case: Case, rounds: int) -> None:
    model = case.model().cuda()
    ema = shardow.EMA(model, list(case.decays))
    foreach = next(torch_ways(case, model))
    moved = sum(p.numel() * (p.element_size() + 8 * case.num_decays) for p in model.parameters())
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    steps: dict[str, Step] = {COPY: lambda: target.copy_(source), "shardow": ema.update, foreach.name: foreach.step}
    size = f"{len(case.shapes)} tensors, {case.elements / 1e6:.1f} M elements"
    print(f"\n{case.name}: {size}, {moved / 1e6:.0f} MB an update")
    for name, timing in interleaved(steps, COPY, rounds, clock=_device_seconds).items():
        bar = f", asked {BARS[case.name]}" if name == "shardow" and case.name in BARS else ""
        low, high = timing.spread
        print(
            f"  {name:<20} {1e3 * timing.median:8.4f} ms  {timing.ratio:.3f} of the copy [{low:.3f} to {high:.3f}]{bar}"
        )
    host = seconds_of(lambda: [ema.update() for _ in range(100)])
    print(f"  host time of an update {1e4 * host:.1f} us")
    torch.cuda.synchronize()


def _device_seconds(step: Step) -> float:
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000)  # the host is ahead when the first event is met
    began.record()
    step()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / 1e3


def _as_timm(model: nn.Module) -> Step:
    """Averages in float32 on the host, tensor by tensor from a copy of each weight there."""
    averages = [p.detach().float().cpu() for p in model.parameters()]

    def step() -> None:
        for average, p in zip(averages, model.parameters(), strict=True):
            average.lerp_(p.detach().to("cpu").float(), 1 - DECAYS[0])

    return step


def _on_host(rounds: int) -> None:
    """A training step with averages on the host: of host time and the device's together, a burst of steps at a time."""
    none, own, device = "no averages", 'shardow, device="cpu"', "shardow on the device"
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    trainings = {name: Training(4096, 16, 8192, **kind) for name in (none, own, device, TIMM)}
    ema = shardow.EMA(trainings[own].model, DECAYS[0], device="cpu", optimizer=trainings[own].optimizer)
    shardow.EMA(trainings[device].model, DECAYS[0], optimizer=trainings[device].optimizer)
    trainings[TIMM].after = _as_timm(trainings[TIMM].model)

    def steps_of(name: str, count: int) -> Step:
        def steps() -> None:
            for _ in range(count):
                trainings[name].step()
            torch.cuda.synchronize()

        return steps

    bursts = {name: steps_of(name, BURST) for name in (none, own, device)}
    timings = interleaved(bursts, none, max(rounds // 3, 2))
    singles = interleaved({name: steps_of(name, 1) for name in (none, TIMM)}, none, 1)  # so that it ends in time
    stats = ema.stats()
    print(f"\na training step, {stats['elements'] / 1e6:.0f} M bfloat16 weights, averages on the host in float32")
    for steps, table in (BURST, timings), (1, {TIMM: singles[TIMM]}):
        for name, timing in table.items():
            print(
                f"  {name:<22} {1e3 * timing.median / steps:8.2f} ms  {1 / timing.ratio:.3f} times a step without "
                "averages"
            )
    hidden, waited = seconds_offloaded(stats)
    crossed = stats["offload/bytes"] / stats["updates"] / stats["elements"]
    print(
        f"  of averaging a step {1e3 * hidden:.2f} ms hidden, {1e3 * waited:.2f} ms waited for; {crossed:.2f} bytes a "
        "weight on the link"
    )


def _files(size: int) -> None:
    """Beside what moves the bytes without a format: a copy to the host and one write, one read and a copy back."""
    tensors = {f"t{i}": torch.randn(size // 16 // 4, device="cuda") for i in range(16)}
    pinned = torch.empty(size // 16 // 4, pin_memory=True)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        path, raw = Path(folder) / "a.safetensors", Path(folder) / "raw"

        def write_raw() -> None:
            with raw.open("wb", buffering=0) as file:
                for tensor in tensors.values():
                    pinned.copy_(tensor)
                    file.write(memoryview(pinned.numpy()).cast("B"))
                os.fsync(file.fileno())

        def read_raw() -> None:
            with raw.open("rb", buffering=0) as file:
                for tensor in tensors.values():
                    file.readinto(memoryview(pinned.numpy()).cast("B"))
                    tensor.copy_(pinned)
            torch.cuda.synchronize()

        print(f"\nfiles, {size / 2**20:.0f} MiB on the device, medians of 3")
        for name, call, peer, raw_call in (
            ("save", lambda: shardow.save(tensors, path), "raw write", write_raw),
            ("load", lambda: shardow.load(tensors, path), "raw read", read_raw),
        ):
            timings = interleaved({peer: raw_call, name: call}, peer, 3)
            ours, theirs = timings[name].median, timings[peer].median
            print(f"  {name} {ours:.2f} s, {peer} {theirs:.2f} s: {ours / theirs:.2f} times")


if __name__ == "__main__":
    sys.exit(main())
