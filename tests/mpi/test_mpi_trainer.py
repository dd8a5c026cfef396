"""examples/cpp: it learns, its averages are what Python computes, and a run that was killed goes on on other ranks with
the same bits.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from built import CMAKE, ROOT, succeed
from safetensors import safe_open

Train = Callable[..., Any]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, installed: Path, mpirun: Any) -> Train:
    """trainer(ranks, run, flags...), built as its README says."""
    build = tmp_path_factory.mktemp("trainer")
    given = [f"-DCMAKE_PREFIX_PATH={installed}", f"-DDIGITS_PYTHON={sys.executable}"]
    succeed(CMAKE, "-S", ROOT / "examples" / "cpp", "-B", build, *given)
    succeed(CMAKE, "--build", build)
    return lambda ranks, run, *flags: mpirun(ranks, build / "trainer", build / "digits.bin", run, *flags)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, trainer: Train) -> tuple[str, Path]:
    """What a run on 2 ranks says that nobody stops, and its files."""
    run = tmp_path_factory.mktemp("straight") / "run"
    done = trainer(2, run)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, run


def files(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(run.iterdir())}


def test_it_learns_and_its_averages_are_better(straight: tuple[str, Path]) -> None:
    told = re.findall(r"accuracy ([\d.]+), of averages \(([\d.]+)\) ([\d.]+)", straight[0])
    assert [decay for _, decay, _ in told] == ["0.9", "0.99"]
    assert all(float(plain) > 0.85 for plain, _, _ in told)
    assert float(told[0][2]) > 0.85
    assert sorted(files(straight[1])) == ["ema-0.9.safetensors", "ema-0.99.safetensors", "training.safetensors"]


def test_any_number_of_ranks_ends_with_the_same_bytes(
    straight: tuple[str, Path], trainer: Train, tmp_path: Path
) -> None:
    for ranks in (1, 3, 4):
        assert trainer(ranks, tmp_path / str(ranks)).returncode == 0
        assert files(tmp_path / str(ranks)) == files(straight[1]), f"{ranks} ranks"


def test_a_save_that_was_killed_is_tried_again_and_the_run_goes_on_on_three_ranks(
    straight: tuple[str, Path], trainer: Train, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    killed = trainer(2, run, "--die-while-saving", 200)
    assert "a new start" in killed.stdout
    assert killed.returncode != 0
    assert "signal 9" in killed.stdout + killed.stderr
    with safe_open(run / "ema-0.9.safetensors", "pt") as saved:
        assert '"step":150' in saved.metadata()["shardow.state"].replace(" ", ""), "the checkpoint before is whole"
    resumed = trainer(3, run, "--until", 230)
    assert resumed.returncode == 0
    assert "a new start" not in resumed.stdout
    assert trainer(1, run).returncode == 0
    assert files(run) == files(straight[1])
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "nothing of the killed save is left"
