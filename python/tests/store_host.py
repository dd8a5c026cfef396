"""A store whose host can be stopped: a fixture."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

_HOST = """
import socket, sys, torch.distributed as dist
listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
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
