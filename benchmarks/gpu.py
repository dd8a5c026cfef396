"""``python -m benchmarks.gpu``: updates, averages on the host, a save and a load on a CUDA device, side by side.

They are the figures of docs/performance.md's section on CUDA.

Updates: device time by events, every candidate once in every round, in an order drawn anew.
The limit is a device copy that moves as many bytes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import shardow
from benchmarks.cases import DECAYS, Case, all_cases
from benchmarks.overlap import BURST, Training
from shardow import _core

Step = Callable[[], object]
BARS = {
    "fp32 <- fp32": 0.92,
    "fp32 <- bf16": 0.92,
    "4 decays, fp32": 0.92,
    "4 decays, bf16": 0.92,
}  # of the copy's bandwidth
SLOW = ("as timm does", "as diffusers does")  # measured in one round alone, so that `make gpu` ends in time


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="small cases")
    options = parser.parse_args()
    if not (torch.cuda.is_available() and _core.cuda_available()):
        print("no CUDA device answers: nothing to measure")
        return 3
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, medians of {options.rounds} rounds [10th to 90th "
        "percentile]"
    )
    for case in all_cases(options.quick):
        if case.threads == 1:
            _updates(case, options.rounds)
    _on_host(options.quick, options.rounds)
    _files(1 << (24 if options.quick else 30))
    return 0


def _updates(case: Case, rounds: int) -> None:
    model = case.model().cuda()
    ema = shardow.EMA(model, decay=list(case.decays) if case.num_decays > 1 else case.decays[0])
    weights = [p.detach() for p in model.parameters()]
    averages = [[p.float() for p in weights] for _ in case.decays]
    moved = sum(p.numel() * (p.element_size() + 8 * case.num_decays) for p in weights)
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def foreach() -> None:
        now = weights if weights[0].dtype == torch.float32 else [p.float() for p in weights]
        for decay, kept in zip(case.decays, averages, strict=True):
            torch._foreach_lerp_(kept, now, 1 - decay)

    steps: dict[str, Step] = {
        "device copy": lambda: target.copy_(source),
        "shardow": ema.update,
        "torch foreach lerp": foreach,
    }
    seconds = _interleaved(steps, rounds)
    limit = seconds["device copy"]
    print(
        f"\n{case.name}: {len(weights)} tensors, {case.elements / 1e6:.1f} M elements, {moved / 1e6:.0f} MB an update"
    )
    for name, own in seconds.items():
        ratios = sorted(a / b for a, b in zip(limit, own, strict=True))
        bar = f", asked {BARS[case.name]}" if name == "shardow" and case.name in BARS else ""
        low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
        print(
            f"  {name:<20} {1e3 * statistics.median(own):8.4f} ms  "
            f"{statistics.median(ratios):.3f} of the copy [{low:.3f} to {high:.3f}]{bar}"
        )
    began = time.perf_counter()
    for _ in range(100):
        ema.update()
    print(f"  host time of an update {1e4 * (time.perf_counter() - began):.1f} us")
    torch.cuda.synchronize()


def _interleaved(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    for step in steps.values():
        step()
        step()
    shuffle, order = random.Random(0), list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            torch.cuda._sleep(200_000)  # the host is ahead when the first event is met
            began.record()
            steps[name]()
            ended.record()
            torch.cuda.synchronize()
            seconds[name].append(began.elapsed_time(ended) / 1e3)
    return seconds


def _steps(training: Training) -> None:
    for _ in range(BURST):
        training.step()
    torch.cuda.synchronize()


def _as_timm(model: nn.Module) -> Step:
    """ModelEmaV3(device="cpu"): tensor by tensor, in the weights' dtype there; in float32 here."""
    averages = [p.detach().float().cpu() for p in model.parameters()]

    def update() -> None:
        for average, p in zip(averages, model.parameters(), strict=True):
            average.lerp_(p.detach().to("cpu").float(), 1 - DECAYS[0])

    return update


def _as_diffusers(model: nn.Module) -> Step:
    """EMAModel.to("cpu")."""
    averages = [p.detach().float().cpu() for p in model.parameters()]

    def update() -> None:
        for average, p in zip(averages, model.parameters(), strict=True):
            average.sub_((1 - DECAYS[0]) * (average - p.detach().to("cpu")))

    return update


def _on_host(quick: bool, rounds: int) -> None:
    """A training step with averages on the host: of host time and the device's together, a burst of steps at a time."""
    none, own = "no averages", 'shardow, device="cpu"'
    trainings = {
        name: Training(*((256, 2, 64) if quick else (4096, 16, 8192)), device="cuda", dtype=torch.bfloat16)
        for name in (none, own, "shardow on the device", "as timm does", "as diffusers does")
    }
    ema = shardow.EMA(trainings[own].model, DECAYS[0], device="cpu", optimizer=trainings[own].optimizer)
    shardow.EMA(
        trainings["shardow on the device"].model, DECAYS[0], optimizer=trainings["shardow on the device"].optimizer
    )
    trainings["as timm does"].after = _as_timm(trainings["as timm does"].model)
    trainings["as diffusers does"].after = _as_diffusers(trainings["as diffusers does"].model)
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    shuffle, order = random.Random(0), list(trainings)
    for at in range(max(rounds // 3, 2) + 1):
        shuffle.shuffle(order)
        for name in order:
            if at > 1 and name in SLOW:
                continue
            began = time.perf_counter()
            _steps(trainings[name])
            if at:  # the first one warms up
                seconds[name].append((time.perf_counter() - began) / BURST)
    stats = ema.stats()
    print(f"\na training step, {stats['elements'] / 1e6:.0f} M bfloat16 weights, averages on the host in float32")
    for name, taken in seconds.items():
        ratios = sorted(a / b for a, b in zip(taken, seconds[none], strict=False))
        print(
            f"  {name:<22} {1e3 * statistics.median(taken):8.2f} ms  {statistics.median(ratios):.3f} times a step "
            "without averages"
        )
    hidden, waited = (stats[f"offload/{one}_seconds"] / stats["updates"] for one in ("hidden", "waited"))
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
            import os

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

        seconds: dict[str, list[float]] = {}
        steps: dict[str, Step] = {
            "raw write": write_raw,
            "save": lambda: shardow.save(tensors, path),
            "raw read": read_raw,
            "load": lambda: shardow.load(tensors, path),
        }
        for _ in range(4):
            for name, step in steps.items():
                began = time.perf_counter()
                step()
                seconds.setdefault(name, []).append(time.perf_counter() - began)
    middle = {name: statistics.median(own[1:]) for name, own in seconds.items()}
    print(f"\nfiles, {size / 2**20:.0f} MiB on the device, medians of 3")
    for name, peer in (("save", "raw write"), ("load", "raw read")):
        print(f"  {name} {middle[name]:.2f} s, {peer} {middle[peer]:.2f} s: {middle[name] / middle[peer]:.2f} times")


if __name__ == "__main__":
    sys.exit(main())
