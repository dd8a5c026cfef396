"""The scripts that people copy, on two ranks.

They learn, their averages are averages, and what was stopped or killed goes on as if it had not been.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ranks
import torch
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from . import dcp_async, ddp, dino, fsdp2, inference, language_model

HERE = Path(__file__).parent
ALL = bool(os.environ.get("SHARDOW_ALL"))
Exported = dict[str, torch.Tensor]
Straight = tuple[Path, dict[str, float], Exported]
Train = Callable[..., dict[str, float]]


def start(script: str, *flags: object, world: int = 2) -> subprocess.Popen[str]:
    """As its first lines say."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    words = [*command, str(HERE / script), *map(str, flags)]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def finish(run: subprocess.Popen[str]) -> str:
    said, _ = run.communicate(timeout=240)
    assert run.returncode == 0, said
    return said


def exported(out: Path) -> Exported:
    return load_file(out / "model" / "model.safetensors")


def equal(one: Exported, other: Exported) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def averaged_by_hand(steps: int, out: Path) -> tuple[dict[str, float], Exported]:
    """ddp.py, with the formula of its schedule in float64 beside it."""
    averages: list[torch.Tensor] = []
    count = 0

    def begin(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not averages:
            averages.extend(weight.detach().double() for weight in optimizer.param_groups[0]["params"])

    def follow(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal count
        count += 1
        for average, weight in zip(averages, optimizer.param_groups[0]["params"], strict=True):
            average.lerp_(weight.detach().double(), 1 - min(0.999, (1 + count) / (10 + count)))

    hooks = [register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(follow)]
    try:
        results = ddp.train(steps, out)
    finally:
        for hook in hooks:
            hook.remove()
    names = [f"{layer}.{kind}" for layer in (0, 2, 5) for kind in ("weight", "bias")]
    return results, dict(zip(names, averages, strict=True))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """ddp.py without an interruption: where, its results, and its averages by hand."""
    out = tmp_path_factory.mktemp("straight")
    return out, *ranks.run(2, averaged_by_hand, 250, out)[0]


def test_ddp_learns_and_its_averages_are_those_of_the_formula(straight: Straight) -> None:
    out, results, by_hand = straight
    assert min(results.values()) > 0.85, results
    averages = exported(out)
    assert averages.keys() == by_hand.keys()
    for name, average in averages.items():
        torch.testing.assert_close(average.double(), by_hand[name], rtol=0, atol=1e-6, msg=name)
    assert sorted(path.name for path in out.iterdir()) == ["model", "step-000100", "step-000200", "step-000250"]


def test_inference_reads_an_export_and_the_averages_of_a_step_on_any_number_of_ranks(straight: Straight) -> None:
    out, results, _ = straight
    digits = inference.named(out / "model")
    labels = ddp.load_digits().target[:300].tolist()
    assert sum(map(int.__eq__, digits, labels)) / 300 == pytest.approx(results["averages"])
    assert inference.named(out / "step-000250" / "averages.safetensors") == digits
    assert inference.named(out / "step-000100" / "averages.safetensors") != digits
    assert ranks.run(2, inference.named, out / "model") == [digits] * 2
    assert sum(map(int.__ne__, inference.named(out / "model", torch.bfloat16), digits)) < 10


def killed(script: str, steps: int, out: Path, written: str) -> None:
    """Runs a script as a program until its first checkpoint is written."""
    run = start(script, "--steps", steps, "--out", out)
    while not list(out.glob(written)):
        assert run.poll() is None, finish(run)
        time.sleep(0.01)
    for process in (psutil.Process(run.pid), *psutil.Process(run.pid).children()):
        process.kill()
    run.communicate()
    assert not (out / "model").exists()


def test_ddp_goes_on_after_it_was_killed_as_if_it_had_not_been(straight: Straight, tmp_path: Path) -> None:
    killed("ddp.py", 250, tmp_path, "step-*/train.pt")
    ranks.run(2, partial(ddp.train, 250, tmp_path))
    assert equal(exported(tmp_path), exported(straight[0]))


def in_two_parts(script: str, train: Train, steps: int, out: Path, **options: object) -> dict[str, float]:
    """The results of a run that nothing stops. A second one, stopped halfway, goes on to the same averages, with
    SHARDOW_ALL as a program of its own.
    """
    found: dict[str, float] = ranks.run(2, partial(train, steps, out / "straight", **options))[0]
    ranks.run(2, partial(train, steps // 2, out / "parts", **options))
    halfway = exported(out / "parts")
    if ALL:
        flags = (f"--{name}={value}" for name, value in options.items())
        finish(start(script, "--steps", steps, "--out", out / "parts", *flags))
    else:  # ddp.py is started by torchrun, whose processes take 6 s each to import all
        ranks.run(2, partial(train, steps, out / "parts", **options))
    assert equal(exported(out / "parts"), exported(out / "straight"))
    assert not equal(halfway, exported(out / "straight"))
    return found


def test_fsdp2_goes_on_after_a_stop_and_on_another_number_of_ranks(tmp_path: Path) -> None:
    results = in_two_parts("fsdp2.py", fsdp2.train, 30, tmp_path)
    assert results["weights"] > 0.5, results
    straight = exported(tmp_path / "straight")
    (tmp_path / "straight" / "model" / "model.safetensors").unlink()
    ranks.run(3, fsdp2.train, 30, tmp_path / "straight")  # no step is left: these are the averages that were loaded
    assert equal(exported(tmp_path / "straight"), straight)


def test_dinos_teacher_learns_and_goes_on_after_it_was_killed(tmp_path: Path) -> None:
    results = ranks.run(2, dino.train, 60, tmp_path / "straight")[0]
    assert results["after"] > results["before"] + 0.05, results
    if ALL:
        killed("dino.py", 300, tmp_path / "killed", "step-*/checkpoint.json")
    else:  # ddp.py is killed
        shutil.copytree(tmp_path / "straight/step-000000050", tmp_path / "killed/step-000000050")
    assert ranks.run(2, dino.train, 60, tmp_path / "killed")[0] == results
    assert equal(exported(tmp_path / "killed"), exported(tmp_path / "straight"))


def test_dcp_goes_on_after_a_stop_and_on_another_number_of_ranks(tmp_path: Path) -> None:
    straight = ranks.run(2, dcp_async.train, 30, tmp_path / "straight")[0]
    assert straight["weights"] > 0.5, straight
    assert straight["weights"] != straight["averages"]
    ranks.run(2, dcp_async.train, 15, tmp_path / "parts")
    ranks.run(2, dcp_async.train, 30, tmp_path / "parts")
    assert equal(exported(tmp_path / "parts"), exported(tmp_path / "straight"))
    (tmp_path / "parts" / "model" / "model.safetensors").unlink()
    ranks.run(3, dcp_async.train, 30, tmp_path / "parts")  # no step is left
    assert equal(exported(tmp_path / "parts"), exported(tmp_path / "straight"))


@pytest.mark.skipif(not ALL, reason="fsdp2.py goes on in the same way: SHARDOW_ALL=1")
def test_the_language_model_goes_on_after_a_stop(tmp_path: Path) -> None:
    in_two_parts("language_model.py", language_model.train, 12, tmp_path, context=8)


def test_the_language_model_learns(tmp_path: Path) -> None:
    results = ranks.run(2, partial(language_model.train, 8, tmp_path, context=8))[0]
    assert max(results.values()) < 5, results  # a model that has learned nothing needs 8
    assert results["weights"] != results["averages"]
    assert sum(tensor.numel() for tensor in exported(tmp_path).values()) > 10_000_000
