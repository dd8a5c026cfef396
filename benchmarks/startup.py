"""What an EMA costs before its first step: the import, and construction beyond the copy that it must make."""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import time

import torch

import shardow
from benchmarks.cases import Case


def import_seconds(tries: int) -> list[float]:
    code = "import time; began = time.perf_counter(); import shardow; print(time.perf_counter() - began)"
    return [
        float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
        for _ in range(tries)
    ]


def construction_seconds(case: Case, tries: int) -> tuple[list[float], list[float]]:
    """(EMA(model), a copy of all parameters in float32), interleaved."""
    model = case.model()
    whole, copies = [], []
    for _ in range(tries):
        gc.collect()
        began = time.perf_counter()
        ema = shardow.EMA(model, threads=1)
        whole.append(time.perf_counter() - began)
        began = time.perf_counter()
        copied = [p.detach().to(torch.float32, copy=True) for p in model.parameters()]
        copies.append(time.perf_counter() - began)
        del ema, copied
    return whole, copies


def beyond_the_copy(whole: list[float], copies: list[float]) -> float:
    return statistics.median(a - b for a, b in zip(whole, copies, strict=True))
