"""What is opened stays what it was: one version, few open files, any number of tensors; and paths that are none."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardow


def state(value: int, tensors: int = 3) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((16, 4 + i), float(10 * value + i)) for i in range(tensors)}


@pytest.mark.parametrize("where", ["a.safetensors", "hub"])
def test_an_opened_checkpoint_keeps_its_values_when_the_path_is_replaced_or_removed(where: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_shard_size": 300} if where == "hub" else {}
    shardow.save(state(1), tmp_path / where, **options)
    opened = shardow.open(tmp_path / where)
    part = opened.get_slice("w1")
    shardow.save({"another": torch.zeros(99), **state(2)}, tmp_path / where, **options)
    assert torch.equal(part[3:5], state(1)["w1"][3:5])
    (tmp_path / where).rename(tmp_path / "elsewhere")
    assert all(torch.equal(opened[name], value) for name, value in state(1).items())
    assert set(opened) == set(state(1))


def test_a_file_that_is_written_over_is_an_error_and_no_mixture(tmp_path: Path) -> None:
    shardow.save(state(1), tmp_path / "a.safetensors")
    opened = shardow.open(tmp_path / "a.safetensors")
    assert torch.equal(opened["w0"], state(1)["w0"])
    with (tmp_path / "a.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"1234")
    os.utime(tmp_path / "a.safetensors", (1, 1))
    with pytest.raises(OSError, match="was written over since it was opened; open the checkpoint again"):
        opened.get_slice("w0")[:2]


def test_loading_beside_a_writer_gives_one_of_its_versions(tmp_path: Path) -> None:
    path, stop = tmp_path / "a.safetensors", threading.Event()
    shardow.save(state(1), path)

    def write() -> None:
        value = 1
        while not stop.is_set():
            value += 1
            shardow.save(state(value, 3 + value % 2), path)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            target = {name: torch.zeros_like(value) for name, value in state(0).items()}
            shardow.load(target, path, strict=False)
            version = target["w0"].view(-1)[0].item() // 10
            assert all(torch.equal(target[name], value) for name, value in state(int(version)).items())
    finally:
        stop.set()
        writer.join()


def test_few_files_are_open_at_once_and_one_that_changed_is_noticed_when_it_is_opened_again(tmp_path: Path) -> None:
    tensors = {f"t{i:03}": torch.full((8,), float(i)) for i in range(40)}
    shardow.save(tensors, tmp_path / "many", max_shard_size=32)
    shardow.save({name: value + 1 for name, value in tensors.items()}, tmp_path / "newer", max_shard_size=32)
    code = f"""
import os, pathlib, torch, shardow
opened = shardow.open({str(tmp_path / "many")!r})
assert len(os.listdir("/proc/self/fd")) < 40, os.listdir("/proc/self/fd")
assert all(opened[name][0] == int(name[1:]) for name in opened)
target = {{name: torch.zeros(8) for name in opened}}
shardow.load(target, {str(tmp_path / "many")!r})
assert all(value[0] == int(name[1:]) for name, value in target.items())
for file in pathlib.Path({str(tmp_path / "newer")!r}).glob("*.safetensors"):
    file.rename(pathlib.Path({str(tmp_path / "many")!r}) / file.name)
changed = 0
for name in opened:
    try:
        assert opened[name][0] == int(name[1:])
    except OSError as error:
        assert "and replaced since it was opened" in str(error)
        changed += 1
