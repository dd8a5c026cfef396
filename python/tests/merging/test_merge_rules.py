"""Which coefficients a rule gives, whose integers a merge has, and what is refused."""

from __future__ import annotations

import itertools
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from merge_states import expect, state, write
from safetensors.torch import load_file

import shardow

RULES: list[tuple[dict[str, Any], list[Fraction]]] = [
    ({"weights": [0.5, 0.25, 2]}, [Fraction(1, 2), Fraction(1, 4), Fraction(2)]),
    ({"weights": [1, 1, 2], "normalize": True}, [Fraction(1, 4), Fraction(1, 4), Fraction(1, 2)]),
    ({"ema": 0.75}, [Fraction(9, 16), Fraction(3, 16), Fraction(1, 4)]),
    ({"ema": 0.5, "per_step": True, "steps": [10, 12, 13]}, [Fraction(1, 8), Fraction(3, 8), Fraction(1, 2)]),
    ({"lawa": 2}, [Fraction(0), Fraction(1, 2), Fraction(1, 2)]),
    ({"curve": "linear"}, [Fraction(1, 4), Fraction(1, 2), Fraction(1, 4)]),
    ({"curve": "linear", "steps": [0, 10, 100]}, [Fraction(1, 20), Fraction(1, 2), Fraction(9, 20)]),
]


@pytest.mark.parametrize(("rule", "coefficients"), RULES, ids=[str(rule) for rule, _ in RULES])
def test_every_rule_is_its_formula(rule: dict[str, Any], coefficients: list[Fraction], tmp_path: Path) -> None:
    inputs = [write(tmp_path, seed, "file") for seed in range(3)]
    report = shardow.merge(inputs, tmp_path / "out", dtype="float64", **rule)
    expect(load_file(tmp_path / "out" / "model.safetensors"), coefficients, out=torch.float64)
    assert report["sum"] == pytest.approx(float(sum(coefficients)))


