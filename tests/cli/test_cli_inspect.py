"""`shardow inspect` says what is in the headers, and nothing that a terminal would obey."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import torch
from command import foreign, ours, run, tensors, told, told_json

import shardow


def test_all_tensors_are_there_as_the_file_has_them(tmp_path: Path) -> None:
    values = {**tensors(), "scalar": np.array(3.0), "empty": np.zeros((0, 5), np.int64)}
    one = told_json("inspect", ours(tmp_path / "a.safetensors", values))["checkpoints"][0]
    assert {tensor["name"]: tensor["shape"] for tensor in one["tensors"]} == {
        name: list(value.shape) for name, value in values.items()
    }
    assert {tensor["name"]: tensor["bytes"] for tensor in one["tensors"]} == {
        name: value.nbytes for name, value in values.items()
    }
    assert {tensor["dtype"] for tensor in one["tensors"]} == {"F32", "F64", "I64"}
    assert one["written_by"] == told("--version").strip()
    text = told("inspect", tmp_path / "a.safetensors")
    assert all(name in text for name in values)
    assert "5 tensors (3 F32, 1 F64, 1 I64)" in text


def test_a_foreign_file_is_said_to_be_one(tmp_path: Path) -> None:
    one = told_json("inspect", foreign(tmp_path / "a.safetensors", tensors()))["checkpoints"][0]
    assert one["written_by"] == "unknown"
    assert all(tensor["crc32"] is None for tensor in one["tensors"])


def test_every_save_says_which_version_wrote_it(tmp_path: Path) -> None:
    """In the header, for those who look there; readers' metadata are what the writer gave."""
    version = told("--version").split()[1]
    model = torch.nn.Linear(3, 2)
    shardow.EMA(model, decay=0.9).save(tmp_path / "ema.safetensors")
    shardow.save(model, tmp_path / "model", max_shard_size=10)
    told("convert", tmp_path / "model", "-o", tmp_path / "converted.safetensors")
    for path in (tmp_path / "ema.safetensors", tmp_path / "model", tmp_path / "converted.safetensors"):
        one = told_json("inspect", path)["checkpoints"][0]
        assert one["written_by"] == f"shardow {version}"
        assert "shardow.version" not in one["metadata"]
    for path in tmp_path.rglob("*.safetensors"):
        length = struct.unpack("<Q", path.read_bytes()[:8])[0]
        assert json.loads(path.read_bytes()[8 : 8 + length])["__metadata__"]["shardow.version"] == version


def test_an_ema_shows_its_schedules_and_its_step(tmp_path: Path) -> None:
    ema = shardow.EMA(torch.nn.Linear(3, 2), decay=[0.9, 0.99])
    for _ in range(7):
        ema.update()
    ema.save(tmp_path / "ema")
    found = told_json("inspect", tmp_path / "ema")["checkpoints"]
    assert [one["name"] for one in found] == ["ema-0.9.safetensors", "ema-0.99.safetensors"]
    assert found[0]["ema"] == {
        "step": 7,
        "updates": 7,
        "schedules": [{"kind": "constant", "decay": 0.9}, {"kind": "constant", "decay": 0.99}],
    }
    assert "step 7, 7 updates" in told("inspect", tmp_path / "ema" / "ema-0.9.safetensors")


def test_a_model_in_many_files_is_one(tmp_path: Path) -> None:
    values = tensors()
    one = told_json("inspect", ours(tmp_path / "model", values, max_shard_size=20_000))["checkpoints"]
    assert len(one) == 1
    assert len(one[0]["files"]) > 1
    assert [tensor["name"] for tensor in one[0]["tensors"]] == sorted(values)


def test_the_tree_adds_up_its_branches(tmp_path: Path) -> None:
    path = foreign(
        tmp_path / "a.safetensors",
        {"a.x": np.zeros(250, np.float32), "a.b.y": np.zeros(500, np.float32), "z": np.zeros(3, np.int8)},
    )
    assert told("inspect", "--tree", path).split("\n\n")[1].splitlines() == [
        "a  2 tensors, 3.00 kB",
        "  b  1 tensor, 2.00 kB",
        "    y  F32 [500]  2.00 kB",
        "  x  F32 [250]  1.00 kB",
        "z  I8 [3]  3 B",
    ]


