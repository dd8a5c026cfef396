"""save() and load(): any sharding to any other through one file, the same bytes whoever wrote it, files that others
read.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import shardow

KINDS = [
    ("plain", 1), ("ddp", 2), ("fsdp1", 2), ("fsdp1-flat", 2), ("fsdp2", 1), ("fsdp2", 2), ("fsdp2", 3), ("fsdp2", 4),
    ("hsdp", 4),
    ("tp+fsdp2", 4), ("wrapped", 2),
]  # fmt: skip


def save(kind: str, path: str) -> None:
    shardow.save(models.build(kind, dist.get_world_size()), path)


def load(kind: str, path: str) -> dict[str, torch.Tensor]:
    model = models.build(kind, dist.get_world_size())
    for tensor in [*model.parameters(), *model.buffers()]:
        getattr(tensor, "_local_tensor", tensor).data.fill_(-3)
    report = shardow.load(model, path)
    assert report["missing"] == report["unexpected"] == []
    return models.whole_weights(model)


@pytest.mark.parametrize(("kind", "world"), KINDS)
def test_a_model_of_any_sharding_writes_the_same_bytes_and_loads_them(kind: str, world: int, tmp_path: Path) -> None:
    plain = models.make_even() if kind.startswith("tp") else models.make()
    reference, written = tmp_path / "reference.safetensors", tmp_path / "written.safetensors"
    shardow.save(plain, reference)
    ranks.run(world, save, kind, str(written))
    assert written.read_bytes() == reference.read_bytes()
    for loaded in ranks.run(world, load, kind, str(reference)):
        for name, tensor in loaded.items():
            assert torch.equal(tensor, plain.state_dict()[name]), name


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {
        str(d).removeprefix("torch."): torch.randint(0, 2, (3, 5), generator=generator).to(d)
        for d in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    }
    found |= {
        str(d).removeprefix("torch."): torch.randn(4, 6, generator=generator).to(d)
        for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    }
    found |= {
        str(d).removeprefix("torch."): torch.randn(9, generator=generator).to(d)
        for d in (torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64)
    }
    return found | {
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 3),
        "transposed": torch.randn(4, 7, generator=generator).t(),
        'names "quoted" \u00e9\n': torch.ones(1),
    }


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.contiguous().flatten().view(torch.uint8).equal(b.contiguous().flatten().view(torch.uint8))
    )


def test_a_mapping_of_every_dtype_goes_to_safetensors_and_back(tmp_path: Path) -> None:
    state = tensors()
    report = shardow.save(state, tmp_path / "a.safetensors", metadata={"who": "me"})
    assert report["bytes_written"] == sum(tensor.nbytes for tensor in state.values())
    for backend in ("mmap", "pread"):
        theirs = load_file(tmp_path / "a.safetensors", backend=backend)
        assert set(theirs) == set(state)
        assert all(same(theirs[name], state[name]) for name in state), backend
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert file.metadata()["who"] == "me"
    empty = {name: torch.full_like(tensor, 0) for name, tensor in state.items()}
    shardow.load(empty, tmp_path / "a.safetensors")
    assert all(same(empty[name], state[name]) for name in state)


def test_files_of_safetensors_load(tmp_path: Path) -> None:
    state = {name: tensor.contiguous() for name, tensor in tensors().items()}
    save_file(state, tmp_path / "theirs.safetensors")
    ours = {name: torch.full_like(tensor, 0) for name, tensor in state.items()}
    report = shardow.load(ours, tmp_path / "theirs.safetensors")
    assert all(same(ours[name], state[name]) for name in state)
    assert report["bytes_read"] == sum(tensor.nbytes for tensor in state.values())


def test_directories_load_in_torchs_hugging_face_reader_and_ours(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    model = models.make()
    shardow.save(model, tmp_path / "hub", max_shard_size=300)
    assert (tmp_path / "hub" / "model.safetensors.index.json").is_file()
    theirs = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    dcp.load(theirs, storage_reader=HuggingFaceStorageReader(str(tmp_path / "hub")))
    assert all(torch.equal(theirs[name], tensor) for name, tensor in model.state_dict().items())
    other = models.make(seed=1)
    shardow.load(other, tmp_path / "hub")
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), model.state_dict().values(), strict=True))


def test_a_hub_cache_of_symbolic_links_loads(tmp_path: Path) -> None:
    model = models.make()
    shardow.save(model, tmp_path / "blobs" / "0123.safetensors")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0123.safetensors")
    shardow.load(models.make(seed=1), tmp_path / "snapshot")


def test_tied_weights_are_stored_once_and_loaded_by_any_name(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
        model["head"].weight = model["embed"].weight
        return model

    model = tied()
    shardow.save(model, tmp_path / "a.safetensors")
    assert list(load_file(tmp_path / "a.safetensors")) == ["embed.weight"]
    save_file({"head.weight": model["head"].weight.detach()}, tmp_path / "b.safetensors")
    for file in ("a.safetensors", "b.safetensors"):
        other = tied()
        shardow.load(other, tmp_path / file)
        assert torch.equal(other["head"].weight, model["head"].weight)


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "_fsdp_wrapped_module.", "base_model.model.", "module._orig_mod."]
)
def test_names_of_other_tools_are_recognised(prefix: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    save_file({prefix + name: tensor for name, tensor in model.state_dict().items()}, tmp_path / "a.safetensors")
    other = nn.Linear(3, 2)
    shardow.load(other, tmp_path / "a.safetensors")
    assert torch.equal(other.weight, model.weight)


def test_dtypes_are_cast_never_reinterpreted(tmp_path: Path) -> None:
    model = models.make()
    shardow.save(model, tmp_path / "a.safetensors", dtype="bfloat16")
    assert load_file(tmp_path / "a.safetensors")["0.weight"].dtype == torch.bfloat16
    other = models.make(seed=1)
    shardow.load(other, tmp_path / "a.safetensors")
    assert torch.equal(other[0].weight, model[0].weight.bfloat16().float())
    with pytest.raises(ValueError, match=r"'0\.weight' is BF16 in the file and I64 here"):
        shardow.load({"0.weight": torch.zeros(7, 6, dtype=torch.int64)}, tmp_path / "a.safetensors", strict=False)


def test_what_does_not_fit_is_listed_before_anything_changes(tmp_path: Path) -> None:
    shardow.save({"a": torch.ones(3), "b": torch.ones(2), "extra": torch.ones(1)}, tmp_path / "a.safetensors")
    target = {"a": torch.zeros(3), "b": torch.zeros(4), "c": torch.zeros(1)}
    with pytest.raises(
        ValueError,
        match=r"'b' has shape \[2\] in the file and \[4\] here; missing in the file: c; unexpected in the file: extra",
    ):
        shardow.load(target, tmp_path / "a.safetensors")
    assert not any(tensor.any() for tensor in target.values())
    report = shardow.load({"a": target["a"], "c": target["c"]}, tmp_path / "a.safetensors", strict=False)
    assert (report["missing"], report["unexpected"]) == (["c"], ["b", "extra"])
    assert target["a"].all()


def test_reports_list_names_in_one_order(tmp_path: Path) -> None:
    names = [f"layer{index}" for index in range(9)]
    shardow.save({name: torch.ones(1) for name in names}, tmp_path / "a.safetensors")
    report = shardow.load({"layer0": torch.zeros(1)}, tmp_path / "a.safetensors", strict=False)
    assert report["unexpected"] == names[1:]


def test_wrong_files_are_the_right_errors(tmp_path: Path) -> None:
    target = {"a": torch.zeros(3)}
    with pytest.raises(FileNotFoundError, match=r"nothing\.safetensors"):
        shardow.load(target, tmp_path / "nothing.safetensors")
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors"):
        shardow.load(target, tmp_path)
    (tmp_path / "bad.safetensors").write_bytes(b"not a checkpoint at all")
    with pytest.raises(ValueError, match=r"bad\.safetensors: its header claims"):
        shardow.load(target, tmp_path / "bad.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../bad.safetensors"}}')
    with pytest.raises(ValueError, match="only plain names"):
        shardow.load(target, tmp_path)


def test_a_flipped_bit_anywhere_in_the_data_is_found_and_names_its_tensor(tmp_path: Path) -> None:
    state = {name: tensor.contiguous() for name, tensor in tensors().items()}
    shardow.save(state, tmp_path / "good.safetensors")
    good = (tmp_path / "good.safetensors").read_bytes()
    length = 8 + int.from_bytes(good[:8], "little")
    entries = {
        name: entry["data_offsets"] for name, entry in json.loads(good[8:length]).items() if name != "__metadata__"
    }
    target = {name: torch.full_like(tensor, 0) for name, tensor in state.items()}
    for at in range(len(good) - length):
        bad = bytearray(good)
        bad[length + at] ^= 1 << at % 8
        (tmp_path / "bad.safetensors").write_bytes(bad)
        name = next(name for name, (begin, end) in entries.items() if begin <= at < end)
        with pytest.raises(ValueError, match=f"the data of '{re.escape(name)}' is not what was saved"):
            shardow.load(target, tmp_path / "bad.safetensors")
    shardow.load(target, tmp_path / "bad.safetensors", verify=False)


def late_or_dead(path: str, how: str) -> tuple[str, float]:
    state = {"a": torch.ones(1000)}
    if dist.get_rank() == 1 and how == "dead":
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 1:
        time.sleep(5)
    began = time.monotonic()
    try:
        shardow.save(state, path, group=dist.group.WORLD, timeout=2)
    except shardow.Error as error:
        return type(error).__name__, time.monotonic() - began
    return "saved", time.monotonic() - began


@pytest.mark.parametrize("how", ["dead", "late"])
def test_a_rank_that_is_missing_is_an_error_in_time_and_nothing_is_published(how: str, tmp_path: Path) -> None:
    shardow.save({"a": torch.zeros(1000)}, tmp_path / "a.safetensors")
    before = (tmp_path / "a.safetensors").read_bytes()
    answers: list[Any] = ranks.run(3, late_or_dead, str(tmp_path / "a.safetensors"), how, may_die=True)
    for answer in (answers[0], answers[2]):
        assert answer is not None
        assert answer[0] == "DeadlineError"
        assert answer[1] < 6
    assert (tmp_path / "a.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
