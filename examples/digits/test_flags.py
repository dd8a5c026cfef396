"""--use_bf16, --use_activation_checkpointing, --use_ema and --ema_device, each way.

With SHARDOW_ALL the whole demo runs with them under every sharding.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from safetensors.torch import load_file

import shardow

from . import averages, data
from .options import QUICK, Options, boolean, parse
from .test_digits import demo
from .train import Trainer

SHORT = ["--quick", "--resume-ranks=1", "--steps=6", "--eval-every=3", "--samples=64", "--epochs=1", "--resume-steps=1"]
SMALL = replace(Options(), **{**QUICK, "batch": 8})


def test_words_for_true_and_false() -> None:
    assert all(boolean(word) for word in ("true", "True", "yes", "T", "y", "1"))
    assert not any(boolean(word) for word in ("false", "FALSE", "no", "f", "N", "0"))
    given = parse(
        ["--use_bf16", "yes", "--use_activation_checkpointing", "1", "--use_ema", "true", "--ema_device", "cpu"]
    )
    assert (given.use_bf16, given.use_activation_checkpointing, given.use_ema, given.ema_device) == (
        True,
        True,
        True,
        "cpu",
    )
    assert given.as_text()["use_bf16"] == "true"
    plain = parse([])
    assert (plain.use_bf16, plain.use_activation_checkpointing, plain.use_ema, plain.ema_device) == (
        False,
        False,
        True,
        "",
    )
    assert plain == parse(
        ["--use_bf16", "no", "--use_activation_checkpointing", "0", "--use_ema", "yes", "--ema_device", ""]
    )


@pytest.mark.parametrize("flag", ["--use_bf16", "--use_activation_checkpointing", "--use_ema"])
def test_other_words_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([flag, "maybe"])
    assert "'maybe' is neither true nor false" in capsys.readouterr().err


def test_what_has_no_effect_without_averages_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse(["--use_ema", "false", "--decays", "0.9", "--ema_device", "cuda"])
    assert (options.decays, options.ema_device) == ((), "")
    assert "--decays and --ema_device: without effect" in capsys.readouterr().err


def few_steps(choices: list[Options]) -> list[dict[str, Any]]:
    found = []
    for options in choices:
        trainer = Trainer(options, data.load(), seed=0)
        for _ in range(3):
            trainer.step()
        device = (
            None
            if trainer.ema is None
            else {tensor.device.type for tensor in trainer.ema._averages.averages().values()}
        )
        found.append(
            {"weights": averages.weights_hash(trainer.model, options), "device": device, "steps": trainer.steps_done}
        )
    return found


def test_training_with_each_flag_each_way() -> None:
    """Checkpointed blocks change no bit of the weights, bfloat16 does; averages change nothing, wherever they are."""
    flags = list(product((False, True), repeat=2))
    choices = [replace(SMALL, use_bf16=bf16, use_activation_checkpointing=again) for bf16, again in flags]
    choices += [replace(SMALL, use_ema=False, decays=()), replace(SMALL, ema_device="cpu")]
    found, _ = ranks.run(2, few_steps, choices)
    plain, checkpointed, bf16, both, without, on_cpu = (one["weights"] for one in found)
    assert plain == checkpointed == without == on_cpu
    assert plain != bf16 == both
    assert [one["device"] for one in found] == [{"cpu"}] * 4 + [None, {"cpu"}]
    assert {one["steps"] for one in found} == {3}


def refused() -> str:
    with pytest.raises(shardow.errors.UnsupportedError) as raised:
        Trainer(replace(SMALL, ema_device="cuda"), data.load(), seed=0)
    return str(raised.value)


def test_averages_on_another_kind_of_device_are_refused_before_training() -> None:
    assert "averages live with their weights" in ranks.run(1, refused)[0]


def finishes(out: Path, *flags: str) -> dict[str, Any]:
    done = demo(*SHORT, *flags, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "what was saved came back bit for bit on 1 rank" in done.stdout
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    for one in found["train"]["memory"].values():
        assert abs(one["planned"] - one["measured"]) <= 0.1 * one["measured"], found["train"]["memory"]
    return found


@pytest.mark.skipif(not os.environ.get("SHARDOW_ALL"), reason="the demo runs with averages: SHARDOW_ALL=1")
def test_without_averages_everything_runs_to_the_end(tmp_path: Path) -> None:
    """Training, evaluations, saving, the resume and the report; the scripts that the flag is from stop at an unbound
    name.

    Both other switches are on.
    """
    switches = ("--use_bf16", "true", "--use_activation_checkpointing", "true")
    found = finishes(tmp_path, "--ranks", "1", "--use_ema", "false", *switches)
    train, resume = found["train"], found["resume"]
    assert resume["file_hashes"] == []
    assert len(train["hashes"]) == 1  # of the weights
    assert train["hashes"] == resume["hashes"] != resume["before"]
    assert train["memory"]["averages"] == {"planned": 0, "measured": 0}
    assert [list(one["frechet"]) for one in train["evaluations"]] == [["raw weights"]] * len(train["evaluations"])
    assert not (tmp_path / "averages").exists()
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert sum(tensor.numel() for tensor in exported.values()) == train["parameters"]
    assert all(torch.isfinite(tensor).all() for tensor in exported.values())
    assert "averages" not in (tmp_path / "report.html").read_text().split("<main>")[1].split("</h1>")[0].replace(
        "without averages", ""
    )


@pytest.mark.skipif(
    not os.environ.get("SHARDOW_ALL"), reason="of the wider matrix: SHARDOW_ALL=1, as make test-all sets it"
)
@pytest.mark.parametrize(
    ("shard", "bf16", "again", "ema"),
    [
        ("fsdp2", "true", "false", "true"),
        ("fsdp2", "false", "true", "true"),
        *product(("fsdp2", "fsdp1", "ddp", "plain"), ["true"], ["true"], ("true", "false")),
    ],
)
def test_combinations_run_to_the_end(tmp_path: Path, shard: str, bf16: str, again: str, ema: str) -> None:
    flags = (
        "--use_bf16",
        bf16,
        "--use_activation_checkpointing",
        again,
        "--use_ema",
        ema,
        "--ema_device",
        "cpu" if ema == "true" else "",
    )
    finishes(tmp_path, *flags, "--shard", shard)