def test_a_name_cannot_speak_to_the_terminal(tmp_path: Path) -> None:
    names = ["\x1b]0;title\x07", "two\nlines", "\u202eback", "b\x9b31mred"]
    header = json.dumps(
        {name: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for name in names}
        | {"__metadata__": {"k\x1b": "v\x1b[31m"}}
    )
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode())
    for words in (["inspect"], ["inspect", "--tree"], ["inspect", "--full"]):
        text = told(*words, tmp_path / "a.safetensors")
        assert not any(ord(c) < 32 and c != "\n" for c in text)
        assert "\\x1b]0;title\\x07" in text
        assert "\u202e" not in text
        assert "\x9b" not in text
    assert sorted(
        one["name"] for one in told_json("inspect", tmp_path / "a.safetensors")["checkpoints"][0]["tensors"]
    ) == sorted(names)


def test_the_numbers_of_every_dtype_are_looked_through(tmp_path: Path) -> None:
    inf, nan = float("inf"), float("nan")
    values = {
        "f": torch.tensor([3.5, nan, -2.0, inf, -inf, nan]),
        "bf": torch.tensor([1.0, -0.5], dtype=torch.bfloat16),
        "e": torch.tensor([448.0, -1.0]).to(torch.float8_e4m3fn),
        "i": torch.tensor([2**63 - 1, -(2**63)]),
        "b": torch.tensor([False, True]),
        "nan": torch.full((3,), nan),
        "none": torch.zeros(0),
        "long": torch.cat([torch.zeros(40_000), torch.tensor([-7.0]), torch.zeros(40_000)]),
    }
    shardow.save(values, tmp_path / "a.safetensors")
    table = told("inspect", "--values", tmp_path / "a.safetensors").split("\n\n")[1].splitlines()
    rows = {line.split()[0]: line.split()[-4:] for line in table}
    assert rows.pop("NAME") == ["MIN", "MAX", "NAN", "INF"]
    assert rows == {
        "f": ["-2", "3.5", "2", "2"],
        "bf": ["-0.5", "1", "0", "0"],
        "e": ["-1", "448", "0", "0"],
        "i": ["-9.22337e+18", "9.22337e+18", "0", "0"],
        "b": ["0", "1", "0", "0"],
        "nan": ["-", "-", "3", "0"],
        "none": ["-", "-", "0", "0"],
        "long": ["-7", "0", "0", "0"],
    }
    (checkpoint,) = told_json("inspect", "--values", tmp_path / "a.safetensors")["checkpoints"]
    numbers = {tensor["name"]: tensor["values"] for tensor in checkpoint["tensors"]}
    assert numbers["f"] == {"min": -2.0, "max": 3.5, "nan": 2, "infinite": 2}
    assert numbers["none"] == {"min": None, "max": None, "nan": 0, "infinite": 0}
    assert "values" not in told_json("inspect", tmp_path / "a.safetensors")["checkpoints"][0]["tensors"][0]
    assert run("inspect", "--values", "--tree", tmp_path / "a.safetensors").returncode == 2


def test_several_paths_are_shown_one_after_the_other(tmp_path: Path) -> None:
    paths = [str(foreign(tmp_path / name, {name: np.zeros(2)})) for name in ("b.safetensors", "a.safetensors")]
    text = told("inspect", *paths)
    assert [line for line in text.splitlines() if line in paths] == paths
    document = told_json("inspect", *paths)
    assert [checkpoint["path"] for checkpoint in document["checkpoints"]] == paths
    assert "path" not in document
    assert told_json("inspect", paths[0])["path"] == paths[0]
    assert run("inspect", paths[0], tmp_path / "no").returncode == 3


def test_what_is_not_there(tmp_path: Path) -> None:
    done = run("inspect", tmp_path / "no.safetensors", "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["error"]["code"] == "not_found"
    assert "no.safetensors" in done.stderr
    assert "no .safetensors file in this directory" in run("inspect", tmp_path).stderr
