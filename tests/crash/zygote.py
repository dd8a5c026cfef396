"""A process that has imported torch, and forks the ranks of every round.

So a rank begins in milliseconds, and dies without harm to the next round.

The zygote itself never communicates and has one thread, so that its forks are whole. Each round is handled by a process
forked for it, which forks the ranks, in a process group of their own, and answers when all have ended; rounds may run
at once. What a rank's calls were is read from memory that it shares, also after its death (die.c).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Lock
from typing import NoReturn

SLOTS, SLOT_BYTES = 4096, 64  # die.c's


@dataclass(frozen=True)
class Save:
    """One round: ranks 0 to ``world`` - 1 save a version.

    ``victim`` dies at its call number ``fatal``, and with ``everyone`` all die at that instant; negative: nobody does.
    """

    name: str  # no other round's
    port: int  # of the store that ranks meet in
    world: int
    path: Path
    version: int
    timeout: float
    max_shard_size: int | None
    victim: int
    fatal: int
    everyone: bool


@dataclass(frozen=True)
class Outcome:
    """Of a rank: ``said`` is "saved", the name of an exception's type, or "killed"."""

    said: str
    message: str
    seconds: float  # in save()
    calls: list[str]  # that die.c counted


class Zygote:
    def __init__(self, die: Path) -> None:
        self._control, theirs = socket.socketpair()
        shared = {
            "LD_PRELOAD": str(die),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            # before a warning of a timeout, torch looks up the names of addresses, which can take seconds
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, env={**os.environ, **shared}, pass_fds=[theirs.fileno()])
        self._lock = Lock()

    def run(self, save: Save, patience: float = 60.0) -> list[Outcome]:
        """By rank. From any thread. Raises where a rank has not ended within ``patience`` seconds; it is killed
        then."""
        ours, theirs = Pipe()
        with ours:
            with theirs, self._lock:
                socket.send_fds(self._control, [b"r"], [theirs.fileno()])
            ours.send(save)
            assert ours.poll(patience), f"{save}: a rank hangs"
            try:
                outcomes: list[Outcome] = ours.recv()
            except EOFError:
                raise AssertionError(f"{save}: the round's process died; standard error says why") from None
            return outcomes

    def stop(self) -> None:
        self._control.close()
        assert self._process.wait(30) == 0


def serve(control: socket.socket) -> None:
    import torch

    torch.set_num_threads(1)
    _import_what_a_rank_imports()
    gc.collect()
    gc.freeze()  # else every rank's collections copy all of this process's pages
    assert len(os.listdir("/proc/self/task")) == 1, "a fork of several threads is not whole"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the rounds' processes
    while fds := socket.recv_fds(control, 1, 1)[1]:
        asker = Connection(fds[0])
        if os.fork() == 0:
            control.close()
            _to_the_end(functools.partial(handle, asker))
        asker.close()


def _import_what_a_rank_imports() -> None:
    """Torch imports much of itself at first use, for a second; a process of its own finds out what."""
    names, theirs = Pipe(duplex=False)

    def use() -> None:
        import torch.distributed as dist
        import versions

        import shardow

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with tempfile.TemporaryDirectory() as folder:
            shardow.save(versions.on_this_rank(0), Path(folder) / "model.safetensors")
        theirs.send(list(sys.modules))

    pid = os.fork()
    if pid == 0:
        _to_the_end(use)
    theirs.close()
    for name in names.recv():
        with contextlib.suppress(ImportError):  # of modules that are made, not found
            importlib.import_module(name)
    os.waitpid(pid, 0)


def handle(asker: Connection) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    save: Save = asker.recv()
    ranks: list[_Rank] = []
    for number in range(save.world):
        ranks.append(_Rank(save, number, ranks[0].pid if ranks else 0, asker))
    waiting = {rank.answer: rank for rank in ranks}
    while waiting:
        ready = wait([asker, *waiting])
        if asker in ready:  # whoever asked has given up, or is dead
            os.killpg(ranks[0].pid, signal.SIGKILL)
            return
        for one in ready:
            waiting.pop(one).receive()  # type: ignore[call-overload]
    asker.send([rank.outcome() for rank in ranks])


class _Rank:
    """A process that makes one save."""

    def __init__(self, save: Save, number: int, process_group: int, asker: Connection) -> None:
        self.answer, theirs = Pipe(duplex=False)
        self._log = mmap.mmap(-1, SLOTS * SLOT_BYTES)
        self._received: tuple[str, str, float] | None = None
        self.pid = os.fork()
        if self.pid == 0:
            asker.close()
            os.setpgid(0, process_group)
            _to_the_end(lambda: theirs.send(make(save, number, self._log)))
        os.setpgid(self.pid, process_group)
        theirs.close()

    def receive(self) -> None:
        with contextlib.suppress(EOFError):
            self._received = self.answer.recv()

    def outcome(self) -> Outcome:
        _, status = os.waitpid(self.pid, 0)
        calls = [
            self._log[at : at + SLOT_BYTES].rstrip(b"\0").decode()
            for at in range(0, len(self._log), SLOT_BYTES)
            if self._log[at]
        ]
        if self._received is not None:
            return Outcome(*self._received, calls)
        ended = os.waitstatus_to_exitcode(status)
        return Outcome("killed" if ended == -signal.SIGKILL else f"ended with {ended}", "", 0.0, calls)


def make(save: Save, rank: int, log: mmap.mmap) -> tuple[str, str, float]:
    """(what was said, message, seconds)"""
    import torch.distributed as dist
    import versions

    import shardow

    store = dist.TCPStore("127.0.0.1", save.port, is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(save.name, store), rank=rank, world_size=save.world)
    state = versions.on_this_rank(save.version)
    metadata = {"version": str(save.version)}
    slots = (ctypes.c_char * len(log)).from_buffer(log)
    die = ctypes.CDLL(None)  # finds what was preloaded
    dist.barrier()
    die.arm(
        str(save.path.parent).encode(),
        ctypes.c_long(save.fatal if rank == save.victim else -1),
        int(save.everyone),
        slots,
        ctypes.c_long(SLOTS),
    )
    began = time.monotonic()
    try:
        shardow.save(state, save.path, max_shard_size=save.max_shard_size, metadata=metadata, timeout=save.timeout)
        said, message = "saved", ""
    except shardow.Error as error:
        said, message = type(error).__name__, str(error)
    seconds = time.monotonic() - began
    die.disarm()
    return said, message, seconds


def _to_the_end(work: Callable[[], object]) -> NoReturn:
    """Of a forked process, which goes nowhere else."""
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    import zygote  # under the name that the pickled classes have

    zygote.serve(socket.socket(fileno=int(sys.argv[1])))
