"""merge() and merged(): sums of checkpoints of any format, the same bytes on any number of ranks, in files and in
sharded models.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from merge_states import expect, state, write
from models import PARALLEL, make
from ranks import run
from safetensors.torch import load_file

import shardow


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


def test_all_that_does_not_fit_is_listed(tmp_path: Path) -> None:
    first, second = write(tmp_path, 0, "file"), tmp_path / "b.pt"
    torch.save(
        {"w": torch.zeros(2), "deep.b": torch.zeros(700).bfloat16(), "scalar": torch.tensor(1), "more": torch.zeros(1)},
        second,
    )
    with pytest.raises(ValueError, match="nothing was merged") as raised:
        shardow.merge([first, second], tmp_path / "out")
    for part in (
        "'w' has shape",
        "'deep.b' is",
        "'scalar' is",
        "'more' is missing in",
        "'mask' is missing in",
        "'steps' is missing in",
    ):
        assert part in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_views_whose_bits_change_their_elements_are_merged_as_they_read(tmp_path: Path) -> None:
    state = {"w": torch._neg_view(torch.arange(3.0)), "c": torch.tensor([1 + 2j]).conj()}
    torch.save(state, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt")["w"].is_neg()
    shardow.merge([tmp_path / "a.pt"], tmp_path / "out.safetensors")
    merged = load_file(tmp_path / "out.safetensors")
    assert merged["w"].tolist() == state["w"].tolist()
    assert merged["c"].tolist() == state["c"].tolist()


def test_parts_beside_tensors_are_no_loss_in_silence(tmp_path: Path) -> None:
    part = {"w": torch.ones(2)}
    torch.save({"encoder": {"deep": part}, "scale": torch.ones(1), "config": {"layers": 3}}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a.pt has tensors under 'encoder' beside 'scale'"):
        shardow.merge([tmp_path / "a.pt"], tmp_path / "out.safetensors")
    torch.save({"scale": torch.ones(1), "config": {"layers": 3}}, tmp_path / "a.pt")
    shardow.merge([tmp_path / "a.pt"], tmp_path / "out.safetensors")


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
    for name in ("a\0b", 7):
        torch.save({name: torch.zeros(2)}, tmp_path / "d.pt")
        with pytest.raises(ValueError, match="is no name of a tensor"):
            shardow.merge([tmp_path / "d.pt"], tmp_path / "out")
    with pytest.raises(ValueError, match="has a NUL in it"):
        shardow.merge([f"{tmp_path}/a\0.safetensors"], tmp_path / "out")
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
        shardow.save(
            {**state(seed), "large": torch.randn(1500, 1000).bfloat16()},
            path := tmp_path / f"step-{seed + 1}.safetensors",
        )
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


def _pieces(directory: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))
    whole = state(3)
    whole["w"] = torch.arange(37 * 129.0).view(37, 129)
    placements = {"w": (Shard(1), Shard(0)), "deep.b": (Replicate(), Shard(0))}
    placed = {
        name: distribute_tensor(one, mesh, placements[name]) if name in placements else one
        for name, one in whole.items()
    }
    dcp.save({"model": placed}, checkpoint_id=directory)


def test_torchs_directories_are_read_piece_by_piece(tmp_path: Path) -> None:
    run(4, _pieces, str(tmp_path / "step-1"))
    shardow.merge([tmp_path / "step-1"], tmp_path / "out.safetensors", key="model")
    found = load_file(tmp_path / "out.safetensors")
    expected = {**state(3), "w": torch.arange(37 * 129.0).view(37, 129)}
    assert found.keys() == expected.keys()
    assert all(torch.equal(one, expected[name]) for name, one in found.items())
    target = {"w": torch.zeros(37, 129)}
    shardow.load(target, shardow.merged([tmp_path / "step-1"], key="model"), strict=False)
    assert torch.equal(target["w"], expected["w"])
