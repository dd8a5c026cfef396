"""`shardow diff` against numpy in float64, in every dtype."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import foreign, ours, run, tensors, told, told_json
from safetensors.torch import save_file

FLOATS = [
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
]
WHOLE = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool"]


def written(path: Path, values: dict[str, torch.Tensor]) -> Path:
    save_file(values, path)
    return path


def values_of(a: Path, b: Path, name: str = "x") -> dict[str, Any]:
    found = told_json("diff", a, b, status=1)
    return next(one["values"] for one in found["tensors"] if one["name"] == name)


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-12)


def agrees(found: dict[str, Any], a: torch.Tensor, b: torch.Tensor) -> None:
    x, y = a.double().numpy().ravel(), b.double().numpy().ravel()
    apart = np.abs(x - y)
    assert found["numbers"] == x.size
    assert found["differing"] == (x != y).sum()
    assert close(found["max"], apart.max())
    assert close(found["rms"], np.sqrt((apart**2).mean()))
    assert close(found["relative"], np.linalg.norm(apart) / np.linalg.norm(x))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 7, 8, 9, 1023, 1025, 300_000])
def test_floats(tmp_path: Path, dtype: str, size: int) -> None:
    kind = getattr(torch, dtype)
    torch.manual_seed(size)
    a = torch.randn(size).to(kind)
    b = (a.float() + torch.randn(size) * (torch.rand(size) < 0.3) + (torch.arange(size) == size // 2)).to(kind)
    agrees(
        values_of(written(tmp_path / "a.safetensors", {"x": a}), written(tmp_path / "b.safetensors", {"x": b})), a, b
    )


@pytest.mark.parametrize("dtype", WHOLE)
def test_whole_numbers(tmp_path: Path, dtype: str) -> None:
    a = torch.arange(100).remainder(2 if dtype == "bool" else 100).to(getattr(torch, dtype))
    b = a.clone()
    b[50] = 1
    agrees(
        values_of(written(tmp_path / "a.safetensors", {"x": a}), written(tmp_path / "b.safetensors", {"x": b})), a, b
    )


def exactly(found: dict[str, Any], a: list[Any], b: list[Any]) -> None:
    x, apart = (
        [Fraction(one) for one in a],
        [abs(Fraction(one) - Fraction(other)) for one, other in zip(a, b, strict=True)],
    )
    norms = [math.isqrt(int(sum(one**2 for one in all) * 10**900)) for all in (apart, x)]  # times 1e450
    assert found["differing"] == sum(one != 0 for one in apart)
    assert found["max"] == float(max(apart))
    assert close(found["rms"], float(Fraction(norms[0], 10**450) / Fraction(math.sqrt(len(a)))))
    assert close(found["relative"], float(Fraction(*norms)))


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_whole_numbers_that_float64_does_not_have(tmp_path: Path, dtype: str) -> None:
    """Between 2^53 and 2^64 it has every 2048th."""
    most = np.iinfo(dtype).max
    a = [most, most - 1, 2**53 + 1, 2**60, 5, 0] * 1000
    b = [most - 1, most - 1, 2**53, 2**60 + 1, 2**61, most] * 1000
    paths = [
        foreign(tmp_path / f"{name}.safetensors", {"x": np.array(value, dtype)}) for name, value in (("a", a), ("b", b))
    ]
    exactly(values_of(*paths), a, b)
    one = [
        foreign(tmp_path / f"{name}.safetensors", {"x": np.array(value[:1], dtype)})
        for name, value in (("a", a), ("b", b))
    ]
    assert "1 of 1 numbers, max 1, rms 1" in told("diff", *one, status=1)


def test_powers_of_two_in_eight_bits(tmp_path: Path) -> None:
    a = torch.arange(255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    b = a.view(torch.uint8).clone()
    b[127] = 128
    b = b.view(torch.float8_e8m0fnu)
    agrees(
        values_of(written(tmp_path / "a.safetensors", {"x": a}), written(tmp_path / "b.safetensors", {"x": b})), a, b
    )


def test_whole_numbers_beside_floats(tmp_path: Path) -> None:
    a = np.array([2**64 - 1, 2**60 + 1, 7], np.uint64)
    b = np.array([2.0**64, 2.0**60, 7.0])
    found = values_of(
        foreign(tmp_path / "a.safetensors", {"x": a}),
        foreign(tmp_path / "b.safetensors", {"x": b}),
    )
    assert (found["differing"], found["max"]) == (2, 1)


@pytest.mark.parametrize("size", [1e-320, 1e-300, 1e-170, 1e-160, 1.0, 1e160, 1e170, 1e300])
@pytest.mark.parametrize("beside", [0.0, 1e-250, 1.0, 1e250])
def test_numbers_whose_squares_float64_does_not_have(tmp_path: Path, size: float, beside: float) -> None:
    a = [beside] + [size * (1 + i / 7) for i in range(9999)]
    b = [beside] + [one * 1.5 for one in a[1:]]
    paths = [foreign(tmp_path / f"{name}.safetensors", {"x": np.array(value)}) for name, value in (("a", a), ("b", b))]
    exactly(values_of(*paths), a, b)


@pytest.mark.parametrize(
    ("one", "other"),
    [("float32", "bfloat16"), ("float64", "float16"), ("int32", "float32"), ("float8_e4m3fn", "float32")],
)
def test_another_dtype_differs_whatever_the_values(tmp_path: Path, one: str, other: str) -> None:
    a = torch.arange(20).to(getattr(torch, one))
    b = a.to(getattr(torch, other))
    found = values_of(written(tmp_path / "a.safetensors", {"x": a}), written(tmp_path / "b.safetensors", {"x": b}))
    assert found["differing"] == 0
    b[3] = 9
    agrees(values_of(tmp_path / "a.safetensors", written(tmp_path / "b.safetensors", {"x": b})), a, b)


def test_complex_numbers_count_twice(tmp_path: Path) -> None:
    a = torch.randn(3000, dtype=torch.complex64)
    b = a.clone()
    b[7] += 2j
    found = values_of(written(tmp_path / "a.safetensors", {"x": a}), written(tmp_path / "b.safetensors", {"x": b}))
    agrees(found, torch.view_as_real(a), torch.view_as_real(b))


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    inf, nan = math.inf, math.nan
    a = torch.tensor([nan, nan, inf, inf, 1.0, 2.0, 0.0, -inf])
    b = torch.tensor([nan, 1.0, inf, -inf, nan, 2.5, -0.0, -inf])
    found = values_of(written(tmp_path / "a.safetensors", {"x": a}), written(tmp_path / "b.safetensors", {"x": b}))
    assert (found["differing"], found["not_finite"], found["max"]) == (4, 3, 0.5)
    assert close(found["relative"], 0.5 / math.sqrt(1 + 4))
    a, b = torch.tensor([0.0, 1e308], dtype=torch.float64), torch.tensor([2.0, -1e308], dtype=torch.float64)
    found = values_of(written(tmp_path / "a.safetensors", {"x": a}), written(tmp_path / "b.safetensors", {"x": b}))
    assert (found["differing"], found["not_finite"], found["max"]) == (2, 1, 2)  # 2e308 is infinite in float64
    a[1] = b[1]
    found = values_of(written(tmp_path / "a.safetensors", {"x": a - a}), written(tmp_path / "b.safetensors", {"x": b}))
    assert found["relative"] is None  # infinite


def test_equal_bytes_are_equal_whatever_they_are(tmp_path: Path) -> None:
    values = {
        "nan": torch.full((3,), math.nan),
        "packed": torch.zeros(4, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "none": torch.zeros(0),
    }
    a, b = written(tmp_path / "a.safetensors", values), written(tmp_path / "b.safetensors", values)
    assert told("diff", a, b) == "equal, 3 tensors\n"
    values["packed"] = torch.ones(4, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert "packed: other bytes" in told("diff", a, written(b, values), status=1)


def test_layout_makes_no_difference(tmp_path: Path) -> None:
    values = tensors()
    assert "equal" in told(
        "diff", ours(tmp_path / "dir", values, max_shard_size=50_000), foreign(tmp_path / "one.safetensors", values)
    )


def test_names_and_shapes(tmp_path: Path) -> None:
    a = foreign(tmp_path / "a.safetensors", {"both": np.zeros(4), "shape": np.zeros((2, 3)), "old": np.zeros(1)})
    b = foreign(tmp_path / "b.safetensors", {"both": np.zeros(4), "shape": np.zeros((3, 2)), "new": np.zeros(1)})
    text = told("diff", a, b, status=1)
    assert f"only in {a}: old" in text
    assert f"only in {b}: new" in text
    assert "shape: shape [2, 3] and [3, 2]" in text
    assert "1 of 2 common tensors differ" in text


def test_tensors_are_compared_by_name_whatever_their_files_are_called(tmp_path: Path) -> None:
    values = tensors()
    file = foreign(tmp_path / "a.safetensors", values)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        foreign(tmp_path / name / f"{name}.safetensors", values)
    assert (
        told("diff", file, tmp_path / "one") == told("diff", tmp_path / "one", tmp_path / "two") == "equal, 3 tensors\n"
    )
    first, *others = values
    foreign(tmp_path / "two" / "two.safetensors", {first: values[first]})
    foreign(tmp_path / "two" / "more.safetensors", {name: values[name] for name in others})
    assert told("diff", file, tmp_path / "two") == "equal, 3 tensors\n"


def test_files_whose_tensors_have_the_same_names_are_told_apart(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        for i, name in enumerate(("ema-0.9", "ema-0.99")):
            foreign(tmp_path / folder / f"{name}.safetensors", tensors(i))
    assert told("diff", tmp_path / "one", tmp_path / "two") == "equal, 6 tensors\n"
    done = run("diff", tmp_path / "one", tmp_path / "two" / "ema-0.9.safetensors")
    assert done.returncode == 2
    assert (
        "2 files with the same names of tensors in them, ema-0.9.safetensors, ema-0.99.safetensors; name one of them"
        in done.stderr
    )
    model = foreign(tmp_path / "one" / "model.safetensors", tensors(2))
    text = told("diff", tmp_path / "one", model, status=1)
    assert text.count("only in") == 6
    assert "0 of 3 common tensors differ" in text


def test_what_lies_beside_models_is_compared_where_one_side_has_averages_too(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        foreign(tmp_path / folder / "model.safetensors", tensors(0))
        foreign(tmp_path / folder / "optimizer.safetensors", {"moment": np.full(3, float(folder == "two"), np.float32)})
    foreign(tmp_path / "one" / "ema.safetensors", tensors(1))
    for sides in (("one", "two"), ("two", "one")):
        text = told("diff", *(tmp_path / side for side in sides), status=1)
        assert text.count("only in") == 3
        assert "1 of 4 common tensors differ" in text


def test_the_worst_come_first(tmp_path: Path) -> None:
    a = {f"t{i:02}": np.ones(10) for i in range(20)}
    b = {name: value * (1 + int(name[1:]) / 100) for name, value in a.items()}
    one, other = foreign(tmp_path / "a.safetensors", a), foreign(tmp_path / "b.safetensors", b)
    shown = [line.split(":")[0] for line in told("diff", one, other, "--worst", "3", status=1).splitlines()]
    assert shown == ["t19", "t18", "t17", "... and 16 more (--worst 0 shows all)", "19 of 20 common tensors differ"]
    assert told("diff", one, other, "--worst", "0", status=1).count("relative") == 19
    done = run("diff", one, other, "--worst", "-1")
    assert done.returncode == 2
    assert "--worst: -1 is no number of tensors: give 0 for all of them, or more" in done.stderr


def test_threads_change_nothing(tmp_path: Path) -> None:
    a, b = (
        foreign(tmp_path / "a.safetensors", tensors(0, (3_000_000,))),
        foreign(tmp_path / "b.safetensors", tensors(1, (3_000_000,))),
    )
    once = told("diff", "--json", "--threads", "1", a, b, status=1)
    for threads in (2, 4, 4, 7):
        assert told("diff", "--json", "--threads", threads, a, b, status=1) == once


def test_trouble_is_more_than_one(tmp_path: Path) -> None:
    path = foreign(tmp_path / "a.safetensors", tensors())
    assert run("diff", path, tmp_path / "b.safetensors").returncode == 3
    (tmp_path / "b.safetensors").write_bytes(b"nothing")
    assert run("diff", path, tmp_path / "b.safetensors").returncode == 4


@pytest.mark.parametrize("at", [0, 700_000, 1_999_999])
def test_what_is_equal_counts_where_a_tensor_differs_elsewhere(tmp_path: Path, at: int) -> None:
    values = {"x": torch.randn(2_000_000), "same": torch.randn(300_000)}
    other = {"x": values["x"].clone(), "same": values["same"]}
    other["x"][at] += 1
    a, b = written(tmp_path / "a.safetensors", values), written(tmp_path / "b.safetensors", other)
    agrees(values_of(a, b), values["x"], other["x"])
    of_threads = [told_json("diff", a, b, "--threads", str(threads), status=1) for threads in (1, 4, 7, 1, 4, 7)]
    assert all(one == of_threads[0] for one in of_threads)
