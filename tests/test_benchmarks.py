"""The benchmarks run from end to end, with every peer doing the same work; how fast is not tested."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PERFORMANCE = ROOT / "docs" / "performance.md"

#: Candidates and bars that each prints.
SHOWN = {
    ("benchmarks", "--quick", "--rounds", "1", "--no-write"): [
        "torch foreach lerp",
        "the sources",
        "AveragedModel",
        "timm ModelEmaV3",
        "diffusers EMAModel",
        "ema-pytorch",
        "torch-ema",
        "limit",
        "save: times raw pwrite",
        "load: times DCP's HF reader",
        "times foreach lerp",
        "times AveragedModel",
        "import shardow",
        "beyond the copy",
        "compat classes, 2000 small tensors: the slowest",
        "Causal-Forcing EMA_FSDP",
        "ema-pytorch EMA, foreach",
        "Automodel ShardedModelEMAManager",
        "init from a file: MiB",
        "init from a file: bytes read",
        "init from rank 0: MiB",
        "init from rank 0: bytes received",
        "every rank loads the whole",
        "every rank maps the whole",
        "accelerate, fsdp2_load",
        "set_model_state_dict, broadcast_from_rank0",
        "shardow: by initialisation",
        "shardow, overlap=True",
        "store(), copy_to(), restore() of diffusers",
        "averages gathered into a whole model",
        "get_model_state_dict(full",
        "shardow, a teacher's averages",
        "overlap: a step with averages, times one without",
        "checkpoint: blocked, times the best",
        "checkpoint: durable, times DCP",
        "torch_checkpointing, asynchronous",
    ],
    ("benchmarks.scale", "processes", "--sizes", "2"): [
        "agree ",
        "elastic's barrier",
        "elastic's synchronize",
        "monitored_barrier",
        "all_gather_object",
        "save ",
        "load ",
    ],
}


@pytest.mark.parametrize("arguments", SHOWN, ids=lambda arguments: arguments[0])
def test_benchmarks_show_every_candidate_and_bar(arguments: tuple[str, ...]) -> None:
    before = PERFORMANCE.read_bytes()
    command = [sys.executable, "-W", "error::UserWarning", "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert [name for name in SHOWN[arguments] if name not in done.stdout] == []
    assert PERFORMANCE.read_bytes() == before
