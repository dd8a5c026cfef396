"""Every program of ours ends with status 0, at every try, with and without torch.distributed.

It leaves no process behind, and its standard error is empty.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("program.py")
ALL = bool(os.environ.get("SHARDOW_ALL"))
TRIES = 30 if ALL else 1


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run(kind: str, ranks: int, folder: Path, program: Path = PROGRAM, **variables: str) -> list[tuple[int, str]]:
    """(exit status, standard error) of each rank."""
    shared = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    started = [
        subprocess.Popen(
            [sys.executable, program, kind, folder],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    ended = []
    for process in started:
        _, said = process.communicate(timeout=120)
        ended.append((process.returncode, said))
    return ended


@pytest.mark.timeout(30 + 60 * TRIES)
@pytest.mark.parametrize(("kind", "ranks"), [("plain", 1), ("ddp", 2), ("fsdp2", 2)] if ALL else [("fsdp2", 2)])
def test_ends_cleanly_every_time(kind: str, ranks: int, tmp_path: Path) -> None:
    for attempt in range(TRIES):
        for rank, ended in enumerate(run(kind, ranks, tmp_path / str(attempt))):
            assert ended == (0, ""), (attempt, rank)


@pytest.mark.timeout(180)
def test_ranks_that_wait_for_a_late_one_print_nothing(tmp_path: Path) -> None:
    """Torch warns wherever a wait of its store ends in vain; half an hour of waiting was thousands of lines."""
    assert run("fsdp2", 2, tmp_path, LATE="6" if ALL else "1.5") == [(0, "")] * 2


def test_a_rank_ends_when_its_keys_are_erased(tmp_path: Path) -> None:
    """Else torch's function comes back to an interpreter that has ended, which aborts the process now and then."""
    assert run("plain", 2, tmp_path, PROGRAM.with_name("left_behind.py")) == [(0, "")] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["-1-verdict", "0-lane-0", "1-lane-0"]
