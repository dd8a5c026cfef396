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
ABANDONED = ["dead_rank", "stopped_store", "save_under_way", "dropped_call", "keys_to_erase"]
ABANDONED += ["fork_beside_save", "fork_without_group"]


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
        _, printed = process.communicate(timeout=120)
        ended.append((process.returncode, without_name_lookups(printed)))
    return ended


def without_name_lookups(printed: str) -> str:
    """Drops torch's warning that the machine's name server has no name for an address: any program may get it."""
    lines = printed.splitlines(keepends=True)
    return "".join(line for line in lines if "[c10d] The hostname of the client socket cannot be retrieved" not in line)


@pytest.mark.timeout(30 + 60 * TRIES)
@pytest.mark.parametrize(("kind", "ranks"), [("plain", 1), ("ddp", 2), ("fsdp2", 2)] if ALL else [("fsdp2", 2)])
def test_ends_cleanly_every_time(kind: str, ranks: int, tmp_path: Path) -> None:
    for attempt in range(TRIES):
        for rank, ended in enumerate(run(kind, ranks, tmp_path / str(attempt))):
            assert ended == (0, ""), (attempt, rank)


@pytest.mark.timeout(180)
def test_ranks_that_wait_for_a_late_one_print_nothing(tmp_path: Path) -> None:
    """Torch warns wherever a wait of its store ends in vain; half an hour of waiting was thousands of lines."""
    assert run("fsdp2", 2, tmp_path, LATE="6" if ALL else "0.5") == [(0, "")] * 2


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kinds", [[kind] for kind in ABANDONED] if ALL else [ABANDONED], ids="-".join)
def test_ranks_that_leave_something_behind_end_cleanly_every_time(kinds: list[str], tmp_path: Path) -> None:
    tries = "100" if ALL else "2"
    program = [sys.executable, PROGRAM.with_name("abandoned.py"), tries, tmp_path, *kinds]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    # Where torch's function came back to an interpreter that has ended, it would now and then abort the process.
    for folder in tmp_path.glob("keys_to_erase-*"):
        assert sorted(path.name for path in folder.iterdir()) == ["-1-verdict", "0-lane-0", "1-lane-0"]