def test_says_what_weights_by_index_would_miss(tmp_path: Path) -> None:
    inputs = [write(tmp_path, seed, "file") for seed in range(3)]
    report = shardow.merge(inputs, tmp_path / "out", curve="linear", steps=[0, 10, 100])
    assert report["index_error"] == pytest.approx(0.2)  # 0.95 and 0.45 of the peak; by index 0.75 and 0.25


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"weights": [1, 1], "ema": 0.5}, "weights= and ema="),
    ({"weights": [1]}, "weights= has 1 numbers for 2 inputs"),
    ({"steps": [1, 2, 3]}, "steps= has 3 numbers for 2 inputs"),
    ({"per_step": True}, "goes with ema="),
    ({"normalize": True}, "goes with weights="),
    ({"weights": [1, -1], "normalize": True}, "can't be normalized"),
    ({"ema": 1.5}, "below 1"),
    ({"lawa": 3}, "the last 3 of 2"),
    ({"lawa": -1}, "lawa=-1; it must be a whole number"),
    ({"lawa": 1.5}, "lawa=1.5; it must be a whole number"),
    ({"ema": "much"}, "ema='much'; it must be a number"),
    ({"weights": [1, None]}, "weights=None; it must be a number"),
    ({"weights": [1, 1e308]}, "has the coefficient 1e[+]308"),
    ({"weights": [1, float("nan")]}, "weight nan"),
    ({"steps": [1, 2.5]}, "steps=2.5; it must be a whole number"),
    ({"steps": [1, 2**53 + 1]}, "of at most 9007199254740992"),
    ({"curve": 5}, "linear, cosine"),
    ({"curve": "square"}, "linear, cosine, inv-sqrt or 1-sqrt"),
    ({"curve": "linear", "steps": [5, 5]}, "both of step 5"),
    ({"dtype": "int8"}, "floating dtype"),
    ({"metadata": {"shardow.merge": "mine"}}, "shardow.merge"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refuses(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    inputs = [write(tmp_path, seed, "file") for seed in range(2)]
    with pytest.raises(ValueError, match=message):
        shardow.merge(inputs, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_unknown_steps_are_an_error_only_where_they_matter(tmp_path: Path) -> None:
    for seed in range(2):
        shardow.save(state(seed), tmp_path / f"run{seed}.safetensors")
    inputs = [tmp_path / "run1.safetensors", tmp_path / "run0.safetensors"]
    for rule in ({}, {"weights": [1, 2]}, {"ema": 0.5}):
        shardow.merge(inputs, tmp_path / "out.safetensors", **rule)
    for rule in ({"curve": "linear"}, {"ema": 0.5, "per_step": True}, {"lawa": 1}):
        with pytest.raises(
            ValueError, match=r"steps of these inputs are not known: .*run1.safetensors, .*run0.safetensors"
        ):
            shardow.merge(inputs, tmp_path / "out.safetensors", **rule)


def test_steps_of_some_inputs_alone_are_an_error_where_the_order_matters(tmp_path: Path) -> None:
    inputs = [write(tmp_path, 1, "file"), write(tmp_path, 0, "directory"), str(tmp_path / "last.safetensors")]
    shardow.save(state(2), inputs[-1])
    for rule in ({"ema": 0.5}, {"ema": 0.5, "per_step": True}, {"lawa": 2}, {"curve": "cosine"}):
        with pytest.raises(ValueError, match=r"not known: [^,]*last.safetensors; give the steps of all inputs"):
            shardow.merge(inputs, tmp_path / "out", **rule)
        shardow.merge(inputs, tmp_path / "out", steps=[5, 4, 6], **rule)
    shardow.merge(inputs, tmp_path / "out")
    shardow.merge(inputs, tmp_path / "out", weights=[1, 2, 3])


NEWEST: list[tuple[dict[str, Any], int]] = [
    ({"steps": [3, 1, 2]}, 0),
    ({"steps": [3, 1, 2], "weights": [0, 1, 1]}, 0),  # whatever its weight
    ({"steps": [3, 1, 2], "lawa": 2}, 0),
    ({}, 1),  # by name
    ({"weights": [1, 0, 1]}, 1),
    ({"ema": 0.5}, 2),  # in the order in which they are given
]


@pytest.mark.parametrize(("how", "newest"), NEWEST, ids=[str(how) for how, _ in NEWEST])
def test_the_newest_is_one_for_integers_metadata_and_the_report(
    how: dict[str, Any], newest: int, tmp_path: Path
) -> None:
    inputs = [str(tmp_path / f"{name}.safetensors") for name in "acb"]
    for seed, path in enumerate(inputs):
        shardow.save(state(seed), path, metadata={"of": str(seed)})
    report = shardow.merge(inputs, tmp_path / "out.safetensors", **how)
    assert report["newest"] == inputs[newest]
    assert json.loads(shardow.open(tmp_path / "out.safetensors").metadata["shardow.merge"])["newest"] == inputs[newest]
    assert torch.equal(load_file(tmp_path / "out.safetensors")["steps"], state(newest)["steps"])
    target = {name: torch.zeros_like(one) for name, one in state(0).items()}
    read = shardow.load(target, shardow.merged(inputs, **how))
    assert torch.equal(target["steps"], state(newest)["steps"])
    assert read["metadata"]["of"] == str(newest)


def test_sums_that_would_be_infinite_are_an_error(tmp_path: Path) -> None:
    shardow.save({"w": torch.tensor([1e5, 1.0, torch.inf]), "b": torch.ones(3)}, tmp_path / "step-1.safetensors")
    with pytest.raises(ValueError, match="infinite in it: 1 of 'w'; choose a dtype"):
        shardow.merge([tmp_path / "step-1.safetensors"], tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()
    half = {"w": torch.zeros(3).half(), "b": torch.zeros(3).half()}
    with pytest.raises(ValueError, match=r"1 of 'w'.*has lost its own values"):
        shardow.load(half, shardow.merged([tmp_path / "step-1.safetensors"]))
    shardow.merge([tmp_path / "step-1.safetensors"], tmp_path / "out", dtype="bfloat16")
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].tolist() == [99840.0, 1.0, torch.inf]


def test_some_tensors_of_ten_inputs_read_these_alone(tmp_path: Path) -> None:
    inputs = [write(tmp_path, seed, ["file", "directory"][seed % 2], torch.bfloat16) for seed in range(10)]
    target = {name: torch.zeros_like(state(0, torch.bfloat16)[name]) for name in ("deep.b", "steps")}
    report = shardow.load(target, shardow.merged(inputs, curve="linear"), strict=False)
    assert report["unexpected"] == ["mask", "none", "scalar", "w"]
    assert report["bytes_read"] == 10 * 700 * 2 + 5 * 8
    shardow.merge(inputs, tmp_path / "out.safetensors", curve="linear")
    whole = load_file(tmp_path / "out.safetensors")
    means = [Fraction(2 * (8 - j) + 1, 18) for j in range(9)]  # of 1 - u over each ninth
    coefficients = [1 - means[0], *(a - b for a, b in itertools.pairwise(means)), means[-1]]
    expect(whole, coefficients, torch.bfloat16)
    for name, tensor in target.items():
        assert torch.equal(tensor, whole[name])