assert changed >= 20
"""
    limits = (60, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits),
    )
    assert ran.returncode == 0, ran.stderr


def seconds_of_reading_all(tensors: int, path: Path) -> float:
    shardow.save({f"t{i}": torch.zeros(4) for i in range(tensors)}, path)
    opened = shardow.open(path)
    began = time.process_time()
    for name in opened:
        opened[name]
    return time.process_time() - began


def test_reading_every_tensor_costs_as_much_as_there_are_tensors(tmp_path: Path) -> None:
    few, many = (seconds_of_reading_all(count, tmp_path / "a.safetensors") for count in (500, 8000))
    assert many < 16 * few * 3  # 16 times as many; listing all others for each took 150 times as long


def test_opened_checkpoints_close(tmp_path: Path) -> None:
    shardow.save(state(1), tmp_path / "a.safetensors")
    before = len(os.listdir("/proc/self/fd"))
    with shardow.open(tmp_path / "a.safetensors") as opened:
        part = opened.get_slice("w0")
        assert part[0, 0] == 10
    assert len(os.listdir("/proc/self/fd")) == before
    assert list(opened) == ["w0", "w1", "w2"]
    for read in (lambda: part[0], lambda: opened["w1"]):
        with pytest.raises(ValueError, match="was closed; open it again"):
            read()


def test_data_that_is_not_what_was_saved_names_its_tensor_when_it_is_read(tmp_path: Path) -> None:
    shardow.save(state(1), tmp_path / "a.safetensors")
    content = bytearray((tmp_path / "a.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "a.safetensors").write_bytes(content)
    with (
        shardow.open(tmp_path / "a.safetensors") as opened,
        pytest.raises(ValueError, match="the data of 'w2' is not what was saved") as found,
    ):
        opened["w2"]
    assert "loaded into" not in str(found.value)


def test_averages_of_several_decays_open_as_a_mapping(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    ema = shardow.EMA(model, [0.5, shardow.schedules.half_life(20)])
    with torch.no_grad():
        model.weight.add_(1)
    ema.update()
    ema.save(tmp_path / "ema")
    expected = {
        key: ema.full_state_dict(decay=key)
        for key in ("0.5", next(key for key in shardow.open(tmp_path / "ema") if key != "0.5"))
    }
    with shardow.open(tmp_path / "ema") as opened:
        assert list(opened) == list(expected)
        for key, tensors in expected.items():
            assert torch.equal(opened[key]["weight"], tensors["weight"])
            assert torch.equal(shardow.open(tmp_path / "ema", decay=key)["weight"], tensors["weight"])
        assert torch.equal(opened[0.5].get_slice("weight")[1], expected["0.5"]["weight"][1])
        assert "shardow.state" in opened.metadata
        with pytest.raises(ValueError, match=r"decay=0\.7; this EMA keeps 0\.5, half_life"):
            opened[0.7]
        with pytest.raises(ValueError, match="several decays; first say which"):
            opened.get_slice("weight")
    with pytest.raises(ValueError, match=r"decay=0\.7; this EMA keeps 0\.5, half_life"):
        shardow.open(tmp_path / "ema", decay=0.7)
    with pytest.raises(
        ValueError,
        match=r"is a saved EMA of decays 0\.5, half_life.*; give the file of one of them: ema-0\.5\.safetensors, "
        r"ema-half",
    ):
        shardow.load(model, tmp_path / "ema")
    shardow.load(model, tmp_path / "ema" / "ema-0.5.safetensors")
    shardow.save(model, tmp_path / "ema")  # a model beside it is what the directory is
    assert list(shardow.open(tmp_path / "ema")) == ["bias", "weight"]
    assert torch.equal(shardow.open(tmp_path / "ema", decay=0.5)["weight"], expected["0.5"]["weight"])


def test_what_no_header_can_hold_is_named_before_anything_is_written(tmp_path: Path) -> None:
    for metadata, message in [
        ({"k": 1}, r"metadata 'k': 1 is no text"),
        ({2: "x"}, r"metadata 2: 2 is no text"),
        ({"k": "\ud800"}, "metadata 'k' has"),
    ]:
        with pytest.raises(ValueError, match=message):
            shardow.save(state(1), tmp_path / "a.safetensors", metadata=metadata)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="which is no character"):
        shardow.save({"bad \udc80": torch.zeros(1)}, tmp_path / "a.safetensors")
    for tensor, layout in [(torch.eye(3).to_sparse(), "sparse_coo"), (torch.eye(4).to_sparse_csr(), "sparse_csr")]:
        with pytest.raises(NotImplementedError, match=rf"'odd' of shape \(\d, \d\) is torch\.{layout}.*to_dense"):
            shardow.save({**state(1), "odd": tensor}, tmp_path / "a.safetensors")
        with pytest.raises(NotImplementedError, match=rf"'odd' of shape \(\d, \d\) is torch\.{layout}"):
            shardow.load({"odd": tensor}, tmp_path / "a.safetensors")
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(NotImplementedError, match="'odd' is nested"):
        shardow.save({"odd": nested}, tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


def packed(rows: int, columns: int, first: int) -> torch.Tensor:
    return (torch.arange(rows * columns, dtype=torch.uint8).reshape(rows, columns) + first).view(torch.float4_e2m1fn_x2)


def test_packed_elements_go_to_safetensors_and_back(tmp_path: Path) -> None:
    ours, theirs = (
        {"x": packed(4, 6, 3), "w": torch.ones(3), "none": packed(0, 2, 0)},
        {"x": packed(4, 6, 90), "w": torch.zeros(3)},
    )
    shardow.save(ours, tmp_path / "ours.safetensors")
    save_file(theirs, tmp_path / "theirs.safetensors")
    read = load_file(tmp_path / "ours.safetensors")
    assert {name: (read[name].dtype, read[name].shape) for name in read} == {
        name: (one.dtype, one.shape) for name, one in ours.items()
    }
    assert torch.equal(read["x"].view(torch.uint8), ours["x"].view(torch.uint8))
    target = {"x": packed(4, 6, 0), "w": torch.zeros(3)}
    shardow.load(target, tmp_path / "theirs.safetensors")
    assert torch.equal(target["x"].view(torch.uint8), theirs["x"].view(torch.uint8))
    with shardow.open(tmp_path / "ours.safetensors") as opened:
        part = opened.get_slice("x")
        assert (part.dtype, part.shape) == ("F4", (4, 12))
        for index, expected in [
            (..., ours["x"]),
            (slice(1, 3), ours["x"][1:3]),
            ((2, slice(4, 10)), ours["x"][2, 2:5]),
        ]:
            assert part[index].dtype == torch.float4_e2m1fn_x2
            assert torch.equal(part[index].view(torch.uint8), expected.view(torch.uint8))
        for index in [(slice(None), 3), (0, slice(1, 5)), (0, slice(0, 8, 2))]:
            with pytest.raises(
                NotImplementedError,
                match="'x' is F4, of which torch packs 2 into one; slice its last dimension at multiples of 2",
            ):
                part[index]
    with pytest.raises(ValueError, match=r"'x' has shape \[4, 12\] in the file and \[4, 10\] here"):
        shardow.load({"x": packed(4, 5, 0)}, tmp_path / "ours.safetensors", strict=False)
    with pytest.raises(NotImplementedError, match=r"'s' is torch\.float4_e2m1fn_x2 and has no dimension"):
        shardow.save(
            {"s": packed(1, 1, 0).view(torch.uint8)[0, 0].view(torch.float4_e2m1fn_x2)}, tmp_path / "s.safetensors"
        )


def test_six_bits_are_read_by_nobody_and_named(tmp_path: Path) -> None:
    header = b'{"x":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}'
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abc")
    opened = shardow.open(tmp_path / "a.safetensors")
    assert opened.get_slice("x").shape == (4,)
    with pytest.raises(NotImplementedError, match="'x' is F6_E2M3, which torch does not have"):
        opened["x"]
