"""`shardow convert`: the same tensors in other files, bit for bit unless another dtype is asked for."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.command import measured
from command import COMMAND, flip, foreign, ours, run, sparse, tensors, told, told_json
from safetensors.torch import load_file, save_file

import shardow


def test_layout_and_back_gives_the_same_bytes(tmp_path: Path) -> None:
    one = ours(tmp_path / "one.safetensors", tensors())
    found = told_json("convert", one, "-o", tmp_path / "many", "--max-shard-size", "20KB")
    assert len(found["files"]) == 2
    assert found["tensors"] == 3
    assert "1 file" in told("convert", tmp_path / "many", "-o", tmp_path / "back.safetensors")
    assert (tmp_path / "back.safetensors").read_bytes() == one.read_bytes()
    told("verify", tmp_path / "many", tmp_path / "back.safetensors")


def test_every_dtype_that_there_is_goes_through(tmp_path: Path) -> None:
    kinds = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)] + [
        "bool",
        "float8_e4m3fn",
        "float8_e5m2",
        "complex64",
    ]
    kinds += ["bfloat16", "float16", "float32", "float64"]
    values = {
        kind: torch.arange(600_001).remainder(2 if kind == "bool" else 100).to(getattr(torch, kind)) for kind in kinds
    }
    values |= {
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 3),
        "packed": torch.arange(64, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    }
    save_file(values, tmp_path / "a.safetensors")
    told("convert", tmp_path / "a.safetensors", "-o", tmp_path / "b.safetensors")
    assert "equal, 19 tensors" in told("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    told("verify", tmp_path / "b.safetensors")


@pytest.mark.parametrize(
    ("spelled", "dtype"),
    [(name, name) for name in ("bfloat16", "float16", "float64")] + [("BF16", "bfloat16"), ("fp16", "float16")],
)
def test_floating_tensors_are_cast_as_torch_casts_them(tmp_path: Path, spelled: str, dtype: str) -> None:
    values = {"w": torch.randn(300_000), "i": torch.arange(5)}
    save_file(values, tmp_path / "a.safetensors")
    told("convert", tmp_path / "a.safetensors", "-o", tmp_path / "b.safetensors", "--dtype", spelled)
    back = load_file(tmp_path / "b.safetensors")
    assert torch.equal(back["w"], values["w"].to(getattr(torch, dtype)))
    assert torch.equal(back["i"], values["i"])


def test_an_ema_stays_one(tmp_path: Path) -> None:
    model = torch.nn.Linear(30, 20)
    ema = shardow.EMA(model, decay=0.9)
    for _ in range(5):
        ema.update()
    ema.save(tmp_path / "ema.safetensors")
    told("convert", tmp_path / "ema.safetensors", "-o", tmp_path / "dir", "--max-shard-size", "1KB")
    told("convert", tmp_path / "dir", "-o", tmp_path / "again.safetensors")
    again = shardow.EMA(model, decay=0.5)
    with pytest.warns(UserWarning, match="schedule"):
        again.load(tmp_path / "again.safetensors")
    assert again.stats()["step"] == 5


def test_new_names(tmp_path: Path) -> None:
    values = tensors()
    foreign(tmp_path / "a.safetensors", {f"module.{name}": value for name, value in values.items()})
    told(
        "convert",
        tmp_path / "a.safetensors",
        "-o",
        tmp_path / "b.safetensors",
        "--rename",
        "module.layer.0.weight=first",
        "--rename",
        "module.*=*",
    )
    back = load_file(tmp_path / "b.safetensors")
    assert sorted(back) == ["first", "layer.1.weight", "layer.2.weight"]
    assert np.array_equal(back["first"].numpy(), values["layer.0.weight"])
    assert np.array_equal(back["layer.2.weight"].numpy(), values["layer.2.weight"])


def test_a_rule_is_applied_once(tmp_path: Path) -> None:
    foreign(tmp_path / "a.safetensors", {"module.module.x": np.zeros(3)})
    told("convert", tmp_path / "a.safetensors", "-o", tmp_path / "b.safetensors", "--rename", "module.*=*")
    assert list(load_file(tmp_path / "b.safetensors")) == ["module.x"]


@pytest.mark.parametrize(
    ("size", "files"), [("8KB", 3), ("8KiB", 2), ("8192", 2), ("8191B", 3), ("8.192 kb", 2), ("1G", 1)]
)
def test_files_are_as_large_as_that_and_no_larger(tmp_path: Path, size: str, files: int) -> None:
    path = foreign(tmp_path / "a.safetensors", {name: np.zeros(1024, np.float32) for name in "abc"})
    assert len(told_json("convert", path, "-o", tmp_path / "b", "--max-shard-size", size)["files"]) == files


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--rename", "typo=x"], 2, "fits no tensor"),
        (["--rename", "layer.*=x"], 2, "would both be called 'x'"),
        (["--rename", "nothing"], 2, "FROM=TO"),
        (["--max-shard-size", "5 parsec"], 2, "no size"),
        (["--max-shard-size", "1KB"], 2, "goes with a directory"),
        (["--max-shard-size", "5GB"], 2, "goes with a directory"),  # also where one file would do
        (["--max-shard-size", ""], 2, "no size"),
        (["--dtype", "int8"], 2, "--dtype"),
    ],
)
def test_what_does_not_go_is_said_before_anything_is_written(
    tmp_path: Path, words: list[str], status: int, message: str
) -> None:
    path = foreign(tmp_path / "a.safetensors", tensors())
    done = run("convert", path, "-o", tmp_path / "b.safetensors", *words)
    assert done.returncode == status
    assert message in done.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["a.safetensors"]


def test_several_emas_are_no_model(tmp_path: Path) -> None:
    shardow.EMA(torch.nn.Linear(3, 2), decay=[0.9, 0.99]).save(tmp_path / "ema")
    done = run("convert", tmp_path / "ema", "-o", tmp_path / "b.safetensors")
    assert done.returncode == 2
    assert "ema-0.9.safetensors, ema-0.99.safetensors; name one of them" in done.stderr


def test_what_is_corrupt_is_not_passed_on(tmp_path: Path) -> None:
    path = ours(tmp_path / "a.safetensors", tensors(sizes=(5_000_000, 7)))
    flip(path, -3_000_000)
    (tmp_path / "b.safetensors").write_bytes(b"old")
    done = run("convert", path, "-o", tmp_path / "b.safetensors")
    assert done.returncode == 4
    assert "'layer.0.weight': its bytes have the CRC-32" in done.stderr
    assert (tmp_path / "b.safetensors").read_bytes() == b"old"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]


def test_onto_itself(tmp_path: Path) -> None:
    values = tensors()
    path = ours(tmp_path / "a.safetensors", values)
    told("convert", path, "-o", path, "--dtype", "bfloat16")
    assert {value.dtype for value in load_file(path).values()} == {torch.bfloat16}
    told("convert", path, "-o", path, "--rename", "layer.*=l.*")
    assert sorted(load_file(path)) == sorted(name.replace("layer", "l") for name in values)


def test_threads_change_nothing(tmp_path: Path) -> None:
    path = ours(tmp_path / "a.safetensors", tensors(sizes=(3_000_000, 70_000, 5)))
    for threads in (1, 4):
        told("convert", path, "-o", tmp_path / f"{threads}.safetensors", "--dtype", "bfloat16", "--threads", threads)
    assert (tmp_path / "1.safetensors").read_bytes() == (tmp_path / "4.safetensors").read_bytes()


@pytest.mark.parametrize("verb", ["convert", "average"])
@pytest.mark.parametrize("what", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_what_was_there(tmp_path: Path, verb: str, what: signal.Signals) -> None:
    path = sparse(tmp_path / "a.safetensors", 20 * 10**9, "BF16", checksum=False)
    (tmp_path / "b.safetensors").write_bytes(b"old")
    default = lambda: signal.signal(what, signal.SIG_DFL)  # noqa: E731
    words = [COMMAND, verb, path, "-o", tmp_path / "b.safetensors"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=default) as process:
        while not list(tmp_path.glob(".b*")):  # until it writes
            time.sleep(0.02)
        time.sleep(0.3)
        process.send_signal(what)
        out, error = process.communicate(timeout=60)
    assert (process.returncode, out, error) == (-what, b"", b"")
    assert (tmp_path / "b.safetensors").read_bytes() == b"old"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize("verb", ["convert", "average"])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, verb: str) -> None:
    path = ours(tmp_path / "a.safetensors", tensors(sizes=(3_000_000,)))
    (tmp_path / "b.safetensors").write_bytes(b"old")
    limited = lambda: (  # noqa: E731
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
        resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, 5 << 20)),
    )
    words = [COMMAND, verb, path, "-o", tmp_path / "b.safetensors", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, preexec_fn=limited)
    assert done.returncode == 6
    assert json.loads(done.stdout)["error"]["code"] == "io"
    assert (tmp_path / "b.safetensors").read_bytes() == b"old"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize("verb", ["convert", "average"])
@pytest.mark.parametrize("json_words", [[], ["--json"]])
def test_an_error_after_it_was_written_says_so(tmp_path: Path, verb: str, json_words: list[str]) -> None:
    path, out = ours(tmp_path / "a.safetensors", tensors()), tmp_path / "b.safetensors"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [COMMAND, verb, path, "-o", out, *json_words], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 7
    assert f"No space left on device; {out} had been written by then, and is whole" in done.stderr
    told("verify", out)
    assert "nothing was published" not in told("--help")


@pytest.mark.parametrize("verb", ["convert", "average"])
def test_memory_is_bounded_whatever_the_size(tmp_path: Path, verb: str) -> None:
    size = (4000 if os.environ.get("SHARDOW_ALL") else 300) * 10**6
    path = sparse(tmp_path / "a.safetensors", size, "BF16", checksum=False)
    empty = measured([str(COMMAND), "--version"])[1]
    words = [str(COMMAND), verb, str(path), "-o", str(tmp_path / "b.safetensors")]
    for more in (["--dtype", "float32"], ["--threads", "64"]):
        assert measured([*words, *more])[1] - empty < 64 << 20
    assert (tmp_path / "b.safetensors").stat().st_size > size


@pytest.mark.parametrize("verb", ["convert", "average"])
def test_configuration_and_tokenizer_go_with_the_weights(tmp_path: Path, verb: str) -> None:
    blobs, model, out = tmp_path / "blobs", tmp_path / "model", tmp_path / "out"
    blobs.mkdir()
    (blobs / "5f1d").write_bytes(b'{"architectures": []}')  # as the cache of huggingface_hub has it
    ours(model / "model.safetensors", tensors())
    (model / "config.json").symlink_to(blobs / "5f1d")
    taken = {
        "tokenizer.json": b"\xff{}",
        "tokenizer.model": bytes(300),
        "vocab.txt": b"",
        "generation_config.json": b"{}",
    }
    others = {"trainer_state.json": b"{}", "optimizer.pt": b"", "README.md": b"of the first model"}
    for name, text in {**taken, **others}.items():
        (model / name).write_bytes(text)
    (model / "tokenizer_parts").mkdir()
    assert run(verb, model, "-o", out).returncode == 0
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.suffix != ".safetensors"} == {
        **taken,
        "config.json": b'{"architectures": []}',
    }
    assert not (out / "config.json").is_symlink()
    (out / "config.json").write_text("another")
    (out / "vocab.txt").unlink()
    assert run(verb, model, "-o", out).returncode == 0
    assert (out / "config.json").read_text() == "another"
    assert (out / "vocab.txt").exists()
    assert run(verb, model, "-o", tmp_path / "one.safetensors").returncode == 0
    (model / "config.json").unlink()
    assert run(verb, model, "-o", tmp_path / "plain").returncode == 0
    assert [path.name for path in (tmp_path / "plain").iterdir()] == ["model.safetensors"]
