"""Ranks as processes: started here, watched here, and ended here, whatever happens.

``run(world, fn, *args)`` calls ``fn(*args)`` in ``world`` fresh processes that share a gloo process group, and returns rank 0's result.
The first rank that fails ends all of them.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

GRACE = 20.0  # seconds that a rank has to end after its work is done


class RankError(RuntimeError):
    """A rank failed: its message, and its traceback in ``details``."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


def run(world: int, fn: Callable[..., Any], *args: Any) -> Any:
    import torch.distributed as dist

    _quiet(world)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the launcher's, so that it outlives every rank
    context = multiprocessing.get_context("spawn")
    job = pickle.dumps((fn, args))  # in plain bytes: torch would share tensors through files that end with their process
    processes: list[BaseProcess] = []
    pipes: dict[Connection, int] = {}
    try:
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(theirs, rank, world, store.port, job), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes[ours] = rank
        result = _collect(pipes)
        _join(processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return result


def _quiet(world: int) -> None:
    """Inherited by the ranks: their share of the cores, and no chatter of C++ libraries on the terminal."""
    os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // world))
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"


def _collect(pipes: dict[Connection, int]) -> Any:
    """Rank 0's answer, when all have one. A pipe that ends without an answer is a rank that died."""
    pending, result = dict(pipes), None
    while pending:
        for pipe in wait(list(pending)):
            rank = pending.pop(pipe)
            try:
                fine, answer = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RankError(f"rank {rank} died without a word (out of memory?)") from None
            if not fine:
                raise RankError(f"rank {rank}: {answer[0]}", answer[1])
            if rank == 0:
                result = answer
    return result


def _join(processes: list[BaseProcess]) -> None:
    deadline = time.monotonic() + GRACE
    for rank, process in enumerate(processes):
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode != 0:
            how = "did not end" if process.exitcode is None else f"ended with status {process.exitcode}"
            raise RankError(f"rank {rank} {how} after its work was done")


def _rank(pipe: Connection, rank: int, world: int, port: int, job: bytes) -> None:
    """One rank's life. Ctrl-C is the launcher's to handle. Nothing distributed may live at interpreter exit, or torch sometimes aborts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        import torch
        import torch.distributed as dist

        warnings.filterwarnings("ignore", module=r"torch\.")  # its notes to itself about gloo, FSDP on a CPU and checkpoints
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        with _silent():
            dist.init_process_group("gloo", store=dist.PrefixStore("ranks", store), rank=rank, world_size=world)
        fn, args = pickle.loads(job)
        result = fn(*args)
        answer = (True, result if rank == 0 else None)
        del result
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        answer = (False, (f"{type(error).__name__}: {error}", traceback.format_exc()))
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()
    if not answer[0]:
        time.sleep(GRACE)  # the launcher ends all ranks at once, before the others fill the terminal with their own view of it


class _silent:
    """gloo greets on standard output, from C++, whatever the log level."""

    def __enter__(self) -> None:
        sys.stdout.flush()
        self._kept = os.dup(1)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)

    def __exit__(self, *_: object) -> None:
        os.dup2(self._kept, 1)
        os.close(self._kept)
