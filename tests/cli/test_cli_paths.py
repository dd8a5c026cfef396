"""Paths and names that are not what one expects: no UTF-8, as long as can be. In JSON they are as surrogateescape has
them.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import COMMAND, foreign, ours, run, tensors
from safetensors.numpy import load_file


def said(*words: str | bytes | Path, status: int = 0) -> Any:
    done = subprocess.run([COMMAND, *words, "--json"], capture_output=True)
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout.decode())  # it is UTF-8, whatever the paths are


@pytest.fixture
def odd(tmp_path: Path) -> bytes:
    folder = os.fsencode(tmp_path) + b"/d\xff\xc3"
    os.mkdir(folder)
    path = folder + b"/x\xfe\xed\xa0\x80.safetensors"
    os.rename(foreign(tmp_path / "plain.safetensors", tensors(0, (7, 5000))), path)
    return path


def test_every_verb_takes_a_path_of_any_bytes(tmp_path: Path, odd: bytes) -> None:
    found = said("inspect", odd)
    assert os.fsencode(found["path"]) == odd
    assert [os.fsencode(one) for one in found["checkpoints"][0]["files"]] == [odd]
    assert os.fsencode(said("verify", odd)["paths"][0]["files"][0]["path"]) == odd
    out = os.path.dirname(odd) + b"/out\xfd.safetensors"
    assert [os.fsencode(one) for one in said("convert", odd, "-o", out)["files"]] == [out]
    assert said("diff", odd, out)["equal"]
    done = subprocess.run([COMMAND, "inspect", os.path.dirname(odd) + b"/none\xff"], capture_output=True)
    assert b"none\\xff" in done.stderr


def test_such_a_path_is_averaged_and_its_name_is_in_the_header(tmp_path: Path, odd: bytes) -> None:
    other = foreign(tmp_path / "other.safetensors", tensors(1, (7, 5000)))
    found = said("average", other, odd, "-o", tmp_path / "mean.safetensors", "--steps", "20,10")
    assert [os.fsencode(one["name"]) for one in found["inputs"]] == [odd, os.fsencode(other)]
    merged = json.loads(said("inspect", tmp_path / "mean.safetensors")["checkpoints"][0]["metadata"]["shardow.merge"])
    assert [os.fsencode(one["name"]) for one in merged["inputs"]] == [odd, os.fsencode(other)]
    assert len(load_file(tmp_path / "mean.safetensors")) == 2  # the reference reads it
    later = foreign(tmp_path / "step-30.safetensors", tensors(2, (7, 5000)))
    again = said(
        "average", tmp_path / "mean.safetensors", later, "-o", tmp_path / "again.safetensors", "--curve", "linear"
    )
    assert [one["step"] for one in again["inputs"]] == [20, 30]  # that of the newest, out of that metadata


def test_names_that_a_rename_would_make_equal_are_shown_whole(tmp_path: Path) -> None:
    path = ours(tmp_path / "a.safetensors", {"a\0b": np.zeros(3), "a\0c": np.zeros(3)})
    done = run("convert", path, "-o", tmp_path / "b.safetensors", "--rename", "a*=x\x7f")
    assert "'a\\x00b' and 'a\\x00c' would both be called 'x\\x7f'" in done.stderr
