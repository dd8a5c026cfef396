"""examples/cpp on threads: it learns, and a run that was killed goes on on other ranks with the same bits."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from built import CMAKE, ROOT, contents, install, named, run, succeed
from safetensors import safe_open

Train = Callable[..., Any]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """trainer(ranks, run, flags...), built as its README says, without LibTorch."""
    build = tmp_path_factory.mktemp("trainer")
    options = [f"-DCMAKE_PREFIX_PATH={install(tmp_path_factory)}", f"-DDIGITS_PYTHON={sys.executable}"]
    configured = succeed(CMAKE, "-S", ROOT / "examples" / "cpp", "-B", build, *options)
    assert "trainer_processes is left out: it needs LibTorch" in configured
    succeed(CMAKE, "--build", build)
    return lambda ranks, path, *flags: run(build / "trainer", build / "digits.bin", path, "--ranks", ranks, *flags)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, trainer: Train) -> tuple[str, Path]:
    """The output of a run on 2 ranks that nothing stops, and its files."""
    path = tmp_path_factory.mktemp("straight") / "run"
    done = trainer(2, path)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, path


def test_it_learns_and_its_averages_are_better(straight: tuple[str, Path]) -> None:
    accuracies = re.findall(r"accuracy ([\d.]+), of averages \(([\d.]+)\) ([\d.]+)", straight[0])
    assert [decay for _, decay, _ in accuracies] == ["0.9", "0.99"]
    assert all(float(plain) > 0.85 for plain, _, _ in accuracies)
    assert float(accuracies[0][2]) > 0.85
    assert sorted(contents(straight[1])) == ["ema-0.9.safetensors", "ema-0.99.safetensors", "training.safetensors"]


def test_any_number_of_ranks_ends_with_the_same_bytes(
    straight: tuple[str, Path], trainer: Train, tmp_path: Path
) -> None:
    for ranks in (1, 3, 4):
        assert trainer(ranks, tmp_path / str(ranks)).returncode == 0
        assert contents(tmp_path / str(ranks)) == contents(straight[1]), f"{ranks} ranks"


def test_a_save_that_was_killed_is_tried_again_and_the_run_goes_on_on_three_ranks(
    straight: tuple[str, Path], trainer: Train, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    killed = trainer(2, path, "--die-while-saving", 200)
    assert "a new start" in killed.stderr
    assert killed.returncode == -9
    with safe_open(named(path)["ema-0.9.safetensors"], "pt") as saved:
        assert '"step":150' in saved.metadata()["shardow.state"].replace(" ", ""), "the checkpoint before is whole"
    resumed = trainer(3, path, "--until", 230)
    assert resumed.returncode == 0
    assert "a new start" not in resumed.stderr
    assert trainer(1, path).returncode == 0
    assert contents(path) == contents(straight[1])
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"], "nothing of the killed save is left"


def test_options_that_it_lacks_and_no_data_are_errors(trainer: Train, tmp_path: Path) -> None:
    wrong = trainer(2, tmp_path / "run", "--untl", 3)
    assert (wrong.returncode, wrong.stderr) == (2, "--untl is no option\n")
