"""A store whose host can be stopped: a fixture."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_HOST = """
import socket, sys, torch, torch.distributed as dist
listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
uv = torch.__version__ >= (2, 7)  # before, libuv's store took no listener
store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(),
 use_libuv=uv)
print(port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def host() -> Iterator[tuple[int, int]]:
    """(pid, port) of a process that keeps a store and does nothing else."""
    process = subprocess.Popen([sys.executable, "-c", _HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.pid, int(process.stdout.readline())
    process.kill()
    process.wait()


def stop(pid: int) -> None:
    """Returns when none of the process's threads runs: the signal's first takes it to the others, which may answer
    until then.
    """
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + 60
    while any(state(task) != "T" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < until, "the store's host does not stop"
        time.sleep(1e-3)


def state(task: Path) -> str:
    """A letter, as proc(5) gives it; it follows the command's name, in brackets."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0]
