"""merge() and merged(): sums of checkpoints of any format, the same bytes on any number of ranks, in files and in sharded models."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import PARALLEL, make
from ranks import run
from safetensors.torch import load_file

import shardow

State = dict[str, torch.Tensor]


def state(seed: int, dtype: torch.dtype = torch.float32) -> State:
    torch.manual_seed(seed)
    return {
        "w": torch.randn(37, 129).to(dtype),
        "deep.b": (torch.randn(700) * 1e-3).to(dtype),
        "scalar": torch.tensor(seed / 3).to(dtype),
        "none": torch.empty(0, 3, dtype=dtype),
        "steps": torch.arange(5) + seed,
        "mask": torch.arange(9) % (seed + 2) == 0,
    }


def write(directory: Path, seed: int, form: str, dtype: torch.dtype = torch.float32) -> str:
    path = directory / f"step-{1000 * (seed + 1)}"
    if form == "dcp":
        dcp.save({"model": state(seed, dtype), "optim": {"lr": torch.ones(2)}}, checkpoint_id=path, no_dist=True)
    elif form == "pt":
        path = path.with_suffix(".pt")
        torch.save({"model": state(seed, dtype), "epoch": 3}, path)
    else:
        path = path.with_suffix(".safetensors") if form == "file" else path
        shardow.save(state(seed, dtype), path, max_shard_size=9000 if form == "directory" else None)
    return str(path)


def exactly(coefficients: list[Fraction], name: str, dtype: torch.dtype) -> list[Fraction]:
    terms = [state(seed, dtype)[name].double().flatten().tolist() for seed in range(len(coefficients))]
    return [sum((c * Fraction(x) for c, x in zip(coefficients, column, strict=True)), Fraction(0)) for column in zip(*terms, strict=True)]


def expect(found: State, coefficients: list[Fraction], dtype: torch.dtype = torch.float32, out: torch.dtype | None = None) -> None:
    """Within half an ulp and a part in 1e12 of the largest term."""
    newest = state(len(coefficients) - 1, dtype)
    assert found.keys() == newest.keys()
    for name, tensor in found.items():
        if not newest[name].is_floating_point():
            assert torch.equal(tensor, newest[name])
            continue
        assert (tensor.dtype, tensor.shape) == (out or dtype, newest[name].shape)
        for is_, should in zip(tensor.double().flatten().tolist(), exactly(coefficients, name, dtype), strict=True):
            one = torch.tensor(float(should)).to(tensor.dtype)
            ulp = float((torch.nextafter(one.abs(), torch.tensor(torch.inf).to(one)) - one.abs()).double())
            assert abs(Fraction(is_) - should) <= Fraction(ulp) / 2 * (1 + Fraction(1, 10**6)) + Fraction(1, 10**12) * 4


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # by dcp.save
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_inputs_of_every_format_are_averaged(dtype: torch.dtype, tmp_path: Path) -> None:
    inputs = [write(tmp_path, seed, form, dtype) for seed, form in enumerate(["dcp", "file", "pt", "directory"])]
    report = shardow.merge(list(reversed(inputs)), tmp_path / "out.safetensors", key="model")
    expect(load_file(tmp_path / "out.safetensors"), [Fraction(1, 4)] * 4, dtype)
    assert [one["step"] for one in report["inputs"]] == [1000, 2000, 3000, 4000]
    assert report["taken"] == ["mask", "steps"]
    assert (report["formula"], report["sum"], report["index_error"]) == ("uniform", 1.0, None)
    told = json.loads(shardow.open(tmp_path / "out.safetensors").metadata["shardow.merge"])
    assert (told["version"], told["formula"], told["step"]) == (shardow.__version__, "uniform", 4000)
    assert [(one["name"], one["coefficient"]) for one in told["inputs"]] == [(path, 0.25) for path in inputs]


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
    for rule in ({}, {"weights": [1, 2]}, {"ema": 0.5}, {"lawa": 1}):
        shardow.merge(inputs, tmp_path / "out.safetensors", **rule)
    for rule in ({"curve": "linear"}, {"ema": 0.5, "per_step": True}):
        with pytest.raises(ValueError, match=r"steps of these inputs are not known: .*run1.safetensors, .*run0.safetensors"):
            shardow.merge(inputs, tmp_path / "out.safetensors", **rule)


def test_all_that_does_not_fit_is_listed(tmp_path: Path) -> None:
    first, second = write(tmp_path, 0, "file"), tmp_path / "b.pt"
    torch.save({"w": torch.zeros(2), "deep.b": torch.zeros(700).bfloat16(), "scalar": torch.tensor(1), "more": torch.zeros(1)}, second)
    with pytest.raises(ValueError, match="nothing was merged") as raised:
        shardow.merge([first, second], tmp_path / "out")
    for part in ("'w' has shape", "'deep.b' is", "'scalar' is", "'more' is missing in", "'mask' is missing in", "'steps' is missing in"):
        assert part in str(raised.value)
    assert not (tmp_path / "out").exists()


class Code:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return (print, ("run",))


def test_nothing_in_a_pickle_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.zeros(2), "x": Code()}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(b"none of torch's")
    torch.save({"model": {"w": torch.zeros(2)}}, tmp_path / "c.pt")
    for name, message in (("a.pt", "more in it than tensors"), ("b.pt", "b.pt"), ("c.pt", "key='model'")):
        with pytest.raises(ValueError, match=message):
            shardow.merge([tmp_path / name], tmp_path / "out")
    assert capsys.readouterr().out == ""
    with pytest.raises(FileNotFoundError):
        shardow.merge([tmp_path / "none.pt"], tmp_path / "out")
    with pytest.raises(ValueError, match="list of paths"):
        shardow.merge(str(tmp_path), tmp_path / "out")


def _merge_on_ranks(inputs: list[str], out: str) -> int:
    rank = torch.distributed.get_rank()
    return int(shardow.merge(inputs, out, ema=0.6, key="model", timeout=60)["bytes_written"]) + 0 * rank


def test_bytes_are_the_same_on_three_ranks_and_each_writes_its_own(tmp_path: Path) -> None:
    torch.manual_seed(1)
    inputs = []
    for seed in range(3):
        shardow.save({**state(seed), "large": torch.randn(1500, 1000).bfloat16()}, path := tmp_path / f"step-{seed + 1}.safetensors")
        inputs.append(str(path))
    shardow.merge(inputs, tmp_path / "one.safetensors", ema=0.6)
    written = run(3, _merge_on_ranks, inputs, str(tmp_path / "three.safetensors"))
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "three.safetensors").read_bytes()
    assert min(written) > 900_000


def _other_rule(inputs: list[str], out: str) -> str:
    try:
        shardow.merge(inputs, out, ema=0.6 if torch.distributed.get_rank() else 0.5, timeout=60)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_with_other_rules_are_told(tmp_path: Path) -> None:
    inputs = [write(tmp_path, seed, "file") for seed in range(2)]
    assert all("ranks disagree" in message for message in run(2, _other_rule, inputs, str(tmp_path / "out")))


def _save(world: int, parallel: str, seed: int, path: str) -> None:
    shardow.save(PARALLEL[parallel](make(seed=seed), world), path)


def _load(world: int, parallel: str, inputs: list[str], expected: str) -> int:
    model = PARALLEL[parallel](make(seed=9), world)
    other = PARALLEL[parallel](make(seed=8), world)
    report = shardow.load(model, shardow.merged(inputs, curve="cosine"), timeout=60)
    shardow.load(other, expected, timeout=60)
    for name, tensor in model.state_dict().items():
        theirs = other.state_dict()[name]
        local, wanted = (one.to_local() if hasattr(one, "to_local") else one for one in (tensor, theirs))
        assert torch.equal(local, wanted), name
    assert json.loads(report["metadata"]["shardow.merge"])["step"] == 30
    return int(report["bytes_read"])


@pytest.mark.parametrize("parallel", ["fsdp2", "plain"])
def test_checkpoints_of_four_ranks_into_a_model_of_three(parallel: str, tmp_path: Path) -> None:
    inputs = [str(tmp_path / f"step-{step}") for step in (10, 20, 30)]
    for seed, path in enumerate(inputs):
        run(4, _save, 4, "fsdp2", seed, path)
    shardow.merge(inputs, tmp_path / "merged.safetensors", curve="cosine")
    read = run(3, _load, 3, parallel, inputs, str(tmp_path / "merged.safetensors"))
    whole = sum(tensor.nbytes for tensor in make().state_dict().values()) * 3
    assert sum(read) <= whole * (1.2 if parallel == "fsdp2" else 3)  # buffers are everybody's


def test_into_a_mapping_and_what_does_not_fit(tmp_path: Path) -> None:
    inputs = [write(tmp_path, seed, "file") for seed in range(2)]
    target = {name: torch.zeros_like(one) for name, one in state(0).items()}
    shardow.load(target, shardow.merged(inputs))
    expect(target, [Fraction(1, 2)] * 2)
    target["extra"] = target.pop("w")
    before = {name: one.clone() for name, one in target.items()}
    with pytest.raises(ValueError, match="missing in the inputs: extra; unexpected in the inputs: w"):
        shardow.load(target, shardow.merged(inputs))
    assert all(torch.equal(target[name], one) for name, one in before.items())
    report = shardow.load(target, shardow.merged(inputs, lawa=1), strict=False)
    assert (report["missing"], report["unexpected"]) == (["extra"], ["w"])
