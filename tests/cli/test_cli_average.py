"""`shardow average` against sums in numpy's float64; the engine's own tests go deeper."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import foreign, ours, run, tensors, told, told_json
from safetensors.numpy import load_file

STEPS = [100, 250, 900]


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    return [foreign(tmp_path / f"step-{step}.safetensors", tensors(step, (7, 5000))) for step in STEPS]


def agrees(path: Path, inputs: list[Path], weights: list[float]) -> None:
    parts = [load_file(one) for one in inputs]
    for name, value in load_file(path).items():
        exact = sum(weight * part[name].astype(np.float64) for weight, part in zip(weights, parts, strict=True))
        assert np.abs(value - exact).max() <= np.spacing(np.abs(exact).max().astype(np.float32)) / 2
    assert sorted(load_file(path)) == sorted(parts[0])


def curve(f: Any) -> list[float]:
    u = (np.array(STEPS) - STEPS[0]) / (STEPS[-1] - STEPS[0])
    means = [np.mean(f(np.linspace(a, b, 200_001))) for a, b in itertools.pairwise(u)]
    return [1 - means[0], means[0] - means[1], means[1]]


@pytest.mark.parametrize(
    ("words", "weights"),
    [
        ([], [1 / 3] * 3),
        (["--uniform"], [1 / 3] * 3),
        (["--weights", "0.5,0.3,0.2"], [0.5, 0.3, 0.2]),
        (["--weights", "-1,2,0"], [-1, 2, 0]),
        (["--weights", "2,1,1", "--normalize"], [0.5, 0.25, 0.25]),
        (["--ema", "0.9"], [0.81, 0.09, 0.1]),
        (["--ema", "0.999", "--per-step"], [0.999**800, (1 - 0.999**150) * 0.999**650, 1 - 0.999**650]),
        (["--lawa", "2"], [0, 0.5, 0.5]),
        (["--curve", "linear"], curve(lambda u: 1 - u)),
        (["--curve", "cosine"], curve(lambda u: (1 + np.cos(np.pi * u)) / 2)),
        (["--curve", "1-sqrt"], curve(lambda u: 1 - np.sqrt(u))),
    ],
    ids=lambda value: " ".join(value) if value and isinstance(value[0], str) else "",
)
def test_every_way_of_weighting(tmp_path: Path, inputs: list[Path], words: list[str], weights: list[float]) -> None:
    found = told_json("average", *inputs, "-o", tmp_path / "out.safetensors", *words)
    given = {one["name"]: one["coefficient"] for one in found["inputs"]}
    assert [given.get(str(path), 0) for path in inputs] == pytest.approx(weights, abs=1e-6)
    agrees(tmp_path / "out.safetensors", inputs, [given.get(str(path), 0) for path in inputs])
    told("verify", tmp_path / "out.safetensors")


def test_the_order_of_the_command_line_does_not_matter(tmp_path: Path, inputs: list[Path]) -> None:
    for i, order in enumerate(itertools.permutations(inputs)):
        told("average", *order, "-o", tmp_path / f"{i}.safetensors", "--ema", "0.7")
        assert (tmp_path / f"{i}.safetensors").read_bytes() == (tmp_path / "0.safetensors").read_bytes()


def test_threads_change_nothing(tmp_path: Path, inputs: list[Path]) -> None:
    for threads in (1, 4):
        told("average", *inputs, "-o", tmp_path / f"{threads}.safetensors", "--threads", threads)
    assert (tmp_path / "1.safetensors").read_bytes() == (tmp_path / "4.safetensors").read_bytes()


def test_weights_belong_to_the_inputs_as_they_are_given(tmp_path: Path, inputs: list[Path]) -> None:
    told("average", *reversed(inputs), "-o", tmp_path / "out.safetensors", "--weights", "0.5,0.3,0.2")
    agrees(tmp_path / "out.safetensors", inputs, [0.2, 0.3, 0.5])


def test_steps_of_the_command_line(tmp_path: Path) -> None:
    inputs = [foreign(tmp_path / f"{name}.safetensors", tensors(i, (7,))) for i, name in enumerate("abc")]
    words = ["average", *inputs, "-o", tmp_path / "out", "--curve", "linear"]
    done = run(*words)
    assert done.returncode == 2
    assert "step" in done.stderr
    assert all(path.name in done.stderr for path in inputs)
    assert "by index instead of steps" in told(*words, "--steps", "10,20,90")
    assert told_json(*words, "--steps", "10,20,30")["inputs"][0]["step"] == 10
    assert run(*words, "--steps", "10,20").returncode == 2
    negative = run("average", *inputs, "-o", tmp_path / "out", "--steps=-5,7,9")
    assert (negative.returncode, "steps are 0 to 2^53" in negative.stderr) == (2, True)


def test_wrong_calls(tmp_path: Path, inputs: list[Path]) -> None:
    out = ["-o", tmp_path / "out"]
    for words, message in (
        ([*inputs], "--output is required"),
        ([*inputs, *out, "--uniform", "--lawa", "2"], "excludes"),
        ([*inputs, *out, "--per-step"], "--ema"),
        ([*inputs, "-o", "-"], "for a directory with that name give ./-"),
        ([*inputs, *out, "--weights", "1,2"], "2 numbers for 3 inputs"),
        ([*inputs, *out, "--weights", "1,,2"], "'' is no number"),
        ([*inputs, *out, "--steps", "1,2,9223372036854775808"], "'9223372036854775808' is no whole number below 2^63"),
        ([*inputs, *out, "--curve", "square"], "--curve"),
        ([*inputs, ours(tmp_path / "other.safetensors", tensors(0, (7, 5001))), *out], "layer.1.weight"),
    ):
        done = run("average", *words)
        assert done.returncode == 2, done.stderr
        assert message in done.stderr
    assert not (tmp_path / "out").exists()


def test_whole_numbers_are_the_newest_and_that_is_said(tmp_path: Path) -> None:
    inputs = [
        foreign(tmp_path / f"step-{step}.safetensors", {"w": np.ones(3), "n": np.array([step])})
        for step in (30, 10, 20)
    ]
    assert "1 tensor of integers or booleans is that of" in told("average", *inputs, "-o", tmp_path / "out.safetensors")
    assert load_file(tmp_path / "out.safetensors")["n"] == [30]


def test_where_it_comes_from_stands_in_the_file(tmp_path: Path, inputs: list[Path]) -> None:
    told("average", *inputs, "-o", tmp_path / "out.safetensors", "--ema", "0.9")
    one = told_json("inspect", tmp_path / "out.safetensors")["checkpoints"][0]
    assert "step-250" in one["metadata"]["shardow.merge"]
