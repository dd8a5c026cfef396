"""Ranks of MPI that die or sleep: the others get an error, the same for all, by the deadline; never a hang."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from built import BUILD
from safetensors.torch import load_file

RECOVERY = ("--enable-recovery",)  # mpirun leaves the others alive
GRACE = 1.0  # of the test's program, where rank 0 dies


def outcomes(
    mpirun: Any, victim: int, how: str, at: int, path: Path = Path("unused")
) -> dict[int, list[tuple[float, str]]]:
    """By rank: how long each of its rounds took, and how it ended."""
    done = mpirun(3, BUILD / "mpi_deaths_test", victim, how, at, options=(*RECOVERY, "-x", f"SHARDOW_PATH={path}"))
    found: dict[int, list[tuple[float, str]]] = defaultdict(list)
    for rank, seconds, outcome in re.findall(r"rank (\d) round \d after ([\d.]+) s: (.*)", done.stdout):
        found[int(rank)].append((float(seconds), outcome))
    return found


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", ["before", "leave"])
def test_a_rank_that_died_between_two_rounds_is_a_timeout_on_all_others(mpirun: Any, victim: int, how: str) -> None:
    found = outcomes(mpirun, victim, how, 1)
    assert len(found[victim]) == 1
    for rank in {0, 1, 2} - {victim}:
        words = [outcome for _, outcome in found[rank]]
        missing = f"all_gather(): rank {victim} did not come before the deadline; every rank must make this call"
        assert words == ["complete"] + [missing] * 3


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("microseconds", [0, 30, 60, 100, 200, 400] if os.environ.get("SHARDOW_ALL") else [0, 100])
def test_a_rank_that_is_killed_in_a_round_is_an_error_by_the_deadline(
    mpirun: Any, victim: int, microseconds: int
) -> None:
    found = outcomes(mpirun, victim, "within", microseconds)
    survivors = [found[rank] for rank in sorted({0, 1, 2} - {victim})]
    assert all(len(rounds) == 5 for rounds in survivors), "nobody hangs, and nobody is ended"
    assert all(seconds < 0.5 + GRACE + 10 for rounds in survivors for seconds, _ in rounds[1:])
    if victim != 0:
        assert len({tuple(outcome for _, outcome in rounds) for rounds in survivors}) == 1, (
            "rank 0 tells all survivors alike"
        )


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    "microseconds", [0, 300, 600, 1000, 2000, 4000] if os.environ.get("SHARDOW_ALL") else [0, 1000]
)
def test_a_rank_that_is_killed_in_a_save_leaves_a_whole_file_and_an_error(
    mpirun: Any, victim: int, microseconds: int, tmp_path: Path
) -> None:
    path = tmp_path / "w.safetensors"
    found = outcomes(mpirun, victim, "save", microseconds, path)
    for rank in {0, 1, 2} - {victim}:
        words = [outcome for _, outcome in found[rank]]
        assert words[0] == "complete"
        assert len(words) == 5
        errors = [word != "complete" for word in words]
        assert errors[-1]
        assert errors == sorted(errors), "and each save that follows is an error"
        assert all(seconds < 2 * (0.5 + GRACE) + 10 for seconds, _ in found[rank][1:])
    assert set(load_file(path)["w"].flatten().tolist()) in [{0.0}, {1.0}, {2.0}, {3.0}]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_sleeps_past_the_deadline_finds_the_others_verdicts(mpirun: Any, victim: int) -> None:
    found = outcomes(mpirun, victim, "sleep", 1)
    words = [[outcome == "complete" for _, outcome in found[rank]] for rank in range(3)]
    assert words[0] == words[1] == words[2]
    assert words[0][0]
    assert not words[0][1]
    assert words[0][-1], "they are in step again"


def test_without_recovery_mpirun_ends_all(mpirun: Any) -> None:
    done = mpirun(3, BUILD / "mpi_deaths_test", 1, "before", 1)
    assert done.returncode != 0
    assert "signal 9" in done.stdout + done.stderr
