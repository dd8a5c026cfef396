"""The example of the Trainer, in this process, and with SHARDOW_ALL by torchrun on two ranks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from examples import hf_trainer
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

ALL = bool(os.environ.get("SHARDOW_ALL"))
EXAMPLE = Path(hf_trainer.__file__)


def train(out: Path, world: int) -> float:
    """Returns the loss of the averages, as the Trainer has it."""
    if world == 1:
        return hf_trainer.train(4, out, save_every=2)["eval_loss"]
    flags = ["--steps", "4", "--save-every", "2", "--out", str(out)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    done = subprocess.run([*launcher, EXAMPLE, *flags], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return float(re.findall(r"'eval_loss': '?([0-9.]+)", done.stdout + done.stderr)[-1])


def loss_of(directory: Path) -> float:
    model = LlamaForCausalLM.from_pretrained(directory, local_files_only=True).eval()
    held_out = torch.stack([window["input_ids"] for window in hf_trainer.windows()[:64]])
    with torch.no_grad():
        return float(model(input_ids=held_out, labels=held_out).loss)


@pytest.mark.parametrize("world", [1, 2] if ALL else [1])
def test_the_trainer_evaluates_its_averages_and_goes_on_after_a_stop(world: int, tmp_path: Path) -> None:
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    loss = train(straight, world)
    shutil.copytree(straight / "checkpoint-2", parts / "checkpoint-2")  # as of a run that was stopped after its first
    assert train(parts, world) == loss
    averages, others = (load_file(out / "model" / "model.safetensors") for out in (straight, parts))
    assert averages.keys() == others.keys()
    assert all(torch.equal(averages[name], others[name]) for name in averages)
    exported = loss_of(straight / "model")
    assert loss_of(straight / "checkpoint-4") != pytest.approx(exported, abs=1e-3)
    assert exported < 5.4
    assert exported == pytest.approx(loss, abs=1e-3)
